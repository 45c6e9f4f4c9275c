"""The reply of a Chat, and the stream of events that leads to it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

from typing_extensions import TypeVar

from kedge.chat.state import DiscardedState
from kedge.compaction import CompactionResult, TurnCompacted
from kedge.engines import Reply, RunStream, Stream
from kedge.engines.reply import answer_text
from kedge.errors import Blocked, EngineError, KedgeError
from kedge.events.run import AnswerFinished, ToolFinished
from kedge.events.types import Event
from kedge.turns import Turn, snapshot_block_ids

ReplyT_co = TypeVar("ReplyT_co", covariant=True, default=None)
OutputT = TypeVar("OutputT", default=None)

StateWriter = Callable[[Turn, frozenset[str]], bytes]
"""Returns the state bytes of a Turn and of the ids of the blocks that a model has read."""


@dataclass(frozen=True, slots=True)
class ChatReply(Reply[ReplyT_co], Generic[ReplyT_co]):
    """The answer to one message, and the state to continue with.

    Attributes:
        state: The state bytes for the next call; ``turn`` is the conversation in it, with the leading system
            blocks of this call.
        compaction: The changes by compaction, if there were any.
        discarded: Why the state could not be used and a new conversation was started; None if it was
            used.
    """

    state: bytes = field(default=b"", repr=False)
    compaction: CompactionResult | None = field(default=None, repr=False)
    discarded: DiscardedState | None = None


class ChatStream(RunStream[ChatReply[OutputT]], Generic[OutputT]):
    """The events of one call, and after the last event the answer.

    Example:
        ```python
        async with chat.stream_with_state(state, "Hello") as stream:
            async for event in stream:
                ...
        state = stream.reply.state
        ```
    """

    def __init__(
        self,
        stream: Stream[Any],
        turn: Turn,
        initial_state: bytes,
        write_state: StateWriter,
        discarded: DiscardedState | None = None,
    ) -> None:
        super().__init__(lambda: stream, stream.schema)
        self._stream = stream
        self._write_state = write_state
        self._initial_state = initial_state
        self._discarded = discarded
        self._sent_turn = self._turn = turn
        self._seen_ids: frozenset[str] = frozenset()
        self._compaction: CompactionResult | None = None
        self._reply: ChatReply[Any] | None = None

    @property
    def reply(self) -> ChatReply[OutputT]:
        """The reply; available once the stream has ended.

        Raises:
            KedgeError: The stream has not ended.
        """
        if self._reply is None:
            raise KedgeError(
                "the stream has not ended: iterate over it to the end before reading its reply; "
                "the state you sent is unchanged and can be used again"
            )
        return self._reply

    @property
    def state(self) -> bytes:
        """The current state, at any time, with all finished answers and tool results."""
        return self._reply.state if self._reply else self._write(self._turn)

    def _result(self) -> ChatReply[OutputT]:
        return self.reply

    def _handle_event(self, event: Event) -> Event:
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
        return event

    def _handle_error(self, error: Exception) -> None:
        try:
            state = self._state_after_error(error)
        except Blocked:  # the current Turn must not be stored
            state = self._initial_state
        error.state = state  # pyright: ignore[reportAttributeAccessIssue]

    def _state_after_error(self, error: Exception) -> bytes:
        """Return the state after an error: the current one, or the initial one if nothing was sent."""
        if isinstance(error, EngineError):
            return self._write(error.turn or self._turn)
        return self.state if self._seen_ids else self._initial_state

    def _handle_end(self) -> None:
        if self._reply is None:
            stream = self._stream
            turn = stream.filters.apply_to_turn(stream.turn, ("output",))
            self._reply = stream.build_reply(
                ChatReply,
                text=answer_text(turn, self._sent_turn),
                turn=turn,
                state=self._write(turn),
                compaction=self._compaction,
                discarded=self._discarded,
            )

    def _write(self, turn: Turn) -> bytes:
        """Return the state bytes of a Turn after the guards of the stack."""
        return self._write_state(self._stream.filters.apply_to_turn(turn), self._seen_ids)
