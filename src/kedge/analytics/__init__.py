"""Analytics: what a store can tell about its chains, as plain values.

    found = await analyse(store, Selection(since=yesterday, model="gpt-5.1"))
    found.chains.longest, found.requests.chained, found.tokens.cached_share, found.cost.dollars

Everything is counted by the database, in one consistent reading, and is the same on SQLite and on
PostgreSQL. ``analyse_over_time`` gives the same in pieces of time, for charts.
"""

from kedge.analytics.analyse import analyse, analyse_over_time
from kedge.analytics.results import (
    Analytics,
    Branching,
    Bucket,
    Chains,
    Cost,
    Count,
    Latency,
    ModelStats,
    Requests,
    Selection,
    Tokens,
)

__all__ = [
    "Analytics",
    "Branching",
    "Bucket",
    "Chains",
    "Cost",
    "Count",
    "Latency",
    "ModelStats",
    "Requests",
    "Selection",
    "Tokens",
    "analyse",
    "analyse_over_time",
]
