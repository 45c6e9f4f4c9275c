"""The record of one request: what was sent and why, and what came back.

A record is made when a request is sent, and completed when it ends. A `Reply` has the records of its requests, a store
keeps them, and every view shows them. While a response is generated in the background, the record of its request is
in the Turn that waits for it, so that the run that receives the answer completes the same record.
"""

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from kedge.events.types import Usage
from kedge.planning import (
    AnchorRecord,
    SentRequest,
    TokenCounts,
    find_running,
    get_state,
    set_state,
)
from kedge.planning.plan import send_label
from kedge.turns import Turn

ResponseStatus = Literal[
    "completed", "incomplete", "running", "unknown", "failed", "refused", "cut", "cancelled", "lost"
]
"""The outcome of a request; ``running`` means that the answer was still generated in the background, ``unknown`` that
it was not found there since, ``cancelled`` that the user stopped it."""


ANCHOR_MEMBERS = (
    "scope", "stored", "created_at", "expires_at", "digest", "block_count", "depth",
    "root_created_at", "barrier", "derived", "counted",
)  # fmt: skip
"""The members that a record and its anchor have in common."""
MAX_REJECTED = 8
"""The maximum number of rejected candidates in a record."""
MAX_OMITTED = 1_000
"""The maximum number of positions of omitted blocks in a record."""


class RejectedCandidate(NamedTuple):
    """A response that could not be continued, the reason, and a sentence about it."""

    response_id: str
    reason: str
    words: str


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and the response of the model or the failure.

    ``node`` is the node of the response. ``anchor`` is the response that it was chained on; ``reason`` is
    why it was not chained. Tokens are ``None`` if the server did not count them, ``cost`` if the
    price is unknown; ``predicted_cached_tokens`` is ``None`` without a prediction, and ``cache_savings``
    is in dollars. ``digest`` and the members after it prove what the server remembers; see
    `AnchorRecord`. ``expires_at`` respects the retention of the conversation.
    """

    provider: str
    scope: str
    provider_response_id: str = ""
    model: str = ""
    mode: str = ""
    anchor: str = ""
    reason: str = ""
    healed: str = ""
    sent_blocks: int = 0
    sent_bytes: int = 0
    """The size of the request body, with tool definitions and settings; 0 if the request was not sent."""
    saved_blocks: int = 0
    saved_bytes: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost: float | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    status: ResponseStatus = "completed"
    error: str = ""
    """The error as text, without secrets; empty for an answer."""
    error_code: str = ""
    """The server's error code, or else the HTTP status; empty for an answer, and without a response."""
    is_resent: bool = False
    """Whether the request failed and was sent again, so that its failure does not fail the question."""
    created_at: float = 0.0
    expires_at: float | None = None
    stored: bool = True
    digest: str = ""
    block_count: int = 0
    depth: int = 0
    root_created_at: float = 0.0
    barrier: int | None = None
    derived: tuple[str, ...] = ()
    counted: TokenCounts | None = None
    lost_reason: str = ""
    """Why the server no longer has the response; empty if it has."""
    unusable_reason: str = ""
    """Why later requests cannot continue the response although it is complete; see ``REASONS``. Empty if they can."""
    predicted_cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    cache_savings: float | None = None
    settings: str = ""
    """The settings of the request, such as the temperature, as a JSON object; empty if there were none."""
    results_by_id: int = 0
    """Tool results since the newest answer that are matched to their calls by the provider's ids."""
    results_by_fallback: int = 0
    """Those that are matched by another id, because the provider sent no usable one."""
    results_unmatched: int = 0
    """Results without a call, which ``repair`` removed before the request."""
    rejected: tuple[RejectedCandidate, ...] = ()
    """The first responses that would have saved more and could not be continued."""
    more_rejected: int = 0
    """The number of further responses that could not be continued."""
    start: int = 0
    """The position in the Turn, after its leading system text, from which blocks were sent."""
    omitted: tuple[int, ...] = ()
    """The positions of the blocks after it that were not sent: reasoning and compactions that are not proved."""
    sent_request: SentRequest | None = None
    """The request as it was sent, while the response is generated in the background: its answer is judged by it."""
    node: int = 0
    parent: int = 0
    conversation: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the record says what was sent; not if an answer was fetched without a record of its request."""
        return bool(self.mode)

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the request, so that it continued nothing."""
        return self.status == "refused"

    @property
    def send_label(self) -> str:
        """How the request was sent, or that it was refused; see `send_label`."""
        return send_label(self.reason, is_refused=self.is_refused)

    @property
    def full_bytes(self) -> int:
        """The size of a request body with the complete conversation."""
        return self.sent_bytes + self.saved_bytes

    @property
    def full_blocks(self) -> int:
        """The number of blocks of a request with the complete conversation."""
        return self.sent_blocks + self.saved_blocks

    @property
    def usage(self) -> Usage | None:
        """The tokens that the server counted; ``None`` if it did not."""
        if self.input_tokens is None:
            return None
        output = self.output_tokens or 0
        return Usage(
            self.input_tokens,
            self.cached_tokens or 0,
            output,
            self.reasoning_tokens or 0,
            self.input_tokens + output,
            self.cache_write_tokens or 0,
        )

    @property
    def anchor_record(self) -> AnchorRecord | None:
        """The anchor for this response; ``None`` if its context is not known."""
        if not self.digest:
            return None
        status: Any = self.unusable_reason or self.status
        if status in ("refused", "cut"):
            status = "failed"
        members = {name: getattr(self, name) for name in ANCHOR_MEMBERS}
        return AnchorRecord(self.provider_response_id, status=status, **members)


def sum_usage(records: Iterable[RequestRecord]) -> Usage:
    """Return the tokens of all requests."""
    counts = (record.usage for record in records if record.usage)
    return reduce(add, counts, Usage())


def keep_request(turn: Turn, record: RequestRecord) -> Turn:
    """Return a Turn that waits for a response in the background, with the record of its request; else the same Turn."""
    running = find_running(turn)
    if running is None:
        return turn
    pending = replace(
        record, status="running", error="", error_code="", node=0, parent=0, conversation=""
    )
    anchor = replace(running, request=msgspec.json.encode(pending).decode())
    return set_state(turn, get_state(turn).with_anchor(anchor))


def find_request(turn: Turn) -> RequestRecord | None:
    """Return the record of the request for the response in the background that a Turn waits for, if it has one."""
    running = find_running(turn)
    if running is None or not running.request:
        return None
    try:
        return _decode_record(running.request)
    except ValueError:  # written by another party
        return None


def find_sent_request(turn: Turn) -> SentRequest | None:
    """Return the request, as it was sent, for the response in the background that a Turn waits for.

    Returns:
        The request; None if it is not known, as for an id that another program has provided.
    """
    running = find_running(turn)
    record = find_request(turn)
    if running is None or record is None or record.sent_request is None:
        return None
    request = record.sent_request
    is_same = request.digest == running.digest and request.block_count == running.block_count
    if not is_same or not 0 <= request.start <= turn.body_length:
        return None
    return request


_decode_record = msgspec.json.Decoder(RequestRecord).decode
