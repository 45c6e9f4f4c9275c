"""The events of a response stream, which are the same for every provider.

A decoder (``kedge.wire.responses`` for the Responses API) parses the stream of a provider into the events
below, and the assembler builds blocks from them. A caller that streams a run receives both these and the
events of ``kedge.events.run``. ``Event`` is their common base class. ``StreamEvent`` is the closed union of
the events that a decoder emits, for a ``match`` that ends in ``assert_never``.

Two conventions: an id that the provider did not send is an empty string, and no two items of a response have the same
``output_index``. A decoder sets it in all events; ``-1`` is for events that are made otherwise.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import structs

from kedge.turns import Block
from kedge.turns.frozen_json import EMPTY, wrap_field

PartKind = Literal["text", "refusal", "summary", "reasoning"]
"""The kinds of streamed parts."""

AnomalyKind = Literal[
    "malformed", "gap", "late", "unresolved_call", "contradiction", "replaced_text"
]
"""Problems of a stream that do not stop its decoding.

The last two do not make a response incomplete, but its blocks may differ from what the server stored;
see ``Outcome.anchor_problem``.
"""


class Event(msgspec.Struct, frozen=True):
    """The base class of all events of a run: frozen Structs, whose content is not a part of their ``repr``."""

    hidden: ClassVar[tuple[str, ...]] = ()
    """The fields that are left out of the ``repr`` and the hash."""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in _select_visible(self))
        return f"{type(self).__name__}({', '.join(shown)})"

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in _select_visible(self))))


def _select_visible(event: Event) -> list[str]:
    return [name for name in event.__struct_fields__ if name not in event.hidden]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response; ``+`` adds the counts of two responses.

    Attributes:
        input_tokens: Tokens of the context that the model read, cached ones included.
        cached_tokens: Those of them that came from the provider's cache.
        output_tokens: Tokens that the model wrote, reasoning included.
        reasoning_tokens: Those of them that were reasoning.
        total_tokens: Input and output together.
        cache_write_tokens: Input tokens that were written to the provider's cache.
        context_tokens: Tokens of the context after the response, if the provider ran the model several times for
            it; 0 if these are input and output together. A sum has none.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0
    cache_write_tokens: int = 0
    context_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        counts = zip(structs.astuple(self), structs.astuple(other), strict=True)
        return structs.replace(Usage(*map(sum, counts)), context_tokens=0)


class ResponseFacts(Event, frozen=True):
    """Fields that a server sends with a response when it starts and again when it ends.

    Attributes:
        response_id: The id of the response.
        model: The model that generates it, as the server names it.
        created_at: When it was created, in seconds since the epoch.
        previous_response_id: The server's echo of the anchor that it used.
        echoed: Whether the echo was present at all. An echoed None means that the server did not use the
            anchor; without an echo nothing is known.
        status: The server's status of the response.
        background: Whether it is generated in the background.
        stored: Whether the server stores it; None if it does not say so.
        conversation_id: The conversation object that it names; empty for none, None if the member is missing.
        response: The response object as the provider sent it.
    """

    hidden = ("response",)

    response_id: str = ""
    model: str = ""
    created_at: float | None = None
    previous_response_id: str | None = None
    echoed: bool = False
    status: str = ""
    background: bool = False
    stored: bool | None = None
    conversation_id: str | None = None
    response: Mapping[str, Any] = EMPTY

    __post_init__ = wrap_field("response")


class ResponseStarted(ResponseFacts, frozen=True):
    """The server accepted the request and started a response."""


class ItemStarted(Event, frozen=True):
    """An output item started; for a tool call there is ``ToolCallStarted`` instead.

    Attributes:
        type: The item's type, such as ``message`` or ``reasoning``.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output.
    """

    type: str
    item_id: str = ""
    output_index: int = -1


class TextDelta(Event, frozen=True):
    """The model wrote some text of a message.

    Attributes:
        delta: The new text.
        item_id: The provider's id of the message.
        output_index: The position of the message in the output.
        content_index: The position of the text part in the message.
        logprobs: The log probabilities of the tokens of this text, if they were requested, in the form of the
            Responses API.
    """

    hidden = ("logprobs",)

    delta: str
    item_id: str = ""
    output_index: int = -1
    content_index: int = 0
    logprobs: tuple[Mapping[str, Any], ...] = ()


class RefusalDelta(Event, frozen=True):
    """The model wrote some text of a refusal.

    Attributes:
        delta: The new text.
        item_id: The provider's id of the message.
        output_index: The position of the message in the output.
        content_index: The position of the refusal part in the message.
    """

    delta: str
    item_id: str = ""
    output_index: int = -1
    content_index: int = 0


class ReasoningDelta(Event, frozen=True):
    """The model wrote some reasoning.

    Attributes:
        delta: The new text.
        kind: Whether it belongs to a ``summary`` or to the ``reasoning`` itself.
        item_id: The provider's id of the reasoning item.
        output_index: The position of the item in the output.
        index: The position of the summary or text in the item.
    """

    delta: str
    kind: Literal["summary", "reasoning"] = "summary"
    item_id: str = ""
    output_index: int = -1
    index: int = 0


DeltaEvent = TextDelta | RefusalDelta | ReasoningDelta


def build_delta(
    kind: PartKind,
    text: str,
    item_id: str,
    output_index: int,
    index: int = 0,
    logprobs: tuple[Mapping[str, Any], ...] = (),
) -> DeltaEvent:
    """Return the event of some text of a part; only a text has log probabilities."""
    if kind == "text":
        return TextDelta(text, item_id, output_index, index, logprobs)
    if kind == "refusal":
        return RefusalDelta(text, item_id, output_index, index)
    return ReasoningDelta(text, kind, item_id, output_index, index)


class PartCompleted(Event, frozen=True):
    """A part is complete; its text replaces the joined deltas.

    Attributes:
        kind: The kind of the part.
        text: The complete text.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output.
        index: The position of the part in the item.
    """

    kind: PartKind
    text: str
    item_id: str = ""
    output_index: int = -1
    index: int = 0


class ToolCallStarted(Event, frozen=True):
    """The model started a tool call; every later event of the call has the same ``call_id``.

    Attributes:
        call_id: The id that connects the call to its result.
        name: The tool's name.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output.
        custom: Whether the tool takes free-form input instead of JSON arguments.
        fallback: Why ``call_id`` is not the provider's own (``missing``, ``empty``, ``malformed`` or
            ``duplicate``); empty if it is.
    """

    call_id: str
    name: str
    item_id: str = ""
    output_index: int = -1
    custom: bool = False
    fallback: str = ""


class ToolArgumentsDelta(Event, frozen=True):
    """The model wrote some of a call's arguments.

    Attributes:
        call_id: The call.
        delta: The new text of the arguments.
    """

    call_id: str
    delta: str


class ToolCallRenamed(Event, frozen=True):
    """The provider's own ``call_id`` of a call arrived late.

    Attributes:
        call_id: The id from now on.
        was: The id of the call in earlier events.
    """

    call_id: str
    was: str


class ToolCallCompleted(Event, frozen=True):
    """A tool call is complete: its id, name and arguments are final.

    Attributes:
        call_id: The id that connects the call to its result.
        name: The tool's name.
        arguments: The arguments exactly as the model wrote them.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output.
        custom: Whether the tool takes free-form input instead of JSON arguments.
    """

    call_id: str
    name: str
    arguments: str
    item_id: str = ""
    output_index: int = -1
    custom: bool = False


class ItemCompleted(Event, frozen=True):
    """An output item is complete.

    Attributes:
        item: The item as the provider sent it; a call's missing id is filled in.
        output_index: The position of the item in the output.
    """

    hidden = ("item",)

    item: Mapping[str, Any]
    output_index: int = -1

    __post_init__ = wrap_field("item")


class ResponseCompleted(ResponseFacts, frozen=True):
    """The response is complete; the fields of ``ResponseFacts`` and two more.

    Attributes:
        usage: Token counts, if the server sent any.
        output: All items of the response, or None if the server did not list them.
        indexes: The output index of each of these items in the events before; their positions if it is empty.
    """

    hidden = ("response", "output")

    usage: Usage | None = None
    output: tuple[Mapping[str, Any], ...] | None = None
    indexes: tuple[int, ...] = ()


class ResponseIncomplete(ResponseFacts, frozen=True):
    """The response stopped before its end; the fields of ``ResponseFacts`` and three more.

    Attributes:
        reason: Why it stopped, such as ``max_output_tokens``.
        usage: Token counts, if the server sent any.
        output: All items of the response, or None if the server did not list them.
        indexes: The output index of each of these items in the events before; their positions if it is empty.
    """

    hidden = ("response", "output")

    reason: str = ""
    usage: Usage | None = None
    output: tuple[Mapping[str, Any], ...] | None = None
    indexes: tuple[int, ...] = ()


class ResponseFailed(ResponseFacts, frozen=True):
    """The server failed to generate the response; the fields of ``ResponseFacts`` and three more.

    Attributes:
        code: The server's error code.
        message: The server's error message.
        usage: Token counts, if the server sent any.
    """

    hidden = ("response", "message")

    code: str = ""
    message: str = ""
    usage: Usage | None = None


class StreamFailed(Event, frozen=True):
    """The server sent an error instead of the rest of the response.

    Attributes:
        code: The server's error code.
        message: The server's error message.
        param: The request parameter that caused the error.
        kind: The server's error type.
        status: The HTTP status, if the event has one.
        usage: Token counts, if the server sent any.
    """

    hidden = ("message",)

    code: str = ""
    message: str = ""
    param: str = ""
    kind: str = ""
    status: int | None = None
    usage: Usage | None = None


class AnomalyNoted(Event, frozen=True):
    """The stream has a problem, and decoding continues.

    Attributes:
        kind: The kind of problem.
        detail: A description with names and numbers, never with content.
    """

    kind: AnomalyKind
    detail: str = ""


class OpaqueEvent(Event, frozen=True):
    """An event of the provider that Kedge passes on without interpreting it.

    Attributes:
        type: The provider's name of the event.
        data: The event as the provider sent it.
    """

    hidden = ("data",)

    type: str
    data: Mapping[str, Any] = EMPTY

    __post_init__ = wrap_field("data")


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
"""Every event that a decoder emits."""

TerminalEvent = ResponseCompleted | ResponseIncomplete | ResponseFailed
"""The events that end a response."""


PARTIAL = "kedge.partial"
"""Metadata key: this block was incomplete when its stream ended."""

OutcomeStatus = Literal["completed", "incomplete", "running", "failed", "cut"]


class Outcome(msgspec.Struct, frozen=True):
    """The result of one response's stream, as the assembler returns it.

    Attributes:
        status: ``completed``, ``incomplete``, ``running`` (in the background), ``failed`` or ``cut`` (no terminal
            event arrived).
        blocks: The blocks of the response in output order, incomplete ones included.
        response_id: The id of the response.
        model: The model that generated it.
        usage: Token counts, if the server sent any.
        created_at: When the response was created, in seconds since the epoch.
        previous_response_id: The server's echo of the anchor that it used.
        echoed: Whether the server echoed ``previous_response_id`` at all, even as null.
        reason: Why the response is ``incomplete``, as the server names it.
        code: The code of a failure: the server's, or ``damaged_stream`` if the stream is inconsistent.
        message: The message of a failure.
        anchor_problem: Why a completed response must not become an anchor; empty if it may.
        stored: Whether the server stored the response; None if this is not known.
        conversation_id: The conversation object in the response; empty for none, None if the member is
            missing.
    """

    status: OutcomeStatus
    blocks: tuple[Block, ...] = ()
    response_id: str = ""
    model: str = ""
    usage: Usage | None = None
    created_at: float | None = None
    previous_response_id: str | None = None
    echoed: bool = False
    reason: str = ""
    code: str = ""
    message: str = ""
    anchor_problem: str = ""
    stored: bool | None = None
    conversation_id: str | None = None

    @property
    def completed(self) -> bool:
        """Whether the response is complete."""
        return self.status == "completed"

    @property
    def whole_blocks(self) -> tuple[Block, ...]:
        """The complete blocks."""
        return tuple(block for block in self.blocks if not block.metadata.get(PARTIAL))
