"""Choose the response that a request continues: the longest prefix that is proved and available, then the newest.

The candidates are the records of a Turn, for the planner, or the responses that an index has for the prefixes of a
request, for a chained client.
"""

from collections.abc import Iterable

import msgspec

from kedge.planning.anchors import (
    AnchorRecord,
    Reason,
    RejectedAnchor,
    matches_prefix,
    unavailable_reason,
)
from kedge.planning.digests import PrefixIndex


class AnchorCheck(msgspec.Struct):
    """Checks whether a candidate is proved and available.

    Attributes:
        index: The digests of the blocks that would be sent.
        scope: The provider, endpoint and account that the request is for.
        now: The current time, in seconds since the epoch.
        max_depth: The number of responses of a chain that the server remembers; None for no limit.
        not_before: Records created before this time count as lost.
        barrier: The position of the newest compaction among the blocks, if there is one; blocks before it would
            not be sent any more.
    """

    index: PrefixIndex
    scope: str
    now: float
    max_depth: int | None = None
    not_before: float = 0.0
    barrier: int | None = None

    def rejection_reason(self, record: AnchorRecord) -> Reason | None:
        """Return why a record cannot be used as the anchor, or None if it can."""
        reason = unavailable_reason(record, self.scope, self.now, self.max_depth, self.not_before)
        if reason:
            return reason
        if record.block_count <= 0:
            return "unproven"
        if not self.matches(record):
            return "changed"
        return None

    def matches(self, record: AnchorRecord) -> bool:
        """Return whether the record matches a prefix of the blocks that would be sent."""
        return record.barrier == self.barrier and matches_prefix(record, self.index)


def select_anchor(
    candidates: Iterable[AnchorRecord], check: AnchorCheck
) -> tuple[AnchorRecord | None, tuple[RejectedAnchor, ...]]:
    """Return the first candidate that can be used, and those before it that cannot.

    Args:
        candidates: The records to try: the longest prefix first, then the newest.
        check: Whether a record can be used.
    """
    rejected: list[RejectedAnchor] = []
    for record in candidates:
        reason = check.rejection_reason(record)
        if reason is None:
            return record, tuple(rejected)
        rejected.append(RejectedAnchor(record.response_id, reason, record))
        if reason == "too_deep" and check.matches(record):
            # A shallower ancestor would remain the anchor, with a delta that grows with every request.
            break
    return None, tuple(rejected)
