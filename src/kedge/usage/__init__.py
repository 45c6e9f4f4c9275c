"""What a request uses: token counts, made offline, and prices from a dated table."""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr

if TYPE_CHECKING:
    from kedge.usage.prices import (
        Price,
        Prices,
        cache_savings,
        cost,
        current_prices,
        load_prices,
        sum_costs,
    )
    from kedge.usage.tokens import (
        DEFAULT_COUNTER,
        TiktokenCounter,
        TokenCounter,
        count_items,
        count_json,
        count_text,
    )
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "DEFAULT_COUNTER": "kedge.usage.tokens",
            "Price": "kedge.usage.prices",
            "Prices": "kedge.usage.prices",
            "TiktokenCounter": "kedge.usage.tokens",
            "TokenCounter": "kedge.usage.tokens",
            "cache_savings": "kedge.usage.prices",
            "cost": "kedge.usage.prices",
            "count_items": "kedge.usage.tokens",
            "count_json": "kedge.usage.tokens",
            "count_text": "kedge.usage.tokens",
            "current_prices": "kedge.usage.prices",
            "load_prices": "kedge.usage.prices",
            "sum_costs": "kedge.usage.prices",
        },
    )

__all__ = [
    "DEFAULT_COUNTER",
    "Price",
    "Prices",
    "TiktokenCounter",
    "TokenCounter",
    "cache_savings",
    "cost",
    "count_items",
    "count_json",
    "count_text",
    "current_prices",
    "load_prices",
    "sum_costs",
]
