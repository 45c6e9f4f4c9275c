"""Anchors: what is written down about a stored response, and when it may be used.

Only records prove. A record holds the digest of the whole context that its response remembers; if the
Turn has that digest at that length, the server's memory is a prefix of the Turn. Everything else in
the record says whether the server can still be asked for it.
"""

from dataclasses import dataclass
from typing import Literal

from kedge.planning.digests import PrefixIndex
from kedge.turns.immutable import immutable

Status = Literal["completed", "incomplete", "failed", "cancelled", "lost"]
Reason = Literal[
    "scope",
    "incomplete",
    "unstored",
    "expired",
    "too_deep",
    "split",
    "changed",
    "unproven",
    "lost",
]

REASONS: dict[Reason, str] = {
    "scope": "it lives with another provider, endpoint or account",
    "incomplete": "it never finished",
    "unstored": "the server was asked not to store it",
    "expired": "the server no longer keeps it, or soon will not",
    "too_deep": "its chain is longer than this server is known to remember",
    "split": "its blocks no longer stand together",
    "changed": "the conversation before or in it was edited since",
    "unproven": "there is no record of what it remembers",
    "lost": "the server said that it is gone",
}
"""Every reason to refuse a candidate, in plain words."""

DEFAULT_RETENTION = 30 * 24 * 3600.0
"""Seconds for which a provider keeps a response, unless told otherwise."""
EXPIRY_MARGIN = 3600.0
"""Seconds before its expiry from which on a response is no longer relied on."""


@immutable
@dataclass(frozen=True, slots=True)
class AnchorRecord:
    """What is known about one stored response.

    ``digest`` covers the first ``block_count`` covered blocks of the Turn: everything the response
    remembers, its own output included. ``depth`` counts the responses of its chain up to and including
    itself; ``root_created_at`` is when the first of them was made.

    ``barrier`` is the place, among the covered blocks, of the compaction item with which the server's
    memory begins; ``None`` if it begins with the conversation. ``derived`` are the digests of the
    reasoning and compaction items of its own output: what it made from all it remembers.
    """

    response_id: str
    scope: str
    digest: str
    block_count: int
    depth: int = 1
    root_created_at: float = 0.0
    status: Status = "completed"
    stored: bool = True
    created_at: float = 0.0
    expires_at: float | None = None
    barrier: int | None = None
    derived: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Nothing to check: a record that says something wrong proves nothing."""


@dataclass(frozen=True, slots=True)
class RejectedAnchor:
    """A candidate that was refused, and why."""

    response_id: str
    reason: Reason
    record: AnchorRecord

    def __str__(self) -> str:
        return f"{self.response_id}: {REASONS[self.reason]}"


def matches_prefix(record: AnchorRecord, index: PrefixIndex, covered: int) -> bool:
    """Whether the first blocks are exactly what the record's response remembers."""
    count = record.block_count
    return 0 < count <= covered and index.digest(count) == record.digest


def is_expired(record: AnchorRecord, now: float) -> bool:
    """Whether the server may have dropped the response, or the first one of its chain, by ``now``.

    Whether a server that dropped the root still serves its descendants is not known, so a chain is
    relied on for as long as its root is kept.
    """
    if record.expires_at is None:
        return False
    retention = record.expires_at - record.created_at
    margin = min(EXPIRY_MARGIN, max(retention, 0.0) / 20)
    root_expires = (record.root_created_at or record.created_at) + retention
    return now >= min(record.expires_at, root_expires) - margin


def unavailable_reason(
    record: AnchorRecord, *, scope: str, now: float, max_depth: int | None = None
) -> Reason | None:
    """Why the server cannot be asked for this response, whatever the Turn says."""
    if not record.response_id:
        return "unproven"
    if record.scope != scope:
        return "scope"
    if record.status == "lost":
        return "lost"
    if record.status != "completed":
        return "incomplete"
    if not record.stored:
        return "unstored"
    if is_expired(record, now):
        return "expired"
    if max_depth is not None and record.depth > max_depth:
        return "too_deep"
    return None
