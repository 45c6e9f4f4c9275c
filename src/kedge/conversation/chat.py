"""Chat: conversations whose state is one opaque value, passed in and returned with each call.

A Chat stores nothing between calls: everything about a conversation is in the state bytes, which the caller
stores. The same bytes continue a conversation in any process, and two calls with the same bytes are two
branches of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Unpack

from msgspec import structs
from typing_extensions import TypeForm, TypeVar

from kedge._internal.argument_types import checked_except
from kedge._internal.event_loops import AsyncResource, SyncFacade, delegate, wrap_method
from kedge.compaction import CompactionResult, TurnCompacted, compact_turn
from kedge.conversation.chat_state import (
    ChatState,
    DiscardedState,
    FernetCipher,
    Key,
    RecentStates,
    StateReport,
    as_bytes,
    build_report,
    decode_state,
    encode_state,
    leave_out,
    state_from_turn,
)
from kedge.conversation.messages import append_blocks, as_block
from kedge.engines import (
    ContentFilters,
    Engine,
    OutputSchema,
    Reply,
    RunStream,
    Stream,
    find_filters,
    unwrap,
)
from kedge.engines.options import RequestOptions
from kedge.engines.reply import answer_text
from kedge.engines.stateless import StatelessEngine
from kedge.engines.sync import wrap_stream
from kedge.errors import Blocked, EngineError, InvalidSetting, InvalidTurn, describe_type
from kedge.events.run import AnswerFinished, ToolFinished
from kedge.events.types import Event
from kedge.middleware.compose import StackSettings, check_stack, with_default_middleware
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan, check_added_results, find_running
from kedge.planning.anchors import drop_changed_anchors
from kedge.providers import to_engine
from kedge.turns import Block, Turn, UnknownBlock, snapshot_block_ids
from kedge.turns.turn import count_leading
from kedge.usage.tokens import DEFAULT_COUNTER

log = get_logger("kedge.conversation")

T = TypeVar("T", default=None)
T_co = TypeVar("T_co", covariant=True, default=None)

State = bytes | bytearray | memoryview | str | None
"""A state: the bytes of the last answer, or nothing for a new conversation."""

UNSTORED_LEAD = "leading system blocks are not stored; give them with each call"


StateWriter = Callable[[Turn, frozenset[str]], bytes]
"""Returns the state bytes of a Turn and of the ids of the blocks that a model has read."""


@dataclass(frozen=True, slots=True)
class ChatReply(Reply[T_co], Generic[T_co]):
    """The answer to one message, and the state to continue with.

    Attributes:
        state: The state bytes for the next call; ``turn`` is the conversation in it, with the leading system
            blocks of this call.
        compactions: The changes by each compaction of this call, in order; usually there is none.
        discarded: Why the state could not be used and a new conversation was started; None if it was
            used.
    """

    state: bytes = field(default=b"", repr=False)
    compactions: tuple[CompactionResult, ...] = field(default=(), repr=False)
    discarded: DiscardedState | None = None


class ChatStream(RunStream[ChatReply[T]], Generic[T]):
    """The events of one call, and after the last event the answer.

    Example:
        ```python
        async with chat.stream_with_state(state, "Hello") as stream:
            async for event in stream:
                ...
        state = stream.reply.state
        ```
    """

    _before_end = "its reply; the state you sent is unchanged and can be used again"

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
        self._sent_turn = turn
        self._turn = turn
        """The Turn with all finished answers and tool results."""
        self._seen_ids: frozenset[str] = frozenset()
        self._compactions: list[CompactionResult] = []

    @property
    def reply(self) -> ChatReply[T]:
        """The reply; available once the stream has ended.

        Raises:
            KedgeError: The stream has not ended.
        """
        return self._result()

    @property
    def state(self) -> bytes:
        """The current state, at any time, with all finished answers and tool results."""
        if self._value is not None:
            return self._value.state
        return self._write(self._turn)

    def _handle_event(self, event: Event) -> Event:
        match event:
            case AnswerFinished():
                self._turn = event.turn
                self._seen_ids = snapshot_block_ids(event.turn)
            case ToolFinished():
                self._turn = self._turn.append(event.result)
            case TurnCompacted():
                self._compactions.append(event.result)
            case _:
                pass
        return event

    def _handle_error(self, error: Exception) -> None:
        error.state = self._state_after(error)  # pyright: ignore[reportAttributeAccessIssue]

    def _state_after(self, error: Exception) -> bytes:
        """Return the current state, or the initial one if nothing was sent."""
        try:
            if isinstance(error, EngineError):
                return self._write(error.turn or self._turn)
            if self._seen_ids:
                return self.state
        except Blocked:  # the current Turn must not be stored
            pass
        return self._initial_state

    def _handle_end(self) -> None:
        stream = self._stream
        if self._value is None and stream._value is not None:  # noqa: SLF001 - None after an error
            turn = stream.filters.apply_to_turn(stream.turn, ("output",))
            reply: ChatReply[Any] = stream.build_reply(
                ChatReply,
                text=answer_text(turn, self._sent_turn),
                turn=turn,
                state=self._write(turn),
                compactions=tuple(self._compactions),
                discarded=self._discarded,
            )
            self._value = reply

    def _write(self, turn: Turn) -> bytes:
        """Return the state bytes of a Turn after the guards of the stack."""
        return self._write_state(self._stream.filters.apply_to_turn(turn), self._seen_ids)


class _StateInspector:
    """The descriptor of ``inspect_state``, for a Chat or for the class, which has no provider and no key."""

    def __get__(self, chat: "Chat | None", owner: type["Chat"]) -> Callable[[State], StateReport]:
        if chat is None:
            return lambda state: build_report(as_bytes(state), None, None)
        return lambda state: build_report(as_bytes(state), chat.provider, chat.cipher)


class Chat(AsyncResource):
    """Conversations for callers that store their sessions themselves.

    Args:
        engine: An engine or a model string.
        state_key: The key that encrypts state bytes; with several keys, the first one encrypts and all decrypt.
        keep_reasoning: Whether to request encrypted reasoning and store it in states, so that it can be sent again
            after the server has lost a response. States are smaller without.
        **stack: The settings of the middleware around the engine, see ``StackSettings``: ``system`` (instructions
            that are sent with every request, or a function that returns them for a Turn), ``tools`` (functions that
            the model may call, a toolbox, or a function that returns them for a Turn), ``approve`` (a function that
            is called before each tool call and may deny it or change its arguments), ``middleware`` (around the
            engine, the first one outermost), ``compactor`` (compacts conversations when they become too long),
            ``counter`` (a token counter for the compactor; whether to compact is decided by the usage that the
            server reported with its last answer, or by this counter if there is none), ``resend_limit`` (bytes, or a
            `ResendLimit` of bytes and blocks, above which history is compacted before it is sent in full again) and
            ``repair`` (whether to complete tool calls that have no result).

    Raises:
        UnknownSetting: There is no setting of this name.

    Example:
        ```python
        chat = Chat("openai:gpt-5.1")
        answer = await chat.chat_with_state(None, "My ship is the Erebus.")
        answer = await chat.chat_with_state(answer.state, "What is my ship?")
        ```
    """

    @checked_except("engine")
    def __init__(
        self,
        engine: Engine | str,
        *,
        state_key: Key | Iterable[Key] | None = None,
        keep_reasoning: bool = True,
        **stack: Unpack[StackSettings],
    ) -> None:
        check_stack(stack, {"state_key", "keep_reasoning"}, "a Chat")
        self._owns_engine = isinstance(engine, str)
        self._base_engine = to_engine(engine)
        self.provider = unwrap(self._base_engine).name
        self.compactor = stack.get("compactor")
        self.cipher = None if state_key is None else FernetCipher(state_key)
        self._recent = RecentStates()
        self._counter = stack.get("counter", DEFAULT_COUNTER)
        self.keep_reasoning = keep_reasoning
        self.engine = with_default_middleware(self._base_engine, **stack)

    async def chat_with_state(
        self,
        state: State,
        *blocks: Block | str,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChatReply[T]:
        """Send messages and return the answer with the state to continue with.

        Args:
            state: The state of the last answer, or None for a new conversation. A state that cannot be
                used starts a new conversation; ``ChatReply.discarded`` has the reason.
            *blocks: Blocks or texts. Leading system blocks are sent with this call and not stored.
            output: The type of the answer: any type that pydantic supports, or a JSON schema.
            **options: The options of an engine's ``run``, such as ``model``.

        Returns:
            The reply; ``reply.output`` is the typed value.

        Raises:
            EngineError: The request failed; ``error.state`` has the completed steps.
            OutputInvalid: The answer does not match ``output``, also after retries; ``error.state`` has
                all answers.
            OutputRefused: The model refused to answer, and ``output`` requests a value.
            Blocked: A guard rejected the message or the answer.
            UnmatchedResult: A tool result among the blocks belongs to no open call; nothing was sent.
        """
        options.setdefault("streaming", False)
        return await self.stream_with_state(state, *blocks, output=output, **options).finish()

    def stream_with_state(
        self,
        state: State,
        *blocks: Block | str,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChatStream[T]:
        """Send messages and return a stream of events; after the last one it has the ``reply``.

        Arguments and errors are those of ``chat_with_state``; errors are raised by the iteration.
        """
        start, discarded = self._load_state(state)
        if discarded and isinstance(state, str) and not blocks:
            raise InvalidSetting(
                "there is no message: the first argument is the state of the last answer, or None for a new "
                'conversation; write chat_with_state(None, "Hello")'
            )
        turn = _build_turn(start, blocks)
        options.setdefault("keep_reasoning", self.keep_reasoning)
        stream = self.engine.stream(turn, output=output, **options)
        return ChatStream(stream, turn, as_bytes(state), partial(self._write, start), discarded)

    def read_state(self, state: State) -> Turn:
        """Return the conversation of a state, to look at it or to edit it for ``write_state``.

        Args:
            state: The state to read; for a state that cannot be used, the Turn is empty.
        """
        start, _ = self._load_state(state)
        return start.turn()

    def write_state(self, state: State, turn: Turn) -> bytes:
        """Return a state with another Turn: the one of ``read_state``, after any edits, without a request.

        The anchors that are still valid remain, so that the next call chains on the newest response before
        the first change. New blocks at the end are pending until the next call.

        Args:
            state: The state whose Turn was edited, or None for a new conversation.
            turn: The edited Turn.

        Returns:
            The new state.

        Raises:
            Blocked: A guard rejects a new or changed block.
            InvalidTurn: The argument is not a Turn.
            UnmatchedResult: A new tool result belongs to no open call.
        """
        if not isinstance(turn, Turn):  # pyright: ignore[reportUnnecessaryIsInstance]
            problem = f"a state is written from a Turn, not {describe_type(turn)}"
            raise InvalidTurn(f"{problem}; edit the one of read_state")
        start, _ = self._load_state(state)
        # Without blocks, the Turn is a history of another program, which ``repair`` corrects.
        if start.blocks:
            check_added_results(start.turn(), turn)
        filters = self._filters()
        stored_blocks = {block.id: block for block in start.blocks}
        for block in turn.blocks:
            if stored_blocks.get(block.id) == block:
                continue
            filtered = filters.apply(block, ("input",))
            if filtered is not block:
                turn = turn.edit(block.id, filtered)
        if turn.leading:
            log.warning(UNSTORED_LEAD)
        return self._write(start, drop_changed_anchors(turn))

    async def compact_pending(self, state: State) -> bytes:
        """Compact now, before a call, if there are pending blocks and the compactor decides so.

        Args:
            state: The state to compact.

        Returns:
            The new state, or the given one if nothing is pending, or if the server generates the answer to it.
        """
        start, _ = self._load_state(state)
        if self.compactor is None or start.processed_length == len(start.blocks):
            return as_bytes(state)
        pending_turn = start.turn()
        if find_running(pending_turn):
            return as_bytes(state)
        turn, _ = await compact_turn(
            pending_turn,
            self.compactor,
            engine=self._base_engine,
            counter=self._counter,
            occasion="pending",
            filters=self._filters(),
        )
        return self._write(start, turn)

    inspect_state = _StateInspector()
    """Return a ``StateReport``: the content of a state, and why it would be discarded."""

    def plan(
        self, state: State, *blocks: Block | str, **options: Unpack[RequestOptions]
    ) -> RequestPlan:
        """Return the plan of the request that ``chat_with_state`` would send: a dry run."""
        start, _ = self._load_state(state)
        return self.engine.plan(_build_turn(start, blocks), **options)

    async def probe_and_plan(
        self, state: State, *blocks: Block | str, **options: Unpack[RequestOptions]
    ) -> RequestPlan:
        """Return the plan of the request that ``chat_with_state`` would send, after the probes that it would make."""
        start, _ = self._load_state(state)
        return await self.engine.probe_and_plan(_build_turn(start, blocks), **options)

    @property
    def sync(self) -> "SyncChat":
        """The async methods for sync code: ``chat.sync.chat_with_state(state, "Hello")``."""
        return SyncChat(self)

    async def aclose(self) -> None:
        """Close the connections of an engine that was made from a model string; a given engine stays open."""
        if self._owns_engine:
            await self.engine.aclose()

    def _filters(self) -> ContentFilters:
        return find_filters(self.engine)

    def _load_state(self, state: State) -> tuple[ChatState, DiscardedState | None]:
        """Return the state, or a new one with the reason why the given one was discarded."""
        if hasattr(state, "cr_await") or isinstance(state, Reply | Turn):
            # Values that only a program can pass: those of a client are discarded.
            raise InvalidSetting(f"a state is bytes, not {describe_type(state)}; pass reply.state")
        data = as_bytes(state)
        if not data:
            return ChatState(self.provider), None
        loaded = self._recent.find(data) or decode_state(data, self.provider, self.cipher)
        if isinstance(loaded, DiscardedState):
            count("states_discarded_total", reason=loaded.reason)
            log.warning("a state was discarded and a new conversation started: %s", loaded)
            return ChatState(self.provider), loaded
        return leave_out(loaded, self._find_unsendable(loaded)), None

    def _find_unsendable(self, state: ChatState) -> set[str]:
        """Return the blocks with which every call would fail: of a newer Kedge, or without a form in this API."""
        unsendable = {block.id for block in state.blocks if isinstance(block, UnknownBlock)}
        engine = unwrap(self._base_engine)
        if not state.is_imported or not isinstance(engine, StatelessEngine):
            return unsendable
        # The engine names the first block that it cannot send. It may be one of this call, such as a system prompt.
        turn = state.turn()
        block_ids = {block.id for block in state.blocks}
        while True:
            plan = self.engine.plan(turn.remove(*unsendable))
            block_id = engine.find_unsupported(plan)
            if block_id not in block_ids or block_id in unsendable:
                return unsendable
            unsendable.add(block_id)

    def _write(self, start: ChatState, turn: Turn, seen: frozenset[str] = frozenset()) -> bytes:
        """Return the state of a Turn after a call that started with a state; a model has seen these blocks."""
        read_ids = seen.union(block.id for block in start.blocks[: start.processed_length])
        state = state_from_turn(turn, self.provider, _count_read(turn.body, read_ids))
        data = encode_state(state, start)
        if self.cipher is not None:
            data = self.cipher.encrypt(data)
        self._recent.add(data, state)
        return data


def _count_read(blocks: Sequence[Block], read_ids: frozenset[str]) -> int:
    """Return the number of blocks up to the last one that a model has read."""
    for length in range(len(blocks), 0, -1):
        if blocks[length - 1].id in read_ids:
            return length
    return 0


class SyncChat(SyncFacade[Chat]):
    """The methods of ``Chat`` for sync code; see ``Chat.sync``."""

    chat_with_state = wrap_method(Chat.chat_with_state)
    stream_with_state = wrap_stream(Chat.stream_with_state)
    compact_pending = wrap_method(Chat.compact_pending)
    probe_and_plan = wrap_method(Chat.probe_and_plan)
    plan = delegate(Chat.plan)
    read_state = delegate(Chat.read_state)
    write_state = delegate(Chat.write_state)

    @property
    def inspect_state(self) -> Callable[[State], StateReport]:
        """Return a ``StateReport`` of a state; see ``Chat.inspect_state``."""
        return self._target.inspect_state


def _build_turn(start: ChatState, added: Sequence[Block | str]) -> Turn:
    """Return the Turn to send: leading system blocks, then the history, then the rest.

    Raises:
        UnmatchedResult: A result among the added blocks belongs to no open call.
    """
    new = _with_fresh_ids(start.blocks, added)
    lead = count_leading(new)
    return append_blocks(start.turn(new[:lead]), new[lead:])


def _with_fresh_ids(history: Sequence[Block], added: Sequence[Block | str]) -> tuple[Block, ...]:
    """Return the added blocks; one that is part of the history already gets a new id."""
    ids = {block.id for block in history}
    blocks: list[Block] = []
    for message in added:
        block = as_block(message)
        if isinstance(block, Block) and block.id in ids:  # pyright: ignore[reportUnnecessaryIsInstance]
            block = structs.replace(block, id="")
        blocks.append(block)
        ids.add(getattr(block, "id", ""))
    return Turn(blocks).blocks  # the constructor checks that they are blocks
