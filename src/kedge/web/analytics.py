"""The figures of the API: the responses of a range of time, added up. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from kedge.store import ResponseRow
from kedge.web.chains import is_fallback
from kedge.web.models import AnalyticsShape, CountShape, UsageShape

_WELL = frozenset({"completed", "lost"})


def analytics_of(rows: Sequence[ResponseRow], since: float, until: float) -> AnalyticsShape:
    """Add up some responses."""
    firsts = [row.first_token_seconds for row in rows if row.first_token_seconds is not None]
    costs = [row.cost for row in rows if row.cost is not None]
    chained = sum(bool(row.anchor) for row in rows)
    return AnalyticsShape(
        since=since,
        until=until,
        responses=len(rows),
        conversations=len({row.conversation for row in rows}),
        chained=chained,
        full=len(rows) - chained,
        failed=sum(row.status not in _WELL for row in rows),
        healed=sum(bool(row.healed) for row in rows),
        lost=sum(row.status == "lost" for row in rows),
        fallbacks=_counted(row.reason for row in rows if is_fallback(row)),
        statuses=_counted(row.status for row in rows),
        sent_bytes=sum(row.sent_bytes for row in rows),
        saved_bytes=sum(row.saved_bytes for row in rows),
        sent_blocks=sum(row.sent_blocks for row in rows),
        saved_blocks=sum(row.saved_blocks for row in rows),
        usage=UsageShape(
            input_tokens=_sum(row.input_tokens for row in rows),
            cached_tokens=_sum(row.cached_tokens for row in rows),
            output_tokens=_sum(row.output_tokens for row in rows),
            reasoning_tokens=_sum(row.reasoning_tokens for row in rows),
        ),
        cost=sum(costs) if costs else None,
        median_first_token_seconds=median(firsts) if firsts else None,
        median_seconds=median(row.seconds for row in rows) if rows else None,
        longest_chain=max((row.depth for row in rows), default=0),
    )


def _counted(names: Iterable[str]) -> list[CountShape]:
    return [CountShape(name=name, count=count) for name, count in Counter(names).most_common()]


def _sum(values: Iterable[int | None]) -> int:
    return sum(value or 0 for value in values)
