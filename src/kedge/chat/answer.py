"""What a Chat gives back: the answer, and the stream of events that leads to it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kedge.compaction import CompactionResult, TurnCompacted
from kedge.engines import Stream
from kedge.errors import EngineError, KedgeError
from kedge.events import Usage
from kedge.events.run import AnswerFinished, ToolFinished
from kedge.events.types import Event
from kedge.planning import RequestPlan
from kedge.turns import AssistantBlock, Turn, snapshot_block_ids

StateWriter = Callable[[Turn, frozenset[str]], bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one message, and the state to go on with.

    ``turn`` is the conversation as ``state`` holds it, with the leading system blocks of this call in
    front. ``usage`` adds up all responses of this call, ``plan`` is the newest request's.
    """

    text: str
    state: bytes = field(repr=False)
    turn: Turn
    usage: Usage
    plan: RequestPlan | None = field(default=None, repr=False)
    compaction: CompactionResult | None = field(default=None, repr=False)
    """What compaction did, if it did anything: what was removed, and the tokens before and after."""

    @property
    def refusal(self) -> str:
        """The words with which the model refused, if it did."""
        last = next((b for b in reversed(self.turn.blocks) if isinstance(b, AssistantBlock)), None)
        return last.refusal if last else ""


class ChatStream(AbstractAsyncContextManager["ChatStream"]):
    """The events of one call, and at its end the answer.

    ``write`` makes state bytes of a Turn and of the ids of the blocks that a model has seen.
    """

    def __init__(
        self, stream: Stream, turn: Turn, initial_state: bytes, write_state: StateWriter
    ) -> None:
        self._stream = stream
        self._write_state = write_state
        self._initial_state = initial_state
        self._turn = turn
        self._seen_ids: frozenset[str] = frozenset()
        self._compaction: CompactionResult | None = None
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The answer; only once the stream has ended."""
        if self._answer is None:
            raise KedgeError(
                "the stream has not ended: iterate over it to the end before asking for its answer; "
                "the state you sent is unchanged and can be used again"
            )
        return self._answer

    @property
    def state(self) -> bytes:
        """The state reached so far, at any time: finished answers and tool results are in it."""
        return self._answer.state if self._answer else self._write_state(self._turn, self._seen_ids)

    async def finish(self) -> Answer:
        """Watch to the end, and return the answer."""
        async for _ in self:
            pass
        return self.answer

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for event in self._stream:
                self._handle_event(event)
                yield event
        except Exception as error:
            error.state = self._state_after_error(error)  # pyright: ignore[reportAttributeAccessIssue]
            raise
        self._answer = self._build_answer()

    def _handle_event(self, event: Event) -> None:
        match event:
            case AnswerFinished():
                self._turn = event.turn
                self._seen_ids = snapshot_block_ids(event.turn)
            case ToolFinished():
                self._turn = self._turn.append(event.result)
            case TurnCompacted():
                self._compaction = event.result
            case _:
                pass

    def _state_after_error(self, error: Exception) -> bytes:
        """The state that an error leaves: with what was said, unless nothing was even sent."""
        if isinstance(error, EngineError):
            return self._write_state(error.turn or self._turn, self._seen_ids)
        return self.state if self._seen_ids else self._initial_state

    def _build_answer(self) -> Answer:
        stream = self._stream
        return Answer(
            text=stream.text,
            state=self._write_state(stream.turn, self._seen_ids),
            turn=stream.turn,
            usage=stream.usage,
            plan=stream.plan,
            compaction=self._compaction,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stream.__aexit__(exc_type, exc, traceback)
