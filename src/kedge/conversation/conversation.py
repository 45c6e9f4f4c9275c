"""Conversation: a named, durable Turn with a head on its chain.

It is an engine with its middleware, and a place in a store. Every message is a step of a tree that
never forgets: ``undo``, ``edit``, ``regenerate`` and ``fork`` go elsewhere in the tree, and what was
there stays. The head moves by compare-and-swap, so any number of processes may work on one
conversation.
"""

import hashlib
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypedDict, Unpack

from kedge.compaction import Compactor
from kedge.compaction.summarize import SUMMARY_PROMPT, build_summary_block
from kedge.conversation.anchor_index import with_stored_anchors
from kedge.conversation.checkpoint import Checkpoint, limit_retention
from kedge.conversation.navigation import (
    ResumePoint,
    find_last_question,
    find_node,
    find_resume_point,
    find_undo_target,
    truncate_to_question,
)
from kedge.conversation.recorder import CostFunction
from kedge.conversation.run import (
    DEFAULT_LEASE,
    ClaimRequest,
    ConversationRun,
    ConversationStream,
    Reply,
    TurnTask,
)
from kedge.engines import (
    ContentFilters,
    Engine,
    Middleware,
    ResponsesEngine,
    find_filters,
    unwrap,
)
from kedge.engines.base import answer_text
from kedge.errors import HeadConflict, InvalidSetting, KeyReused
from kedge.events import Event, Usage
from kedge.events.run import TurnFinished
from kedge.middleware.default_stack import Tools, with_default_middleware
from kedge.planning import Mode, RequestPlan
from kedge.planning.canonical import canonical_json
from kedge.planning.state import MODES
from kedge.providers import connect
from kedge.store import Claim, ConversationRow, Hit, Node, ResponseRow, Store
from kedge.store.records import NodeKind
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.turns import Block, Turn, new_id, user
from kedge.turns.frozen_json import EMPTY

_TRANSPORT_OPTIONS = frozenset({"streaming", "tap", "candidates", "before_send"})
"""Options of a run that do not change what is requested."""


class ConversationSettings(TypedDict, total=False):
    """The keyword arguments of ``Conversation``, for ``create`` and ``open``."""

    tools: Tools
    middleware: Sequence[Middleware]
    compactor: Compactor | None
    counter: TokenCounter
    resend_limit: int | None
    repair: bool
    price: CostFunction | None
    lease: float


class Conversation:
    """A conversation in a store. Make one with ``create``, ``open`` or ``fork``.

    Args:
        store: The store that holds it.
        row: Its row in the store.
        node: The node at its head.
        turn: The Turn at that node.
        engine: An engine or a model string.
        tools: Functions that the model may call, or a toolbox.
        middleware: Middleware around the engine, the first one outermost.
        compactor: Keeps the conversation short.
        counter: Counts tokens for the compactor.
        resend_limit: Bytes above which history is compacted before it is sent in full again.
        repair: Whether to complete tool calls that have no result.
        price: Computes the cost of a response, instead of the current prices (``kedge.prices``).
        lease: Seconds after which a turn with an idempotency key is taken over from a process that
            does not renew its claim.

    Raises:
        InvalidSetting: A setting has an impossible value.
    """

    def __init__(
        self,
        store: Store,
        row: ConversationRow,
        node: Node,
        turn: Turn,
        engine: Engine | str,
        *,
        tools: Tools = (),
        middleware: Sequence[Middleware] = (),
        compactor: Compactor | None = None,
        counter: TokenCounter = DEFAULT_COUNTER,
        resend_limit: int | None = None,
        repair: bool = True,
        price: CostFunction | None = None,
        lease: float = DEFAULT_LEASE,
    ) -> None:
        self.store = store
        self.row = row
        self.turn = turn
        """The conversation up to the head as it was last seen."""
        self._node = node
        self._base_engine = connect(engine) if isinstance(engine, str) else engine
        self.engine = with_default_middleware(
            self._base_engine,
            tools=tools,
            middleware=middleware,
            compactor=compactor,
            counter=counter,
            resend_limit=resend_limit,
            repair=repair,
            innermost=[with_stored_anchors(store, row.retention)],
        )
        self.price = price
        if lease <= 0:
            raise InvalidSetting("lease must be a number of seconds above 0")
        self.lease = lease

    @classmethod
    async def create(
        cls,
        store: Store,
        engine: Engine | str,
        *,
        title: str = "",
        tags: Iterable[str] = (),
        blocks: Iterable[Block | str] = (),
        mode: Mode | None = None,
        retention: float | None = None,
        data: Mapping[str, Any] = EMPTY,
        id: str = "",  # noqa: A002 - the name in the public contract
        **settings: Unpack[ConversationSettings],
    ) -> Self:
        """Create a conversation.

        Args:
            store: The store to create it in.
            engine: An engine or a model string.
            title: Its title.
            tags: Its tags.
            blocks: The blocks that it starts with.
            mode: How requests are sent; ``"stateless"`` stores nothing with the provider.
            retention: Seconds for which the provider is relied on to hold a response.
            data: Further data to store with it.
            id: Its id; generated if empty.
            **settings: The keyword arguments of ``Conversation``.

        Returns:
            The conversation, at its head.

        Raises:
            InvalidSetting: The mode, the retention or another setting has an impossible value.
            Blocked: A guard rejects one of the blocks.
        """
        _check_mode(mode)
        _check_retention(retention)
        row = await store.create(title, tags=tags, mode=mode, retention=retention, data=data, id=id)
        conversation = await cls._load(store, row, engine, settings)
        initial = tuple(map(_as_block, blocks))
        if initial:
            await conversation.append(*initial)
        return conversation

    @classmethod
    async def open(
        cls,
        store: Store,
        id: str,  # noqa: A002 - the name in the public contract
        engine: Engine | str,
        **settings: Unpack[ConversationSettings],
    ) -> Self:
        """Open a conversation at its head.

        Args:
            store: The store that holds it.
            id: Its id.
            engine: An engine or a model string.
            **settings: The keyword arguments of ``Conversation``.

        Returns:
            The conversation, at its head.

        Raises:
            NotInStore: The store holds no conversation with this id.
        """
        return await cls._load(store, await store.conversation(id), engine, settings)

    @classmethod
    async def _load(
        cls,
        store: Store,
        row: ConversationRow,
        engine: Engine | str,
        settings: ConversationSettings,
    ) -> Self:
        loaded = await store.load(row)
        made = cls(store, row, loaded.node, loaded.turn(row.id), engine, **settings)
        inner = unwrap(made._base_engine)
        if isinstance(inner, ResponsesEngine):
            await inner.memory.attach(store, inner.model)
        return made

    @staticmethod
    async def list(
        store: Store, *, tag: str | None = None, archived: bool | None = False, limit: int = 100
    ) -> Sequence[ConversationRow]:
        """The conversations of a store, the one that changed last first."""
        return await store.conversations(tag=tag, archived=archived, limit=limit)

    @staticmethod
    async def search(store: Store, words: str, *, limit: int = 20) -> Sequence[Hit]:
        """The blocks of a store that hold all of these words, the newest first."""
        return await store.search(words, limit=limit)

    @staticmethod
    async def import_(store: Store, lines: str | Iterable[str]) -> Sequence[ConversationRow]:
        """Make the conversations that exported lines tell of; one whose id is taken gets a new one."""
        return await store.import_(lines)

    @property
    def id(self) -> str:
        """The conversation's name, everywhere and for good."""
        return self.row.id

    @property
    def title(self) -> str:
        """What people call it."""
        return self.row.title

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags."""
        return self.row.tags

    @property
    def head(self) -> int:
        """The node where the conversation stands, as it was last seen."""
        return self._node.id

    # Talking

    async def send(
        self, *messages: Block | str, key: str = "", at: int | None = None, **options: Any
    ) -> Reply:
        """Say something, and get the answer; both are in the store by then.

        The same ``key`` runs once, whoever asks and however often; later ones get the answer that is
        there. ``at`` is the node to go on from, in the place of the head; the head follows when the
        answer is there. ``options`` are those of an engine's ``run``.
        """
        options.setdefault("streaming", False)
        async with self.stream(*messages, key=key, at=at, **options) as stream:
            return await stream.finish()

    def stream(
        self, *messages: Block | str, key: str = "", at: int | None = None, **options: Any
    ) -> ConversationStream:
        """The same, watching what happens: iterate to the end, then take ``reply``."""
        blocks = tuple(_as_block(each) for each in messages)
        if key:
            return ConversationStream(partial(self._stream_once, key, blocks, at, options))
        return ConversationStream(
            partial(self._run, partial(self._build_task, blocks, at), options)
        )

    async def resume(self, node: int | None = None, **options: Any) -> Reply:
        """Go on with a question that was saved and never answered: the newest here, or ``node``."""
        options.setdefault("streaming", False)
        point = await find_resume_point(self.store, self.row, node)
        if point.done:
            return await self._adopt_answer(point.node)
        return await self._finish_task(partial(self._build_resume_task, point.node), options)

    async def pending(self) -> Sequence[Node]:
        """Questions that were saved and never answered: on their way, or left by a crash."""
        return await self.store.pending(self.row)

    async def append(self, *messages: Block | str, kind: NodeKind = "added") -> Node:
        """Add blocks without asking the model."""
        turn = self.turn.append(*self._filter_blocks(map(_as_block, messages)))
        return await self._save_turn(turn, kind)

    def plan(self, *messages: Block | str, **options: Any) -> RequestPlan:
        """What ``send`` would send, and why: a dry run."""
        turn = self.turn.append(*(_as_block(each) for each in messages))
        return self.engine.plan(turn, **options)

    # Going elsewhere in the tree

    async def refresh(self) -> Self:
        """Go to where the head is now."""
        self.row = await self.store.conversation(self.id)
        loaded = await self.store.load(self.row)
        self._set_position(loaded.node, loaded.turn(self.id))
        return self

    async def fork(self, at: int | str | None = None, *, title: str = "") -> Self:
        """A conversation of its own that goes on from here, or from a node, a response or a block."""
        node, kept = await find_node(self.store, self.row, self._node, self.turn, at)
        row = await self.store.fork(self.row, node.id, title or self.title)
        loaded = await self.store.load(row)
        forked = self._clone(row, loaded.node, loaded.turn(row.id))
        if kept < node.length:
            await forked._save_turn(forked.turn.take(kept), "edited")  # noqa: SLF001 - one of us
        return forked

    async def undo(self) -> Self:
        """Go back to before the last question (or edit); what was said since stays in the tree."""
        line = await self.store.path(self.row, self.head)
        await self._move_to(find_undo_target(line))
        return self

    async def edit(self, block_id: str, new: Block | str) -> Node:
        """Put another block in the place of one; what comes after it stays."""
        old = self.turn.blocks[self.turn.index(block_id)]
        block = user(new) if isinstance(new, str) else new
        if isinstance(new, str) and old.kind != "user":
            raise InvalidSetting(f"a text stands for a user block; give a block for a {old.kind}")
        (block,) = self._filter_blocks([block])
        return await self._save_turn(self.turn.replace(block_id, block), "edited")

    async def regenerate(self, **options: Any) -> Reply:
        """Ask the last question again, as it stands now; the answer that was there stays in the tree."""
        options.setdefault("streaming", False)
        return await self._finish_task(self._build_regenerate_task, options)

    async def merge_summary_of(
        self, other: "Conversation | int", *, ask: str = SUMMARY_PROMPT
    ) -> Node:
        """Have the model sum up another conversation, or a branch of this one, and add the summary."""
        if isinstance(other, int):
            loaded = await self.store.load(self.row, other)
            shared = (await self.store.differences(self.row, self.head, other)).shared
            turn = loaded.turn()
        else:
            turn, shared = other.turn, 0
        # The engine without middleware: so the filters of the middleware are applied here.
        filters = ContentFilters(find_filters(self.engine))
        turn = filters.apply_to_turn(turn, ("input",))
        asked = turn.append(user(ask, origin="merge_summary_of"))
        async with self._base_engine.stream(asked, streaming=False) as stream:
            await stream.finish()
        text = answer_text(filters.apply_to_turn(stream.turn, ("output",))).strip()
        summary = build_summary_block(text, turn.blocks[shared:])
        return await self.append(summary, kind="merged")

    # Its name and its end

    async def rename(self, title: str) -> None:
        """Give it another title."""
        self.row = self._with_head(await self.store.update(self.id, title=title))

    async def tag(self, *tags: str) -> None:
        """Add tags."""
        self.row = self._with_head(await self.store.update(self.id, tags=(*self.tags, *tags)))

    async def untag(self, *tags: str) -> None:
        """Remove tags."""
        left = [tag for tag in self.tags if tag not in tags]
        self.row = self._with_head(await self.store.update(self.id, tags=left))

    async def archive(self, archived: bool = True) -> None:
        """Put it away, or back."""
        self.row = self._with_head(await self.store.update(self.id, archived=archived))

    async def delete(self) -> None:
        """Delete it for good: its rows, and the blocks that no other conversation uses."""
        await self.store.delete(self.id)

    async def export(self) -> str:
        """All of it as lines of JSON: the tree, the anchors, everything; see ``import_``."""
        return await self.store.export(self.row)

    async def responses(self) -> Sequence[ResponseRow]:
        """Every response of this conversation, in the order in which they came."""
        return await self.store.responses(self.row)

    async def aclose(self) -> None:
        """Close the engine's connections; the store is its owner's to close."""
        await self.engine.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Conversation {self.id} at node {self.head}, {len(self.turn)} blocks>"

    # Implementation

    def _run(
        self, build_task: Callable[[], Awaitable[TurnTask]], options: dict[str, Any]
    ) -> AsyncGenerator[Event | Reply]:
        run = ConversationRun(
            self.engine, build_task, options, price=self.price, on_finish=self._set_position
        )
        return run.events()

    async def _finish_task(
        self, build_task: Callable[[], Awaitable[TurnTask]], options: dict[str, Any]
    ) -> Reply:
        async with ConversationStream(partial(self._run, build_task, options)) as stream:
            return await stream.finish()

    async def _build_task(self, blocks: Sequence[Block], at: int | None, key: str = "") -> TurnTask:
        checkpoint = Checkpoint(self.store, self.row, self._node, self.turn)
        if at is not None and at != self.head:
            loaded = await self.store.load(self.row, at)
            checkpoint = Checkpoint(self.store, self.row, loaded.node, loaded.turn(self.id))
        return TurnTask(checkpoint, checkpoint.turn.append(*blocks), self.head, key)

    async def _stream_once(
        self, key: str, blocks: Sequence[Block], at: int | None, options: dict[str, Any]
    ) -> AsyncGenerator[Event | Reply]:
        """Run the turn with this key, unless it was run already."""
        request = ClaimRequest(self.store, self.row, key, new_id("run"), self.lease)
        claim = await self._acquire(request, blocks, options)
        if claim.answer:
            await self._follow_head()
            reply = await self._load_reply(claim.answer)
            yield TurnFinished(reply.turn)
            yield reply
            return
        async with request.maintain():
            point = await self._find_claimed_turn(claim.question) if claim.question else None
            if point and point.done:
                reply = await self._adopt_answer(point.node)
                await self.store.settle(self.row, key, point.node.id)
                yield TurnFinished(reply.turn)
                yield reply
                return
            if point:
                events = self._run(partial(self._build_resume_task, point.node, key), options)
            else:
                events = self._run(partial(self._build_task, blocks, at, key), options)
            async with aclosing(events):
                async for event in events:
                    yield event

    async def _acquire(
        self, request: ClaimRequest, blocks: Sequence[Block], options: Mapping[str, Any]
    ) -> Claim:
        model = options.get("model") or getattr(unwrap(self._base_engine), "model", "")
        try:
            return await request.acquire(_hash_request(blocks, {**options, "model": model}))
        except KeyReused:
            # Version 0.1 hashed the messages only; of its keys nothing more can be compared.
            return await request.acquire(_hash_blocks(blocks))

    async def _find_claimed_turn(self, question: int) -> ResumePoint | None:
        """Return where the turn of a key continues; None if it is to be run from the current head.

        A turn whose answer lost the race for the head is on a branch of its own: neither on the path
        to the head nor following from it. It is not part of the conversation, and runs again.
        """
        point = await find_resume_point(self.store, self.row, question)
        head = (await self.store.conversation(self.id)).head
        is_stored = await self._is_on_path(point.node.id, head)
        if is_stored or await self._is_on_path(head, point.node.id):
            return point
        if head != self.head:  # it would lose again
            raise HeadConflict(self.id, point.node.id, head)
        return None

    async def _is_on_path(self, node: int, end: int) -> bool:
        return any(each.id == node for each in await self.store.path(self.row, end))

    async def _follow_head(self) -> None:
        """Continue from where the head is now, if it moved since it was last seen."""
        if (await self.store.conversation(self.id)).head != self.head:
            await self.refresh()

    async def _build_resume_task(self, node: Node, key: str = "") -> TurnTask:
        loaded = await self.store.load(self.row, node.id)
        turn = loaded.turn(self.id)
        place = Checkpoint(self.store, self.row, loaded.node, turn)
        return TurnTask(place, turn, self.head, key, resumed=True)

    async def _build_regenerate_task(self) -> TurnTask:
        """The last question; where something was edited or added since, from the Turn as it is."""
        asked = find_last_question(await self.store.path(self.row, self.head))
        if asked:
            return await self._build_resume_task(asked)
        place = Checkpoint(self.store, self.row, self._node, self.turn)
        return TurnTask(place, truncate_to_question(self.turn), self.head)

    async def _adopt_answer(self, node: Node) -> Reply:
        """Return a stored answer, and move the head to it unless it is on the head's path."""
        await self._follow_head()
        reply = await self._load_reply(node.id)
        if not await self._is_on_path(node.id, self.head):
            await self.store.move_head(self.row, node, head=self.head)
            self._set_position(node, reply.turn)
        return reply

    async def _load_reply(self, node: int) -> Reply:
        """The reply that is kept at a node."""
        loaded = await self.store.load(self.row, node)
        turn = loaded.turn(self.id)
        usage = await self.store.usage(self.row, node)
        return Reply(answer_text(turn), turn, node, self.id, usage or Usage(), stored=True)

    def _filter_blocks(self, blocks: Iterable[Block]) -> tuple[Block, ...]:
        """Return blocks as the guards of this conversation let them into the store."""
        filters = ContentFilters(find_filters(self.engine))
        return tuple(filters.apply(block, ("input",)) for block in blocks)

    async def _save_turn(self, turn: Turn, kind: NodeKind) -> Node:
        place = Checkpoint(self.store, self.row, self._node, self.turn)
        node = await place.save(turn, kind, head=self.head)
        self._set_position(node, turn)
        return node

    async def _move_to(self, node: Node) -> None:
        await self.store.move_head(self.row, node, head=self.head)
        loaded = await self.store.load(self.row, node.id)
        self._set_position(node, loaded.turn(self.id))

    def _set_position(self, node: Node, turn: Turn) -> Turn:
        """Continue from a node; returns the Turn with the conversation's retention applied."""
        self._node, self.turn = node, limit_retention(turn, self.row.retention)
        self.row = replace(self.row, head=node.id)
        return self.turn

    def _with_head(self, row: ConversationRow) -> ConversationRow:
        """The row as it is now, with the head as we know it: what we hold is the Turn up to there."""
        return replace(row, head=self.head)

    def _clone(self, row: ConversationRow, node: Node, turn: Turn) -> Self:
        """Another conversation with the same engine around it."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.row, other.turn, other._node = row, turn, node
        return other


def _as_block(message: Block | str) -> Block:
    return user(message) if isinstance(message, str) else message


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise InvalidSetting(f"mode must be one of {', '.join(MODES)}, not {mode!r}")


def _check_retention(retention: float | None) -> None:
    if retention is not None and not 0 < retention < math.inf:
        raise InvalidSetting(f"retention must be a number of seconds above 0, not {retention!r}")


def _hash_request(blocks: Sequence[Block], options: Mapping[str, Any]) -> bytes:
    """Return a hash of a request: the messages as a model sees them, the model and all settings."""
    settings = {name: value for name, value in options.items() if name not in _TRANSPORT_OPTIONS}
    described = json.dumps(settings, sort_keys=True, default=str).encode()
    return hashlib.sha256(b"request\n" + _hash_blocks(blocks) + described).digest()


def _hash_blocks(blocks: Sequence[Block]) -> bytes:
    """Return a hash of messages, as a model sees them."""
    joined = b"\n".join(canonical_json(block) or b"" for block in blocks)
    return hashlib.sha256(joined).digest()
