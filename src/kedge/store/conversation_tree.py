"""Conversations and their trees: made, grown, read, forked, and their heads moved.

Every method is one transaction: it happens whole or not at all, and what it returned is durable. A
transaction never waits for a model; what takes long happens between them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.errors import HeadConflict, NotInStore
from kedge.planning import Mode
from kedge.planning.state import ConversationState
from kedge.store import conversations, idempotency, nodes, responses
from kedge.store.block_codec import encode_block
from kedge.store.database import Database, Tx
from kedge.store.records import (
    ConversationRow,
    Differences,
    Incident,
    LoadedPath,
    Node,
    NodeKind,
    ResponseRow,
    StoredExchange,
    ToolRow,
    validate_data,
    validate_tags,
    validate_text,
)
from kedge.turns import Block, new_id
from kedge.turns.frozen_json import EMPTY, FrozenMap


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What happened besides the answer itself: written down with the node that it led to."""

    incidents: tuple[Incident, ...] = ()
    tools: tuple[ToolRow, ...] = ()
    exchanges: tuple[StoredExchange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.incidents or self.tools or self.exchanges)


_NO_TELEMETRY = Telemetry()


class TreeStore:
    """The conversations of a store, each with a head on a tree."""

    def __init__(
        self,
        database: Database,
        *,
        keep_bodies: bool = False,
        body_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = database
        self.keep_bodies = keep_bodies
        self.body_bytes = body_bytes
        self.clock = clock
        self._scope_names: dict[int, str] = {}
        self._scope_numbers: dict[str, int] = {}

    # Conversations

    async def create(
        self,
        title: str = "",
        *,
        tags: Iterable[str] = (),
        mode: Mode | None = None,
        retention: float | None = None,
        data: Mapping[str, Any] = EMPTY,
        id: str = "",  # noqa: A002 - the word of the contract
    ) -> ConversationRow:
        """Make a conversation."""
        name = validate_text(id, "id") or new_id("conv")
        title, labels, kept = (
            validate_text(title, "title"),
            validate_tags(tags),
            validate_data(data),
        )

        def work(tx: Tx) -> ConversationRow:
            return conversations.create(
                tx,
                name,
                title=title,
                tags=labels,
                mode=mode,
                retention=retention,
                data=kept,
                now=self.clock(),
            )

        return await self.database.write(work)

    async def conversation(self, name: str) -> ConversationRow:
        """The conversation with this id; ``NotInStore`` if there is none."""
        return await self.database.read(lambda tx: conversations.select_conversation(tx, name))

    async def conversations(
        self,
        *,
        tag: str | None = None,
        archived: bool | None = False,
        limit: int = 100,
        before: float | None = None,
    ) -> list[ConversationRow]:
        """Conversations, the one that changed last first; ``archived=None`` for all of them."""
        return await self.database.read(
            lambda tx: conversations.select_conversations(
                tx, tag=tag, archived=archived, limit=limit, before=before
            )
        )

    async def update(
        self,
        name: str,
        *,
        title: str | None = None,
        tags: Iterable[str] | None = None,
        archived: bool | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> ConversationRow:
        """Change what is given."""
        given: dict[str, Any] = {
            "title": None if title is None else validate_text(title, "title"),
            "tags": None if tags is None else validate_tags(tags),
            "archived": archived,
            "data": None if data is None else validate_data(data),
        }
        changes = {member: value for member, value in given.items() if value is not None}
        return await self.database.write(
            lambda tx: conversations.update(tx, name, changes, self.clock())
        )

    async def fork(self, origin: ConversationRow, at: int, title: str = "") -> ConversationRow:
        """A new conversation that goes on from a node of another; it shares all that came before."""
        name, title = new_id("conv"), validate_text(title, "title")

        def work(tx: Tx) -> ConversationRow:
            nodes.lock_conversation(tx, origin.number)
            nodes.select_node(tx, at, origin.tree)
            return conversations.fork(tx, name, origin, at, title, self.clock())

        return await self.database.write(work)

    # The tree

    async def append(
        self,
        conversation: ConversationRow,
        parent: Node,
        blocks: Sequence[Block],
        *,
        kind: NodeKind = "added",
        kept: int | None = None,
        response: ResponseRow | None = None,
        memory: ConversationState | None = None,
        data: FrozenMap = EMPTY,
        accounts: Telemetry = _NO_TELEMETRY,
        head: int | None = None,
        asked_for: str = "",
        answers: str = "",
    ) -> Node:
        """Add a node that keeps ``kept`` blocks of its parent's path (all by default) and adds these.

        With ``head``, the conversation's head is moved from there to the new node; if it is elsewhere
        by now the node is saved nevertheless, and ``HeadConflict`` names it. ``asked_for`` and
        ``answers`` are the idempotency keys that the node is the question of, or the answer to.
        """
        bodies = [encode_block(block) for block in blocks]
        number = conversation.number
        noted = None
        if memory is not None or data:
            noted = nodes.encode_node_state(memory or ConversationState(), data, conversation.mode)

        scope = await self._intern_scope(response.scope) if response else 0
        named = [(each, await self._intern_scope(each.scope)) for each in accounts.incidents]

        alone = not (accounts or asked_for or answers)

        def work(tx: Tx) -> tuple[Node, int | None]:
            node, moved = nodes.insert_node(
                tx,
                parent,
                bodies,
                number=number,
                kind=kind,
                now=self.clock(),
                kept=kept,
                memory=noted,
                response=response,
                scope=scope,
                head=head,
                single_statement=alone,
            )
            if accounts:
                self._insert_telemetry(tx, accounts, named, number, node.id)
            if asked_for:
                idempotency.record_question(tx, number, asked_for, node.id)
            if answers:
                idempotency.record_answer(tx, number, answers, node.id)
            if head is None or moved:
                return node, None
            return node, conversations.select_head(tx, number)

        node, elsewhere = await self.database.write(work)
        if elsewhere is not None:
            raise HeadConflict(conversation.id, node.id, elsewhere)
        return node

    async def move_head(self, conversation: ConversationRow, node: Node, *, head: int) -> None:
        """Move the head from where it is expected to be; ``HeadConflict`` if it is elsewhere."""

        def work(tx: Tx) -> int | None:
            nodes.select_node(tx, node.id, conversation.tree)
            if nodes.move_head(tx, conversation.number, head, node.id, self.clock()):
                return None
            return conversations.select_head(tx, conversation.number)

        elsewhere = await self.database.write(work)
        if elsewhere is not None:
            raise HeadConflict(conversation.id, node.id, elsewhere)

    async def load(self, conversation: ConversationRow, node: int | None = None) -> LoadedPath:
        """The path to a node (the head by default): its blocks and its anchors."""

        def work(tx: Tx) -> LoadedPath:
            at = conversation.head if node is None else node
            return nodes.load_path(
                tx,
                nodes.select_node(tx, at, conversation.tree),
                scopes=self._scope_names,
                mode=conversation.mode,
                retention=conversation.retention,
            )

        return await self.database.read(work)

    async def node(self, conversation: ConversationRow, node: int) -> Node:
        """One node."""
        return await self.database.read(lambda tx: nodes.select_node(tx, node, conversation.tree))

    async def tree(self, conversation: ConversationRow) -> list[Node]:
        """Every node of the tree, in the order in which they were made; forks are part of it."""
        query = f"SELECT {nodes.NODE_COLUMNS} FROM nodes n WHERE n.tree = ? ORDER BY n.id"
        rows = await self.database.read(lambda tx: tx.rows(query, (conversation.tree,)))
        return [nodes.node_from_row(row) for row in rows]

    async def path(self, conversation: ConversationRow, node: int | None = None) -> list[Node]:
        """The nodes from the root to a node (the head by default)."""
        at = conversation.head if node is None else node
        line = await self.database.read(lambda tx: nodes.load_ancestry(tx, at))
        if not line or line[0].tree != conversation.tree:
            raise NotInStore(f"there is no node {at} in this conversation")
        return line

    async def pending(self, conversation: ConversationRow) -> list[Node]:
        """Questions of a conversation below which there is no answer, the oldest first."""
        query = (
            f"SELECT {nodes.NODE_COLUMNS} FROM nodes n WHERE n.tree = ? AND n.conversation = ? "
            "AND n.kind = 'asked' AND n.id NOT IN (SELECT m.parent FROM nodes m WHERE m.tree = ? "
            "AND m.kind = 'answered') ORDER BY n.id"
        )
        values = (conversation.tree, conversation.number, conversation.tree)
        rows = await self.database.read(lambda tx: tx.rows(query, values))
        return [nodes.node_from_row(row) for row in rows]

    async def newest_below(self, conversation: ConversationRow, node: int) -> Node:
        """The newest node that a question led to so far: itself, results of tools, an answer."""

        def work(tx: Tx) -> Node:
            nodes.select_node(tx, node, conversation.tree)
            return nodes.find_newest_descendant(tx, node, conversation.tree)

        return await self.database.read(work)

    async def node_of_response(
        self, conversation: ConversationRow, response_id: str
    ) -> Node | None:
        """The node that a response made, by the provider's id."""
        query = (
            f"SELECT {nodes.NODE_COLUMNS} FROM nodes n JOIN responses r ON r.node = n.id "
            "WHERE n.tree = ? AND r.provider_response_id = ? ORDER BY n.id DESC LIMIT 1"
        )
        values = (conversation.tree, response_id)
        rows = await self.database.read(lambda tx: tx.rows(query, values))
        return nodes.node_from_row(rows[0]) if rows else None

    async def common_ancestor(self, conversation: ConversationRow, left: int, right: int) -> Node:
        """The newest node that is on the paths to both."""

        def work(tx: Tx) -> Node:
            for node in (left, right):
                nodes.select_node(tx, node, conversation.tree)
            return nodes.find_common_ancestor(tx, left, right)

        return await self.database.read(work)

    async def differences(
        self, conversation: ConversationRow, left: int, right: int
    ) -> Differences:
        """What each of two branches has after the blocks that both begin with."""

        def work(tx: Tx) -> Differences:
            both = (nodes.select_node(tx, node, conversation.tree) for node in (left, right))
            return nodes.diff_paths(tx, *both)

        return await self.database.read(work)

    async def _intern_scope(self, name: str) -> int:
        """The number of a scope, which never changes once it is written down."""
        number = self._scope_numbers.get(name)
        if number is None:
            number = await self.database.write(lambda tx: responses.intern_scope(tx, name))
            self._scope_numbers[name] = number
        return number

    def _insert_telemetry(
        self,
        tx: Tx,
        telemetry: Telemetry,
        scoped_incidents: Iterable[tuple[Incident, int]],
        number: int,
        node: int,
    ) -> None:
        for each, scope in scoped_incidents:
            tx.run(
                "INSERT INTO incidents (conversation, node, kind, reason, scope, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (number, node, each.kind, each.reason, scope, each.created_at),
            )
        for each in telemetry.tools:
            tx.run(
                "INSERT INTO tool_runs (conversation, node, name, outcome, seconds, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (number, node, each.name, each.outcome, each.seconds, each.created_at),
            )
        for each in telemetry.exchanges if self.keep_bodies else ():
            tx.run(
                "INSERT INTO exchanges (conversation, node, request, reply, status, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    number,
                    node,
                    each.request[: self.body_bytes],
                    each.reply[: self.body_bytes],
                    each.status,
                    each.created_at,
                ),
            )
