"""Chat: give it the state and a message, take the answer and the new state.

A Chat keeps nothing between calls: all there is to know about a conversation is in the state bytes,
which its owner keeps where they like. So the same bytes continue a conversation in any process, and
two calls from the same bytes are two branches of it, both right.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

from kedge.chat.answer import Answer, ChatStream, StateWriter
from kedge.chat.encryption import Key, StateCipher
from kedge.chat.inspect import StateReport, build_report
from kedge.chat.state import (
    ChatState,
    DiscardedState,
    as_bytes,
    decode_state,
    encode_state,
    state_from_turn,
)
from kedge.compaction import Compactor, compact_turn
from kedge.engines import Engine, Middleware, unwrap
from kedge.middleware.default_stack import Tools, with_default_middleware
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan
from kedge.providers import connect
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.turns import Block, Turn, user
from kedge.turns.turn import count_leading

log = get_logger("kedge.chat")

State = bytes | bytearray | memoryview | str | None
"""What may be given for a state: the bytes of the last answer, or nothing for a new conversation."""

EVENT_KEY = "event"
"""Metadata key of a block that tells of an event."""


class _StateInspector:
    """``inspect_state``, on a Chat or on the class, which knows neither provider nor key."""

    def __get__(self, chat: "Chat | None", owner: type["Chat"]) -> Callable[[State], StateReport]:
        provider, sealer = (chat.provider, chat.cipher) if chat else (None, None)
        return lambda state: build_report(as_bytes(state), provider, sealer)


class Chat:
    """A conversation partner for people who keep their own sessions.

    ``engine`` is an engine or a model string. ``tools`` are functions that the model may call,
    ``middleware`` wraps the engine (the first one outermost), ``compactor`` keeps conversations short.
    With ``key`` (or several, the first one encrypts) state bytes are encrypted. Above ``resend_limit``
    bytes, history is compacted before it is sent again because a server forgot. ``repair`` mends calls
    that have no result.
    """

    def __init__(
        self,
        engine: Engine | str,
        *,
        tools: Tools = (),
        middleware: Sequence[Middleware] = (),
        compactor: Compactor | None = None,
        key: Key | Iterable[Key] | None = None,
        counter: TokenCounter = DEFAULT_COUNTER,
        resend_limit: int | None = None,
        repair: bool = True,
    ) -> None:
        self._base_engine = connect(engine) if isinstance(engine, str) else engine
        self.provider = unwrap(self._base_engine).name
        self.compactor = compactor
        self.cipher = None if key is None else StateCipher(key)
        self._counter = counter
        self.engine = with_default_middleware(
            self._base_engine,
            tools=tools,
            middleware=middleware,
            compactor=compactor,
            counter=counter,
            resend_limit=resend_limit,
            repair=repair,
        )

    async def chat_with_state(self, state: State, *blocks: Block | str, **options: Any) -> Answer:
        """Say something, and get the answer with the state to go on with.

        Leading system blocks are sent with this call and not stored. ``options`` are those of an
        engine's ``run``, such as ``model``.
        """
        options.setdefault("streaming", False)
        async with self.stream_with_state(state, *blocks, **options) as stream:
            return await stream.finish()

    def stream_with_state(self, state: State, *blocks: Block | str, **options: Any) -> ChatStream:
        """The same, watching what happens: iterate to the end, then take ``answer``."""
        start = self._load_state(state)
        turn = _build_turn(start, blocks)
        stream = self.engine.stream(turn, **options)
        return ChatStream(stream, turn, as_bytes(state), self._make_writer(start))

    def append_to_state(self, state: State, *blocks: Block | str) -> bytes:
        """Add blocks without asking the model; they are pending until the next call."""
        start = self._load_state(state)
        new = _with_fresh_ids(start.blocks, blocks)
        lead = 0 if start.blocks else count_leading(new)
        if lead:
            log.warning("leading system blocks are not stored; give them with each call")
        return self._encode_state(replace(start, blocks=(*start.blocks, *new[lead:])))

    def update_state_after_event(self, state: State, text: str) -> bytes:
        """Tell of an event, as the user would, without asking the model."""
        return self.append_to_state(state, user(text, metadata={EVENT_KEY: True}))

    async def compact_pending(self, state: State) -> bytes:
        """Compact now, before a call, if there are pending blocks and the compactor finds it is time."""
        start = self._load_state(state)
        if self.compactor is None or start.processed_length == len(start.blocks):
            return as_bytes(state)
        turn, _ = await compact_turn(
            start.turn(),
            self.compactor,
            engine=self._base_engine,
            counter=self._counter,
            occasion="pending",
        )
        return self._make_writer(start)(turn, frozenset())

    inspect_state = _StateInspector()
    """What is inside a state, and why it would be discarded; see ``StateReport``."""

    def plan(self, state: State, *blocks: Block | str, **options: Any) -> RequestPlan:
        """What ``chat_with_state`` would send, and why: a dry run."""
        return self.engine.plan(_build_turn(self._load_state(state), blocks), **options)

    async def aclose(self) -> None:
        """Close the engine's connections."""
        await self.engine.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _load_state(self, state: State) -> ChatState:
        """The state; a fresh one for no state, and for one that cannot be used."""
        data = as_bytes(state)
        if not data:
            return ChatState(self.provider)
        found = decode_state(data, self.provider, self.cipher)
        if isinstance(found, DiscardedState):
            count("states_discarded_total", reason=found.reason)
            log.warning("a state was discarded, the conversation starts afresh: %s", found)
            return ChatState(self.provider)
        return found

    def _make_writer(self, start: ChatState) -> StateWriter:
        """How to write the states of a call that began with this one."""
        before = frozenset(block.id for block in start.blocks[: start.processed_length])

        def write(turn: Turn, seen: frozenset[str]) -> bytes:
            length = _count_seen(turn.body, before | seen)
            return self._encode_state(state_from_turn(turn, self.provider, length))

        return write

    def _encode_state(self, state: ChatState) -> bytes:
        data = encode_state(state)
        return self.cipher.encrypt(data) if self.cipher else data


def _build_turn(start: ChatState, given: Sequence[Block | str]) -> Turn:
    """The Turn to send: leading system blocks in front, then the history, then the rest."""
    new = _with_fresh_ids(start.blocks, given)
    lead = count_leading(new)
    return start.turn(new[:lead], new[lead:])


def _with_fresh_ids(known: Sequence[Block], given: Sequence[Block | str]) -> tuple[Block, ...]:
    """The given blocks; one that was said before gets an id of its own."""
    ids = {block.id for block in known}
    blocks: list[Block] = []
    for each in given:
        block = user(each) if isinstance(each, str) else each
        if isinstance(block, Block) and block.id in ids:  # pyright: ignore[reportUnnecessaryIsInstance]
            block = replace(block, id="")
        blocks.append(block)
        ids.add(getattr(block, "id", ""))
    return tuple(blocks)


def _count_seen(blocks: Sequence[Block], seen: frozenset[str]) -> int:
    """How far into the blocks a model has seen."""
    for index in range(len(blocks) - 1, -1, -1):
        if blocks[index].id in seen:
            return index + 1
    return 0
