"""Models: the interface of the models that write the answers, and the practice model.

A ``Model`` gets a ``Prompt`` and yields output events: an item is opened, grows by deltas, and is
closed. A model behind a provider's API implements the same interface as the practice model.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from anyio import sleep
from msgspec import Struct

from kedge.errors import SchemaTooComplex
from kedge.server.errors import SCHEMA_TOO_COMPLEX
from kedge.server.practice_model import OutputPart, PracticeOutput, PracticeRequest, Script, answer
from kedge.server.practice_model.request import ItemKind
from kedge.server.token_counting import count_text


class ItemOpened(Struct, frozen=True):
    """The beginning of an output item. A call has a ``name`` and, if the model chose one, a ``call_id``."""

    kind: ItemKind
    name: str = ""
    call_id: str = ""


class ItemDelta(Struct, frozen=True):
    """Text that is appended to the open item.

    ``logprobs`` are the log probabilities of its tokens, in the form of the Responses API.
    """

    text: str
    logprobs: tuple[Mapping[str, Any], ...] = ()


class ItemClosed(Struct, frozen=True):
    """The end of the open item, which is complete.

    Args:
        stop_sequence: The stop sequence that ended the answer, if any.
        model_data: Any JSON value that the model needs when its reasoning is sent again. It is
            encrypted into the reasoning item.
        annotations: The annotations of the text, such as citations, in the form of the Responses API.
    """

    stop_sequence: str = ""
    model_data: Any = None
    annotations: tuple[Mapping[str, Any], ...] = ()


class OutputTruncated(Struct, frozen=True):
    """The early end of an answer; an open item remains incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ModelUsage(Struct, frozen=True):
    """The token counts of the complete answer, if the model reports them.

    ``cached`` and ``cache_write`` (tokens written to an explicit cache) are part of ``input``, ``reasoning``
    is part of ``output``.
    """

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0
    cache_write: int = 0

    @property
    def total(self) -> int:
        """The tokens of the input and the output."""
        return self.input + self.output


class ItemAdded(Struct, frozen=True):
    """A complete item, as the model wrote it, of a type that only the Responses API has."""

    item: Mapping[str, Any]


OutputEvent = ItemOpened | ItemDelta | ItemClosed | OutputTruncated | ModelUsage | ItemAdded


class Prompt(Struct, frozen=True):
    """One request to a model.

    Args:
        ask: The input of the model: items, instructions, tools.
        body: The request body as it was sent.
        stream: Whether the client reads the answer while it is written.
        max_tokens: The maximum number of output tokens, or None.
        stop: Stop sequences; the server ends the answer at the first of them.
        decrypt_reasoning: Returns the ``model_data`` of a reasoning item by its encrypted content.
        keep_reasoning: Whether the server can encrypt the ``model_data`` of reasoning, and so return it to the model.
        namespace: The namespace of the caller; a model must not share data between namespaces.
    """

    ask: PracticeRequest
    body: Mapping[str, Any]
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    decrypt_reasoning: Callable[[str], Any] = lambda _: None
    keep_reasoning: bool = True
    namespace: str = ""


class Model(Protocol):
    """The interface of models.

    Attributes:
        name: The name of the model.
        window: The context window, in tokens.
        grace: Seconds for which the start of a stream waits for the first output. A model that may
            reject a request needs this: once a stream has started, no HTTP status can be sent.
    """

    name: str
    window: int
    grace: float

    def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Write the answer to a prompt.

        Args:
            prompt: The request.

        Yields:
            Output events. Leaving the iteration early stops the model.

        Raises:
            ApiError: If there is no answer. Any other exception is an internal error.
        """
        ...

    async def summarize(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Return a summary of the items that a compaction omits; empty if the model writes none."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


DEFAULT_GRACE = 30.0
"""The default ``grace`` of a model, in seconds."""
DEFAULT_WINDOW = 400_000
"""The default context window of the practice model, in tokens."""


class PracticeModel:
    """The practice model, or scripted answers.

    Args:
        script: Answers to give instead of the practice model.
        pace: Seconds between two chunks of a streamed answer.
        window: The context window, in tokens.
    """

    def __init__(
        self, script: Script | None = None, *, pace: float = 0.0, window: int = DEFAULT_WINDOW
    ) -> None:
        self.name = "practice"
        self.window = window
        self.grace = DEFAULT_GRACE
        self.pace = pace
        self._answer: Callable[[PracticeRequest], PracticeOutput] = answer
        self.set_script(script)

    def set_script(self, script: Script | None) -> None:
        """Replace the script; without one the practice model answers."""
        self._answer = script.answer if script else answer

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Write the practice model's answer, in paced chunks if it is streamed or in the background."""
        try:
            reply = self._answer(prompt.ask)
        except SchemaTooComplex as error:
            raise SCHEMA_TOO_COMPLEX(problem=error.problem) from error
        in_chunks = prompt.stream or bool(prompt.body.get("background"))
        pace = 0.0
        if in_chunks:
            pace = reply.pace or self.pace
        for piece in _iter_output(reply.parts, in_chunks, prompt.max_tokens):
            yield piece
            if pace and isinstance(piece, ItemDelta):
                await sleep(pace)

    async def summarize(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Return an empty text: the server then describes the omitted items."""
        return ""

    async def aclose(self) -> None:
        """Do nothing."""


def _iter_output(
    parts: tuple[OutputPart, ...], stream: bool, max_tokens: int | None
) -> Iterator[OutputEvent]:
    for part in parts:
        yield ItemOpened(part.kind, part.name)
        text = part.text
        is_cut = False
        if max_tokens is not None:
            text, max_tokens, is_cut = _truncate_text(text, max_tokens)
        if stream:
            yield from (ItemDelta(word[0]) for word in _WORD.finditer(text))
        else:
            yield ItemDelta(text)
        if is_cut:
            yield OutputTruncated("max_output_tokens")
            return
        yield ItemClosed()


MAX_TOKEN_BYTES = 128
"""The length of the longest token of the vocabulary."""

_WORD = re.compile(r"\s*\S+\s?|\s+")


def _truncate_text(text: str, max_tokens: int) -> tuple[str, int, bool]:
    """Return at most ``max_tokens`` tokens of a text, the number of unused tokens, and whether it was truncated."""
    if len(text) <= max_tokens * MAX_TOKEN_BYTES:
        tokens = count_text(text)
        if tokens <= max_tokens:
            return text, max_tokens - tokens, False
    low = 0
    high = min(len(text), max_tokens * MAX_TOKEN_BYTES + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if count_text(text[:middle]) <= max_tokens:
            low = middle
        else:
            high = middle
    return text[:low], 0, True
