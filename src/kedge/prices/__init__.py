"""Prices: what a response cost, from a dated table that users can lay their own upon.

    cost(usage, "openai", "gpt-5.1")  # dollars, or None if nobody knows the price

A model without a price has no cost: a wrong sum is worse than none. The table is a file of the package;
the file that ``KEDGE_PRICES`` names comes before it.
"""

from kedge.prices.prices import Price, Prices, cost, current_prices, load_prices

__all__ = ["Price", "Prices", "cost", "current_prices", "load_prices"]
