"""Events: past facts while an Engine works, the same for every provider.

A decoder (``kedge.events.responses`` for the Responses API) turns what a provider streams into the
events below; the assembler turns them into blocks; whoever watches a run sees them pass. ``Event`` is
the root of them all, so that engines and middleware can add facts of their own; ``StreamEvent`` is the
closed union of what a decoder may say, for a ``match`` that ends in ``assert_never``.

Two conventions: an id that a provider did not give is an empty string, and an ``output_index`` that it
did not give is ``-1``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.turns import Block

PartKind = Literal["text", "refusal", "summary", "reasoning"]
"""What the pieces of a streamed part add up to."""

AnomalyKind = Literal[
    "malformed", "gap", "late", "unresolved_call", "contradiction", "replaced_text"
]
"""Problems of a stream that is read to its end nevertheless.

The last two do not make a response incomplete, but its blocks may differ from what the server stored:
see ``Outcome.anchor_problem``.
"""


class Event:
    """A past fact while an Engine works; see the subclasses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one response; adding two gives the tokens of both."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.total_tokens + other.total_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """What a server says about a response at its start and again at its end.

    ``previous_response_id`` is the server's echo of the anchor it used. ``echoed`` tells whether the
    member was there at all: a ``None`` that was echoed is a server that forgot; a ``None`` that was
    not is a server that does not say.
    """

    response_id: str = ""
    model: str = ""
    created_at: float | None = None
    previous_response_id: str | None = None
    echoed: bool = False
    status: str = ""
    response: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, hash=False)
    """The response as the provider wrote it."""


@dataclass(frozen=True, slots=True)
class ResponseStarted(ResponseFacts, Event):
    """The server has accepted the request and begun a response."""


@dataclass(frozen=True, slots=True)
class ItemStarted(Event):
    """An item of output was begun; tool calls say ``ToolCallStarted`` instead."""

    type: str
    item_id: str = ""
    output_index: int = -1


@dataclass(frozen=True, slots=True)
class TextDelta(Event):
    """The model wrote some text."""

    delta: str
    item_id: str = ""
    output_index: int = -1
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class RefusalDelta(Event):
    """The model wrote some words of a refusal."""

    delta: str
    item_id: str = ""
    output_index: int = -1
    content_index: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta(Event):
    """The model thought aloud: a piece of a ``summary`` or of the ``reasoning`` itself."""

    delta: str
    kind: Literal["summary", "reasoning"] = "summary"
    item_id: str = ""
    output_index: int = -1
    index: int = 0


@dataclass(frozen=True, slots=True)
class PartCompleted(Event):
    """A part is whole; its text wins over the joined deltas."""

    kind: PartKind
    text: str
    item_id: str = ""
    output_index: int = -1
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallStarted(Event):
    """The model began to call a tool; every later event of the call bears the same ``call_id``.

    ``fallback`` says why ``call_id`` is not the provider's (``missing``, ``empty``, ``duplicate``);
    it is empty when all is well.
    """

    call_id: str
    name: str
    item_id: str = ""
    output_index: int = -1
    custom: bool = False
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta(Event):
    """The model wrote some of a call's arguments."""

    call_id: str
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallRenamed(Event):
    """The provider's own ``call_id`` came late; the call went by ``was`` until now."""

    call_id: str
    was: str


@dataclass(frozen=True, slots=True)
class ToolCallCompleted(Event):
    """A call is whole: id, name and arguments are final."""

    call_id: str
    name: str
    arguments: str
    item_id: str = ""
    output_index: int = -1
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ItemCompleted(Event):
    """An item of output is whole, as the provider wrote it (a call's missing id filled in)."""

    item: Mapping[str, Any] = field(hash=False)
    output_index: int = -1


@dataclass(frozen=True, slots=True)
class ResponseCompleted(ResponseFacts, Event):
    """The response is finished. ``output`` lists its items, or is ``None`` if the server did not."""

    usage: Usage | None = None
    output: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False, hash=False)


@dataclass(frozen=True, slots=True)
class ResponseIncomplete(ResponseFacts, Event):
    """The response stopped before its end; ``reason`` as the server gave it."""

    reason: str = ""
    usage: Usage | None = None
    output: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False, hash=False)


@dataclass(frozen=True, slots=True)
class ResponseFailed(ResponseFacts, Event):
    """The server gave up on the response."""

    code: str = ""
    message: str = field(default="", repr=False)
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class StreamFailed(Event):
    """The server sent an error in place of more of the response."""

    code: str = ""
    message: str = field(default="", repr=False)
    param: str = ""
    kind: str = ""
    status: int | None = None


@dataclass(frozen=True, slots=True)
class AnomalyNoted(Event):
    """Something was wrong with the stream; ``detail`` holds names and numbers, never content."""

    kind: AnomalyKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OpaqueEvent(Event):
    """Something the provider said that Kedge passes on without reading it."""

    type: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, hash=False)


StreamEvent = (
    ResponseStarted
    | ItemStarted
    | TextDelta
    | RefusalDelta
    | ReasoningDelta
    | PartCompleted
    | ToolCallStarted
    | ToolArgumentsDelta
    | ToolCallRenamed
    | ToolCallCompleted
    | ItemCompleted
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | StreamFailed
    | AnomalyNoted
    | OpaqueEvent
)
"""Everything that a decoder may say."""

TerminalEvent = ResponseCompleted | ResponseIncomplete | ResponseFailed
"""The events that end a response."""


PARTIAL = "partial"
"""Metadata key: this block was not whole when its stream ended."""

OutcomeStatus = Literal["completed", "incomplete", "failed", "cut"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one response's stream."""

    status: OutcomeStatus
    blocks: tuple[Block, ...] = ()
    response_id: str = ""
    model: str = ""
    usage: Usage | None = None
    created_at: float | None = None
    previous_response_id: str | None = None
    echoed: bool = False
    """Whether the server said anything about ``previous_response_id``."""
    reason: str = ""
    """Why the response is ``incomplete``, in the server's word."""
    code: str = ""
    """Of a failure: the server's code, or ``damaged_stream`` when we found the stream wanting."""
    message: str = ""
    """Of a failure: what the server said, or what we found."""
    anchor_problem: str = ""
    """Why a completed response must not become an anchor; empty if nothing is known against it."""

    @property
    def completed(self) -> bool:
        """Whether the response is whole and may become an anchor."""
        return self.status == "completed"

    @property
    def whole_blocks(self) -> tuple[Block, ...]:
        """The blocks without those that were cut short."""
        return tuple(block for block in self.blocks if not block.metadata.get(PARTIAL))
