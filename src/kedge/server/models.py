"""Models: what stands behind the server and writes the answers.

A ``Model`` takes a ``Prompt`` and yields pieces as they come: an output item opens, grows by
deltas, closes. That is all that streaming needs, and a model that talks to a provider over the
network fits it as well as the practice model does.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, assert_never

from anyio import sleep

from kedge.practice import (
    MessageOutput,
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    ReasoningOutput,
    RefusalOutput,
    Script,
    ToolCallOutput,
    answer,
)
from kedge.server.token_counting import count_text

ItemKind = Literal["text", "refusal", "reasoning", "function_call", "custom_tool_call"]


@dataclass(frozen=True, slots=True)
class ItemOpened:
    """An output item begins; a call has a ``name``, and a ``call_id`` where the model chose one."""

    kind: ItemKind
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ItemDelta:
    """The open item grows by some text."""

    text: str


@dataclass(frozen=True, slots=True)
class ItemClosed:
    """The open item is whole.

    ``stop`` is the stop sequence at which the answer ended, where one did. ``kept`` is what the
    model wants back with its thought, sealed, when the thought is sent again: any JSON value.
    """

    stop_sequence: str = ""
    model_data: Any = None


@dataclass(frozen=True, slots=True)
class OutputTruncated:
    """The model had to stop early; an item that is still open stays incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """The tokens of the whole answer, where the model counts them itself.

    ``cached`` is a part of ``input``, ``reasoning`` a part of ``output``.
    """

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class ItemAdded:
    """A whole item of a type that only the Responses API has, as the model wrote it."""

    item: Mapping[str, Any]


OutputEvent = ItemOpened | ItemDelta | ItemClosed | OutputTruncated | ModelUsage | ItemAdded


def _no_model_data(_: str) -> Any:
    return None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to a model: ``ask`` is what it sees, ``body`` the request as it was sent.

    ``live`` says that somebody watches, so that text should come as it is written. ``most`` is how
    many tokens may be written, and ``stop`` are sequences at which the server ends the answer. ``unseal``
    gives back what a model wanted kept with a thought, by the thought's encrypted content.
    """

    ask: PracticeRequest
    body: Mapping[str, Any]
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    decrypt_reasoning: Callable[[str], Any] = _no_model_data


class Model(Protocol):
    """Writes answers.

    ``window`` is how many tokens it can see. ``grace`` is for how many seconds its first piece is
    awaited before a stream is opened: a model that may refuse wants that, because once a stream is
    open, no status can be sent.
    """

    name: str
    window: int
    grace: float

    def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Write the answer to a prompt, piece by piece.

        What stands in the way is raised as an ``ApiError``; everything else is a bug.
        """
        ...

    async def summarise(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Sum up what a compaction leaves out; empty where the model has nothing to say."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


@asynccontextmanager
async def stream_output(model: Model, prompt: Prompt) -> AsyncGenerator[AsyncIterator[OutputEvent]]:
    """The pieces of an answer; when nobody wants the rest, the model is stopped."""
    pieces = model.answer(prompt)
    try:
        yield pieces
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


DEFAULT_WINDOW = 400_000
"""The context window of the practice model, in tokens, where none is chosen."""


class PracticeModel:
    """The practice model, or a script, at a chosen pace: seconds between two streamed chunks."""

    def __init__(
        self, script: Script | None = None, *, pace: float = 0.0, window: int = DEFAULT_WINDOW
    ) -> None:
        self.name = "practice"
        self.window = window
        self.grace = 0.0
        self.pace = pace
        self._answer: Callable[[PracticeRequest], PracticeOutput] = (
            script.answer if script else answer
        )

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Write the practice model's answer, in paced chunks if it is streamed or in the background."""
        reply = self._answer(prompt.ask)
        in_chunks = prompt.stream or bool(prompt.body.get("background"))
        pace = (reply.pace or self.pace) if in_chunks else 0.0
        for piece in _iter_output(reply.parts, in_chunks, prompt.max_tokens):
            yield piece
            if pace and isinstance(piece, ItemDelta):
                await sleep(pace)

    async def summarise(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Leave it to the server to say what was left out."""
        return ""

    async def aclose(self) -> None:
        """Hold nothing."""


def _iter_output(
    parts: tuple[OutputPart, ...], stream: bool, max_tokens: int | None
) -> Iterator[OutputEvent]:
    for part in parts:
        yield _open_item(part)
        text = part.arguments if isinstance(part, ToolCallOutput) else part.text
        if max_tokens is not None:
            text, max_tokens, cut = _truncate_text(text, max_tokens)
            yield from map(ItemDelta, _split_chunks(text, stream))
            if cut:
                yield OutputTruncated("max_output_tokens")
                return
        else:
            yield from map(ItemDelta, _split_chunks(text, stream))
        yield ItemClosed()


def _open_item(part: OutputPart) -> ItemOpened:
    match part:
        case MessageOutput():
            return ItemOpened("text")
        case RefusalOutput():
            return ItemOpened("refusal")
        case ReasoningOutput():
            return ItemOpened("reasoning")
        case ToolCallOutput():
            return ItemOpened("custom_tool_call" if part.custom else "function_call", part.name)
        case _:
            assert_never(part)


MAX_TOKEN_BYTES = 128
"""The length of the longest token: no token stands for more characters than this."""

_WORD = re.compile(r"\s*\S+\s?|\s+")


def _split_chunks(text: str, stream: bool) -> list[str]:
    return _WORD.findall(text) if stream else [text]


def _truncate_text(text: str, max_tokens: int) -> tuple[str, int, bool]:
    """Cut a text to its first ``most`` tokens; say how many are left and whether it was cut."""
    if len(text) <= max_tokens * MAX_TOKEN_BYTES:
        tokens = count_text(text)
        if tokens <= max_tokens:
            return text, max_tokens - tokens, False
    least, beyond = 0, min(len(text), max_tokens * MAX_TOKEN_BYTES + 1)
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if count_text(text[:middle]) <= max_tokens:
            least = middle
        else:
            beyond = middle
    return text[:least], 0, True
