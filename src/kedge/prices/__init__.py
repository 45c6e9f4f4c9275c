"""Prices: compute the cost of a response from a dated table, which users can extend.

    cost(usage, "openai", "gpt-5.1")  # dollars, or None if the price is unknown

A model without a price has no cost: nothing is guessed. The table is a file of the package; the file
named by ``KEDGE_PRICES`` takes precedence.
"""

from kedge.prices.prices import (
    Price,
    Prices,
    cache_savings,
    cost,
    current_prices,
    load_prices,
    sum_costs,
)

__all__ = ["Price", "Prices", "cache_savings", "cost", "current_prices", "load_prices", "sum_costs"]
