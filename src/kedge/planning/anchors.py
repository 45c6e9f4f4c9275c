"""Anchor records: the properties of a stored response, and whether it can be used.

Only a record can prove what a response remembers. It has the digest of the complete context of its response; if
the Turn has that digest at that length, the server's memory is a prefix of the Turn. The other fields of the
record show whether the response is still available on the server.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from kedge.errors import InvalidSetting
from kedge.planning.digests import PrefixIndex, get_prefix_index
from kedge.turns import Turn

Status = Literal["completed", "incomplete", "running", "failed", "cancelled", "lost"]
"""The status of an anchor's response; ``running`` means that the server generates it in the background, ``lost``
that the server no longer has it."""
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
    "untrusted",
    "empty_input",
    "taken",
    "no_id",
]
"""The reason why a candidate is not used as the anchor of a request."""

REASONS: dict[Reason, str] = {
    "scope": "it belongs to another provider, endpoint, account or conversation object",
    "incomplete": "it was never completed",
    "unstored": "the server did not store it",
    "expired": "the server no longer stores it, or is about to drop it",
    "too_deep": "its chain is longer than this server is known to remember",
    "split": "its blocks are no longer contiguous",
    "changed": "the conversation before or in it was edited since",
    "unproven": "there is no record of what it remembers",
    "lost": "the server no longer has it",
    "untrusted": "it cannot be checked whether this server remembers it",
    "empty_input": "the server rejects a request that only names it, without new blocks",
    "taken": "another line of history continues its conversation object, or may have done so",
    "no_id": "it came without an id",
}
"""A description of every reason to reject a candidate."""

DEFAULT_RETENTION = 30 * 24 * 3600.0
"""Seconds for which a provider stores a response, unless configured otherwise."""
EXPIRY_MARGIN = 3600.0
"""Seconds before its expiry from which a response is no longer used."""


def validate_seconds(seconds: object, field: str) -> float | None:
    """Return a duration that is a finite number of seconds above 0, or None; else raise InvalidSetting."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidSetting(f"{field} must be a number of seconds, not {seconds!r}")
    if not 0 < seconds <= sys.float_info.max:
        raise InvalidSetting(f"{field} must be a finite number of seconds above 0, not {seconds}")
    return float(seconds)


def check_positive_int(name: str, value: int, *, maximum: int | None = None) -> int:
    """Return a setting, or raise ``InvalidSetting`` if it is not an integer between 1 and a maximum."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(f"{name} must be an integer of at least 1, not {value!r}")
    if maximum is not None and value > maximum:
        raise InvalidSetting(
            f"{name} must not be above its maximum: {value} is more than {maximum}"
        )
    return value


class TokenCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A server's token counts for one response: the base for judging a request chained on it.

    ``output`` is our count of the visible text that the response adds to the context. ``reasoning`` are tokens that
    ``input`` may contain and that the server may drop at the next user message; ``own_reasoning`` is not 0 if this
    response has such tokens. ``settings`` identifies the parameters that change a count.
    """

    input: int
    cached: int
    output: int
    reasoning: int
    own_reasoning: int
    settings: int


_decode_counts = msgspec.json.Decoder(TokenCounts).decode


def decode_token_counts(text: str | None) -> TokenCounts | None:
    """Return the counts in the text of a JSON array; malformed ones count as missing, which only delays a verdict."""
    try:
        return _decode_counts(text) if text else None
    except ValueError:
        return None


class AnchorRecord(msgspec.Struct, frozen=True):
    """The properties of one stored response.

    Nothing is checked, because a record with wrong values matches no Turn.

    Attributes:
        response_id: The id of the response.
        scope: The provider, endpoint and account that stores it.
        digest: The digest of the complete context of the response, including its output.
        block_count: The number of blocks of the Turn that the digest covers.
        depth: The number of responses in its chain, including itself.
        root_created_at: When the first response of the chain was created, in seconds since the epoch.
        status: Its status; ``lost`` if the server no longer has it.
        stored: Whether the server stored it.
        created_at: When it was created, in seconds since the epoch.
        expires_at: When the server drops it, or None.
        barrier: The position, among the covered blocks, of the compaction item that the server's memory
            starts with; None if it starts with the conversation.
        derived: The digests of the reasoning and compaction items of its output.
        counted: The server's token counts for it, if they can be compared with later ones.
        request: While it is generated in the background, the record of its request, as JSON; see ``keep_request``.
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
    counted: TokenCounts | None = None
    request: str = ""


class RejectedAnchor(msgspec.Struct, frozen=True):
    """A candidate that cannot be used.

    Attributes:
        response_id: The response.
        reason: Why it cannot be used; ``REASONS`` describes it.
        record: Its record.
    """

    response_id: str
    reason: Reason
    record: AnchorRecord

    def __str__(self) -> str:
        return f"{self.response_id}: {REASONS[self.reason]}"


def matches_prefix(record: AnchorRecord, index: PrefixIndex, covered: int) -> bool:
    """Return whether the Turn starts with exactly the context that the record describes."""
    count = record.block_count
    return 0 < count <= covered and index.digest(count) == record.digest


def select_matching(turn: Turn, records: Sequence[AnchorRecord]) -> list[AnchorRecord]:
    """Return the records of responses whose context is a prefix of the Turn."""
    if not records:
        return []
    index = get_prefix_index(turn)
    covered = index.count(len(turn) - turn.lead)
    return [record for record in records if matches_prefix(record, index, covered)]


class Expiring(Protocol):
    """A response with the times that decide until when it is relied on."""

    @property
    def created_at(self) -> float:
        """When it was created."""
        ...

    @property
    def expires_at(self) -> float | None:
        """When the server drops it, if it does."""
        ...

    @property
    def root_created_at(self) -> float:
        """When the first response of its chain was created; 0 if it is the first."""
        ...


def relied_until(response: Expiring) -> float | None:
    """Return the time until which a response may be used as an anchor; None if there is no end.

    Whether a server that dropped the first response of a chain still serves its descendants is not
    known, so a chain is relied on for as long as its root is stored. The margin prevents a request from
    arriving after the expiry; it is shorter if the retention is short.
    """
    if response.expires_at is None:
        return None
    retention = response.expires_at - response.created_at
    margin = min(EXPIRY_MARGIN, max(retention, 0.0) / 20)
    root_expires = (response.root_created_at or response.created_at) + retention
    return min(response.expires_at, root_expires) - margin


def is_expired(response: Expiring, now: float) -> bool:
    """Return whether a response, or the root of its chain, may be dropped by the server at ``now``.

    The planner, `kedge tree` and the page all use this definition of "expired".
    """
    until = relied_until(response)
    return until is not None and now >= until


def limit_expiry(
    created_at: float, expires_at: float | None, retention: float | None
) -> float | None:
    """Return when a response expires, if it is relied on for at most ``retention`` seconds."""
    if retention is None:
        return expires_at
    limit = created_at + retention
    return limit if expires_at is None else min(expires_at, limit)


def has_hidden_context(body: Mapping[str, Any]) -> bool:
    """Return whether the context of a response to this request has messages that the request does not.

    Those of a stored prompt are only known to the server. So such a request is sent in full, and its response is not
    continued: ``context(response)`` cannot be proved to equal a prefix of the conversation.
    """
    return body.get("prompt") is not None


def unavailable_reason(
    record: AnchorRecord,
    scope: str,
    now: float,
    max_depth: int | None = None,
    not_before: float = 0.0,
) -> Reason | None:
    """Return why a response is not available on the server, or None if it is."""
    if not record.response_id:
        return "unproven"
    if record.scope != scope:
        return "scope"
    if record.status == "lost" or record.created_at < not_before:
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
