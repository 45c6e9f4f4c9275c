"""Analytics: statistics about the requests and chains in a store, as plain values.

    analytics = await analyze(store, Selection(since=yesterday, model="gpt-5.1"))
    analytics.chains.longest, analytics.requests.chained, analytics.tokens.cached_share, analytics.cost.dollars

Everything is counted in one consistent read, with the same results on SQLite and PostgreSQL. The sums of complete
days are maintained by the store, so the cost does not grow with the number of responses.
`analyze_over_time` returns the same in intervals, for charts, and `analyze_conversations` a breakdown by conversation.

PostgreSQL returns sums of integers as decimals, and both databases return NULL where there are no rows, so
every number is converted to `int` or `float` here.
"""

from kedge.analytics.queries import analyze, analyze_conversations, analyze_over_time
from kedge.analytics.results import (
    Analytics,
    Branching,
    Bucket,
    CacheUse,
    Chains,
    ConversationStats,
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
    "CacheUse",
    "Chains",
    "ConversationStats",
    "Cost",
    "Count",
    "Latency",
    "ModelStats",
    "Requests",
    "Selection",
    "Tokens",
    "analyze",
    "analyze_conversations",
    "analyze_over_time",
]
