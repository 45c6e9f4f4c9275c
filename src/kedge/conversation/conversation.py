"""Conversation: a named, durable Turn with a head on its chain.

It is an engine with its middleware, and a place in a store. Every message is a step of a tree that
never forgets: ``undo``, ``edit``, ``regenerate`` and ``fork`` go elsewhere in the tree, and what was
there stays. The head moves by compare-and-swap, so any number of processes may work on one
conversation.
"""

import hashlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

from kedge.compaction import Compactor
from kedge.compaction.summarize import SUMMARY_PROMPT, build_summary_block
from kedge.conversation.anchor_index import with_stored_anchors
from kedge.conversation.checkpoint import Checkpoint
from kedge.conversation.navigation import (
    find_last_question,
    find_node,
    find_resume_point,
    find_undo_target,
    truncate_to_question,
)
from kedge.conversation.recorder import CostFunction
from kedge.conversation.run import (
    DEFAULT_LEASE,
    ConversationRun,
    ConversationStream,
    Reply,
    TurnTask,
    acquire_claim,
    maintain_claim,
)
from kedge.engines import Engine, Middleware
from kedge.engines.base import answer_text
from kedge.errors import InvalidSetting
from kedge.events import Event, Usage
from kedge.events.run import TurnFinished
from kedge.middleware.default_stack import Tools, with_default_middleware
from kedge.planning import Mode, RequestPlan
from kedge.planning.canonical import canonical_json
from kedge.providers import connect
from kedge.store import ConversationRow, Hit, Node, ResponseRow, Store
from kedge.store.records import NodeKind
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.turns import Block, Turn, new_id, user
from kedge.turns.frozen_json import EMPTY


class Conversation:
    """A conversation in a store. Make one with ``create``, ``open`` or ``fork``.

    ``engine`` is an engine or a model string; ``tools``, ``middleware``, ``compactor``, ``counter``,
    ``resend_limit`` and ``repair`` are those of ``Chat``. ``price`` tells what a response cost, in
    place of the current prices (``kedge.prices``).
    ``lease`` is for how many seconds a turn with an idempotency key is left to a process that shows
    no sign of life.
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
        """The conversation so far, up to the head as it was last seen."""
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
            innermost=[with_stored_anchors(store)],
        )
        self.price = price
        if lease <= 0:
            raise InvalidSetting("a lease is a number of seconds, above 0")
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
        id: str = "",  # noqa: A002 - the word of the contract
        **settings: Any,
    ) -> Self:
        """A new conversation, which may begin with blocks.

        ``mode="stateless"`` keeps nothing with the provider: encrypted reasoning is kept here.
        ``retention`` is how many seconds the provider is relied on to keep a response.
        """
        row = await store.create(title, tags=tags, mode=mode, retention=retention, data=data, id=id)
        made = await cls._load(store, row, engine, settings)
        given = tuple(_as_block(each) for each in blocks)
        if given:
            await made.append(*given)
        return made

    @classmethod
    async def open(cls, store: Store, id: str, engine: Engine | str, **settings: Any) -> Self:  # noqa: A002
        """The conversation with this id, at its head."""
        return await cls._load(store, await store.conversation(id), engine, settings)

    @classmethod
    async def _load(
        cls, store: Store, row: ConversationRow, engine: Engine | str, settings: Mapping[str, Any]
    ) -> Self:
        loaded = await store.load(row)
        return cls(store, row, loaded.node, loaded.turn(row.id), engine, **settings)

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
            return ConversationStream(self._stream_once(key, blocks, at, options))
        return ConversationStream(self._stream_message(blocks, at, options))

    async def resume(self, node: int | None = None, **options: Any) -> Reply:
        """Go on with a question that was saved and never answered: the newest here, or ``node``."""
        options.setdefault("streaming", False)
        at = await find_resume_point(self.store, self.row, node)
        return await self._resume_at(at, options)

    async def pending(self) -> Sequence[Node]:
        """Questions that were saved and never answered: on their way, or left by a crash."""
        return await self.store.pending(self.row)

    async def append(self, *messages: Block | str, kind: NodeKind = "added") -> Node:
        """Add blocks without asking the model."""
        turn = self.turn.append(*(_as_block(each) for each in messages))
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
        return await self._save_turn(self.turn.replace(block_id, block), "edited")

    async def regenerate(self, **options: Any) -> Reply:
        """Ask the last question again, as it stands now; the answer that was there stays in the tree."""
        options.setdefault("streaming", False)
        async with ConversationStream(
            self._stream_task(await self._build_regenerate_task(), options)
        ) as stream:
            return await stream.finish()

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
        asked = turn.append(user(ask, origin="merge_summary_of"))
        async with self._base_engine.stream(asked, streaming=False) as stream:
            await stream.finish()
        summary = build_summary_block(stream.text.strip(), turn.blocks[shared:])
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

    # How it is done

    async def _build_task(self, blocks: Sequence[Block], at: int | None, key: str = "") -> TurnTask:
        place = Checkpoint(self.store, self.row, self._node, self.turn)
        if at is not None and at != self.head:
            loaded = await self.store.load(self.row, at)
            place = Checkpoint(self.store, self.row, loaded.node, loaded.turn(self.id))
        return TurnTask(place, place.turn.append(*blocks), self.head, key)

    async def _stream_message(
        self, blocks: Sequence[Block], at: int | None, options: dict[str, Any]
    ) -> AsyncGenerator[Event | Reply]:
        async with aclosing(
            self._stream_task(await self._build_task(blocks, at), options)
        ) as events:
            async for event in events:
                yield event

    async def _stream_task(
        self, task: TurnTask, options: dict[str, Any]
    ) -> AsyncGenerator[Event | Reply]:
        run = ConversationRun(self, task, options)
        async with aclosing(run.events()) as events:
            async for event in events:
                if isinstance(event, Reply):
                    self._set_position(run.checkpoint.node, event.turn)
                yield event

    async def _stream_once(
        self, key: str, blocks: Sequence[Block], at: int | None, options: dict[str, Any]
    ) -> AsyncGenerator[Event | Reply]:
        """Run the turn with this key, unless it was run already."""
        owner = new_id("run")
        claim = await acquire_claim(self, key, _hash_request(blocks), owner)
        if claim.answer:
            reply = await self._load_reply(claim.answer)
            yield TurnFinished(reply.turn)
            yield reply
            return
        async with maintain_claim(self, key, owner):
            if claim.question:
                left = await find_resume_point(self.store, self.row, claim.question)
                if left.done:
                    await self.store.settle(self.row, key, left.node.id)
                    yield await self._adopt_answer(left.node)
                    return
                task = await self._build_resume_task(left.node, key)
            else:
                task = await self._build_task(blocks, at, key)
            async with aclosing(self._stream_task(task, options)) as events:
                async for event in events:
                    yield event

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

    async def _resume_at(self, at: Any, options: dict[str, Any]) -> Reply:
        if at.done:
            return await self._adopt_answer(at.node)
        stream = ConversationStream(
            self._stream_task(await self._build_resume_task(at.node), options)
        )
        async with stream:
            return await stream.finish()

    async def _adopt_answer(self, node: Node) -> Reply:
        """An answer that was saved, and whose head was never moved: move it."""
        reply = await self._load_reply(node.id)
        await self.store.move_head(self.row, node, head=self.head)
        self._set_position(node, reply.turn)
        return reply

    async def _load_reply(self, node: int) -> Reply:
        """The reply that is kept at a node."""
        loaded = await self.store.load(self.row, node)
        turn = loaded.turn(self.id)
        usage = await self.store.usage(self.row, node)
        return Reply(answer_text(turn), turn, node, self.id, usage or Usage(), stored=True)

    async def _save_turn(self, turn: Turn, kind: NodeKind) -> Node:
        place = Checkpoint(self.store, self.row, self._node, self.turn)
        node = await place.save(turn, kind, head=self.head)
        self._set_position(node, turn)
        return node

    async def _move_to(self, node: Node) -> None:
        await self.store.move_head(self.row, node, head=self.head)
        loaded = await self.store.load(self.row, node.id)
        self._set_position(node, loaded.turn(self.id))

    def _set_position(self, node: Node, turn: Turn) -> None:
        self._node, self.turn = node, turn
        self.row = replace(self.row, head=node.id)

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


def _hash_request(blocks: Sequence[Block]) -> bytes:
    """A hash of what is asked, as a model sees it."""
    joined = b"\n".join(canonical_json(block) or b"" for block in blocks)
    return hashlib.sha256(joined).digest()
