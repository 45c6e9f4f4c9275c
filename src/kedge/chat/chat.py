"""Chat: conversations whose state is one opaque value, passed in and returned with each call.

A Chat stores nothing between calls: everything about a conversation is in the state bytes, which the caller
stores. The same bytes continue a conversation in any process, and two calls with the same bytes are two
branches of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

from msgspec import structs
from typing_extensions import TypeForm, TypeVar

from kedge.chat.reply import ChatReply, ChatStream, StateWriter
from kedge.chat.state import (
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
from kedge.compaction import Compactor, compact_turn
from kedge.engines import (
    ContentFilters,
    Engine,
    Middleware,
    OutputSchema,
    Reply,
    ResendLimit,
    find_filters,
    unwrap,
)
from kedge.engines.request_options import RequestOptions
from kedge.engines.stateless import StatelessEngine
from kedge.engines.sync import wrap_stream
from kedge.errors import InvalidSetting, describe_type
from kedge.event_loops import AsyncResource, SyncFacade, delegate, wrap_method
from kedge.middleware.compose import SystemText, Tools, with_default_middleware
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan
from kedge.planning.record import drop_changed_anchors
from kedge.providers import connect
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.tools import Approver
from kedge.turns import Block, Turn, UnknownBlock, user
from kedge.turns.turn import count_leading

log = get_logger("kedge.chat")

T = TypeVar("T", default=None)

State = bytes | bytearray | memoryview | str | None
"""A state: the bytes of the last answer, or nothing for a new conversation."""

UNSTORED_LEAD = "leading system blocks are not stored; give them with each call"


class _StateInspector:
    """The descriptor of ``inspect_state``, for a Chat or for the class, which has no provider and no key."""

    def __get__(self, chat: "Chat | None", owner: type["Chat"]) -> Callable[[State], StateReport]:
        provider, cipher = (chat.provider, chat.cipher) if chat else (None, None)
        return lambda state: build_report(as_bytes(state), provider, cipher)


class Chat(AsyncResource):
    """Conversations for callers that store their sessions themselves.

    Args:
        engine: An engine or a model string.
        system: Instructions that are sent with every request, or a function that returns them for a Turn.
        tools: Functions that the model may call, a toolbox, or a function that returns them for a Turn.
        approve: A function that is called before each tool call and may deny it or change its arguments.
        middleware: Middleware around the engine, the first one outermost.
        compactor: Compacts conversations when they become too long.
        state_key: The key that encrypts state bytes; with several keys, the first one encrypts and all decrypt.
        counter: A token counter for the compactor. Whether to compact is decided by the usage that the
            server reported with its last answer, or by this counter if there is none.
        resend_limit: Bytes, or a `ResendLimit` of bytes and blocks, above which history is compacted before it is
            sent in full again.
        repair: Whether to complete tool calls that have no result.
        keep_reasoning: Whether to request encrypted reasoning and store it in states, so that it can be sent again
            after the server has lost a response. States are smaller without.

    Example:
        ```python
        chat = Chat("openai:gpt-5.1")
        answer = await chat.chat_with_state(None, "My ship is the Erebus.")
        answer = await chat.chat_with_state(answer.state, "What is my ship?")
        ```
    """

    def __init__(
        self,
        engine: Engine | str,
        *,
        system: SystemText = "",
        tools: Tools = (),
        approve: Approver | None = None,
        middleware: Sequence[Middleware] = (),
        compactor: Compactor | None = None,
        state_key: Key | Iterable[Key] | None = None,
        counter: TokenCounter = DEFAULT_COUNTER,
        resend_limit: int | ResendLimit | None = None,
        repair: bool = True,
        keep_reasoning: bool = True,
    ) -> None:
        self._owns_engine = isinstance(engine, str)
        self._base_engine = connect(engine) if isinstance(engine, str) else engine
        self.provider = unwrap(self._base_engine).name
        self.compactor = compactor
        self.cipher = None if state_key is None else FernetCipher(state_key)
        self._recent = RecentStates()
        self._counter = counter
        self.keep_reasoning = keep_reasoning
        self.engine = with_default_middleware(
            self._base_engine,
            system=system,
            tools=tools,
            approve=approve,
            middleware=middleware,
            compactor=compactor,
            counter=counter,
            resend_limit=resend_limit,
            repair=repair,
        )

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
        """
        options.setdefault("streaming", False)
        async with self.stream_with_state(state, *blocks, output=output, **options) as stream:
            return await stream.finish()

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
        return ChatStream(stream, turn, as_bytes(state), self._make_writer(start), discarded)

    def read_state(self, state: State) -> Turn:
        """Return the conversation of a state, to look at it or to edit it for ``write_state``.

        Args:
            state: The state to read; for a state that cannot be used, the Turn is empty.
        """
        return self._load_state(state)[0].turn()

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
        """
        start, _ = self._load_state(state)
        filters, known = self._filters(), {block.id: block for block in start.blocks}
        for block in turn.blocks:
            is_known = known.get(block.id) == block
            filtered = block if is_known else filters.apply(block, ("input",))
            if filtered is not block:
                turn = turn.edit(block.id, filtered)
        if turn.leading:
            log.warning(UNSTORED_LEAD)
        return self._make_writer(start)(drop_changed_anchors(turn), frozenset())

    async def compact_pending(self, state: State) -> bytes:
        """Compact now, before a call, if there are pending blocks and the compactor decides so.

        Args:
            state: The state to compact.

        Returns:
            The new state, or the given one if nothing is pending.
        """
        start, _ = self._load_state(state)
        if self.compactor is None or start.processed_length == len(start.blocks):
            return as_bytes(state)
        turn, _ = await compact_turn(
            start.turn(),
            self.compactor,
            engine=self._base_engine,
            counter=self._counter,
            occasion="pending",
            filters=self._filters(),
        )
        return self._make_writer(start)(turn, frozenset())

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
        return ContentFilters(find_filters(self.engine))

    def _load_state(self, state: State) -> tuple[ChatState, DiscardedState | None]:
        """Return the state, or a new one with the reason why the given one was discarded."""
        if hasattr(state, "cr_await") or isinstance(state, Reply):
            remedy = "reply.state" if isinstance(state, Reply) else "the state of an awaited reply"
            raise InvalidSetting(
                f"a state must be bytes, not {describe_type(state)}; pass {remedy}"
            )
        data = as_bytes(state)
        if not data:
            return ChatState(self.provider), None
        found = self._recent.find(data) or decode_state(data, self.provider, self.cipher)
        if isinstance(found, DiscardedState):
            count("states_discarded_total", reason=found.reason)
            log.warning("a state was discarded and a new conversation started: %s", found)
            return ChatState(self.provider), found
        return leave_out(found, self._find_unsendable(found)), None

    def _find_unsendable(self, state: ChatState) -> set[str]:
        """Return the blocks with which every call would fail: of a newer Kedge, or without a form in this API."""
        found = {block.id for block in state.blocks if isinstance(block, UnknownBlock)}
        engine = unwrap(self._base_engine)
        if state.is_imported and isinstance(engine, StatelessEngine):
            turn, known = state.turn(), {block.id for block in state.blocks}
            block_id = engine.find_unsupported(self.engine.plan(turn.remove(*found)))
            while block_id in known - found:
                found.add(block_id)
                block_id = engine.find_unsupported(self.engine.plan(turn.remove(*found)))
        return found

    def _make_writer(self, start: ChatState) -> StateWriter:
        """Return a function that writes the states of a call that started with this one."""
        before = frozenset(block.id for block in start.blocks[: start.processed_length])

        def write(turn: Turn, seen: frozenset[str]) -> bytes:
            length = _count_seen(turn.body, before | seen)
            return self._encode_state(state_from_turn(turn, self.provider, length))

        return write

    def _encode_state(self, state: ChatState) -> bytes:
        data = encode_state(state)
        data = self.cipher.encrypt(data) if self.cipher else data
        self._recent.add(data, state)
        return data


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
    """Return the Turn to send: leading system blocks, then the history, then the rest."""
    new = _with_fresh_ids(start.blocks, added)
    lead = count_leading(new)
    return start.turn(new[:lead], new[lead:])


def _with_fresh_ids(known: Sequence[Block], added: Sequence[Block | str]) -> tuple[Block, ...]:
    """Return the added blocks; one that is part of the history already gets a new id."""
    ids = {block.id for block in known}
    blocks: list[Block] = []
    for each in added:
        block = user(each) if isinstance(each, str) else each
        if isinstance(block, Block) and block.id in ids:  # pyright: ignore[reportUnnecessaryIsInstance]
            block = structs.replace(block, id="")
        blocks.append(block)
        ids.add(getattr(block, "id", ""))
    return Turn(blocks).blocks  # the constructor checks that they are blocks


def _count_seen(blocks: Sequence[Block], seen: frozenset[str]) -> int:
    """Return the number of blocks up to the last one that a model has read."""
    for index in range(len(blocks) - 1, -1, -1):
        if blocks[index].id in seen:
            return index + 1
    return 0
