"""Store: conversations, their blocks and their responses, on SQLite or PostgreSQL.

Every method is one transaction: it is applied completely or not at all, and is durable when the method
returns. No transaction waits for a model. SQL is in the modules of the tables; this class opens
transactions and checks that the conversation of a row still exists.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from kedge.database.transactions import Database, NamespaceDatabase, Tx, split_chunks
from kedge.errors import (
    HeadConflict,
    InvalidSetting,
    NotInStore,
    StoreBusy,
    StoreError,
)
from kedge.event_loops import AsyncResource, SharedLock, SyncFacade, wrap_method
from kedge.events.request_record import RequestRecord
from kedge.memory.object_claims import Claim as ObjectClaim
from kedge.memory.object_claims import UnusedObject
from kedge.planning import AnchorRecord, Mode
from kedge.planning.anchors import validate_seconds
from kedge.planning.state import ConversationState
from kedge.store import (
    conversations,
    delete,
    idempotency,
    import_export,
    node_paths,
    nodes,
    proxied_requests,
    response_index,
    response_sums,
    responses,
    search,
    telemetry,
    verify,
)
from kedge.store.locks import lock_names, lock_tree_shared
from kedge.store.proxied_requests import ProxiedRequest, ProxyTotals
from kedge.store.records import (
    MAX_INTEGER,
    NO_TELEMETRY,
    Claim,
    ConversationRow,
    Damage,
    Differences,
    Hit,
    LoadedPath,
    Node,
    NodeKind,
    StoredExchange,
    Telemetry,
    UnansweredQuestion,
    is_row_number,
    new_row,
    validate_data,
    validate_namespace,
    validate_page,
    validate_text,
)
from kedge.store.stored_blocks import decode_blocks
from kedge.turns import Block, Turn, new_id
from kedge.turns.block_codec import encode_block
from kedge.turns.frozen_json import EMPTY, FrozenMap

T = TypeVar("T")

_Appended = tuple[Node, int | None]
"""A new node, and the head if it is elsewhere."""
MAX_NUMBER_LENGTH = 100
"""How many digits of a node's number are read; Python rejects thousands of them."""


def _at_node(
    conversation: ConversationRow, node: int, work: Callable[[Tx, Node], T]
) -> Callable[[Tx], T]:
    """Return a transaction on a node, which raises `NotInStore` if the conversation's tree does not have it."""
    return lambda tx: work(tx, nodes.select_node(tx, node, conversation.tree))


class Store(AsyncResource):
    """Conversations, each with a head on a tree of nodes, in a database.

    Use `open_store` to make one; its first use opens it, or ``await store``.

    Methods that take a `ConversationRow` raise `NotInStore` if that
    conversation was deleted since the row was read, also if another one has its id now.

    A store contains the conversations of one namespace: the default one, or that of `use_namespace`. Those of
    other namespaces do not exist for any of its methods.

    Args:
        database: The open database, with the current schema.
        keep_bodies: Whether the bodies of requests and replies are stored.
        body_bytes: The maximum number of bytes stored of each of them.
        clock: A function that returns the time to record, in seconds since 1970.
    """

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
        self._unsummed = 0
        self._queues: WeakValueDictionary[str, SharedLock] = WeakValueDictionary()
        self._queue_lock = threading.Lock()

    @property
    def _body_limit(self) -> int:
        """The number of bytes that are stored of each body."""
        return self.body_bytes if self.keep_bodies else 0

    def __await__(self) -> Generator[Any, None, Self]:
        """Open the database, if no other use has opened it."""
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self.database.read(lambda _: None)
        return self

    @property
    def sync(self) -> "SyncStore":
        """The methods of this store for sync code: ``with open_store("chat.db").sync as store``."""
        return SyncStore(self)

    async def aclose(self) -> None:
        """Close the database: its threads and its connections; this store cannot be used again."""
        await self.database.aclose()

    def get_queue(self, name: str) -> SharedLock:
        """Return the lock for which the queued turns of a conversation wait in this process."""
        with self._queue_lock:
            return self._queues.setdefault(name, SharedLock())

    # Namespaces

    @property
    def namespace(self) -> str:
        """The namespace of this store's conversations; empty for the default one."""
        database = self.database
        return database.namespace if isinstance(database, NamespaceDatabase) else ""

    def use_namespace(self, name: str) -> "Store":
        """Return this store bound to one namespace, for example for one user.

        Example:
            alice = store.use_namespace("alice")
            conversation = Conversation("practice", store=alice)

        Args:
            name: The name of the namespace; it exists as soon as it has a conversation.

        Returns:
            A store on the same connections, which need not be closed.

        Raises:
            InvalidSetting: The name is not valid, or this store is bound to another namespace.
        """
        self._require_default("use_namespace")
        return Store(
            NamespaceDatabase(self.database, validate_namespace(name)),
            keep_bodies=self.keep_bodies,
            body_bytes=self.body_bytes,
            clock=self.clock,
        )

    async def namespaces(self, *, scheduled: bool = False) -> list[str]:
        """Return the names of the namespaces that have conversations, without the default one.

        Args:
            scheduled: Whether to return only those with conversations that are about to be deleted.

        Returns:
            The names, in alphabetical order.

        Raises:
            InvalidSetting: This store is bound to a namespace.
        """
        self._require_default("namespaces")
        return await self.database.read(
            lambda tx: conversations.select_namespaces(tx, scheduled=scheduled)
        )

    async def database_time(self) -> float:
        """Return the time of the database's clock, which all processes share, in seconds since 1970."""
        rows = await self.database.read(lambda tx: tx.rows(f"SELECT {tx.dialect.now}"))
        return rows[0][0]

    def _require_default(self, operation: str) -> None:
        """Raise `InvalidSetting` for an operation on all namespaces, if the store is bound to one."""
        if self.namespace:
            raise InvalidSetting(
                f"{operation} is not allowed in the namespace {self.namespace!r}; "
                "use the store without a namespace"
            )

    # Servers

    async def load_evidence(self, key: str) -> dict[str, Any] | None:
        """Return the evidence about the memory of a server; see `kedge.memory.evidence`."""
        return await self.database.read(lambda tx: response_index.select_evidence(tx, key))

    async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, replacing the previous one."""
        now = self.clock()
        await self.database.write(lambda tx: response_index.put_evidence(tx, key, form, now))

    async def claim_object(
        self, scope: str, object_id: str, last: str, *, owner: str
    ) -> ObjectClaim:
        """Claim a conversation object of a server for a request; see `kedge.memory.object_claims`.

        Args:
            scope: The provider, endpoint and account.
            object_id: The conversation object.
            last: The last response in the object, as far as the caller knows; empty for a new object.
            owner: Identifies the process.

        Returns:
            Whether the object ends with this response, may do so, or is continued by another line of history.
        """
        now = self.clock()
        return await self.database.write(
            lambda tx: response_index.claim_object(tx, scope, object_id, last, owner=owner, now=now)
        )

    async def release_object(self, scope: str, object_id: str, last: str, *, owner: str) -> None:
        """Record the last response in a conversation object that ``owner`` has claimed."""
        await self.database.write(
            lambda tx: response_index.release_object(tx, scope, object_id, last, owner=owner)
        )

    async def list_unused_objects(self) -> list[UnusedObject]:
        """Return the conversation objects that Kedge made and that no stored line of history continues.

        An object whose last request is less than a day old may be in use, unless its conversation was deleted.

        Returns:
            The objects, the least recently used first.
        """
        now = self.clock()
        return await self.database.read(lambda tx: response_index.list_unused_objects(tx, now))

    async def take_unused_objects(self, scope: str, limit: int) -> list[UnusedObject]:
        """Return unused objects of a server to delete there; from now on they cannot be claimed.

        Args:
            scope: The provider, endpoint and account.
            limit: The maximum number of objects.

        Returns:
            The objects, as `list_unused_objects` does, which lists them until `delete_object`.
        """
        now = self.clock()
        return await self.database.write(
            lambda tx: response_index.take_unused_objects(tx, scope, limit, now)
        )

    async def delete_object(self, unused: UnusedObject) -> None:
        """Delete the claim of an unused object that its server has deleted."""
        await self.database.write(lambda tx: response_index.delete_object(tx, unused.name))

    # Requests through a proxy

    async def add_proxied(self, requests: Sequence[ProxiedRequest]) -> None:
        """Store requests that were sent through a proxy; bodies only with ``keep_bodies``.

        Args:
            requests: The requests; the newest 10,000 of this namespace are retained.
        """
        await self.database.write(
            lambda tx: proxied_requests.insert_proxied(tx, requests, self._body_limit)
        )

    async def list_proxied(self, *, limit: int = 100, before: int = 0) -> list[ProxiedRequest]:
        """Return requests that were sent through a proxy, newest first, without their bodies.

        Args:
            limit: The maximum number of requests.
            before: The number of the request before which to continue; 0 for the newest.

        Returns:
            The requests.

        Raises:
            InvalidSetting: The limit is negative.
        """
        validate_page(limit)
        return await self.database.read(
            lambda tx: proxied_requests.select_proxied(
                tx, limit, min(before or MAX_INTEGER, MAX_INTEGER)
            )
        )

    async def get_proxied(self, number: int) -> ProxiedRequest:
        """Return one request that was sent through a proxy, with its bodies if they were stored.

        Raises:
            NotInStore: There is none.
        """
        return await self.database.read(lambda tx: proxied_requests.select_proxied_one(tx, number))

    async def export_proxied(self) -> list[str]:
        """Return the requests with complete bodies as lines of JSON, oldest first.

        Each line has ``name``, ``api``, ``host``, ``status``, ``request`` and ``body``, the form of recordings.
        """
        return await self.database.read(
            lambda tx: proxied_requests.export_recordings(tx, self.body_bytes)
        )

    async def sum_proxied(self) -> ProxyTotals:
        """Return the sums over the stored requests that were sent through a proxy."""
        return await self.database.read(proxied_requests.sum_proxied)

    # Conversations

    async def create(
        self,
        title: str = "",
        *,
        tags: Iterable[str] = (),
        mode: Mode | None = None,
        retention: float | None = None,
        ttl: float | None = None,
        data: Mapping[str, Any] = EMPTY,
        id: str = "",  # noqa: A002 - the name in the public contract
        blocks: Sequence[Block] = (),
    ) -> ConversationRow:
        """Create a conversation.

        Args:
            title: The title.
            tags: Tags to find it by.
            mode: The mode of its requests; None for the engine's default.
            retention: Seconds for which the provider is assumed to store a response, if that is less
                than the provider's retention.
            ttl: Seconds after its last change at which it expires and `delete_expired` deletes it.
            data: JSON data of the application.
            id: Its id; a new one by default.
            blocks: Blocks that it begins with, written in the same transaction.

        Returns:
            The row of the new conversation.

        Raises:
            InvalidSetting: A value is not allowed, or there is a conversation with this id already.
        """
        row = new_row(title, tags=tags, mode=mode, retention=retention, ttl=ttl, data=data, id=id)
        return await self.insert(row, blocks)

    async def insert(self, new: ConversationRow, blocks: Sequence[Block] = ()) -> ConversationRow:
        """Create the conversation of a new row, with its first node and the blocks that it begins with.

        Args:
            new: The row of `new_row`.
            blocks: Blocks that it begins with, written in the same transaction.

        Returns:
            The row of the new conversation.

        Raises:
            InvalidSetting: There is a conversation with this id already.
        """
        bodies = [encode_block(block) for block in Turn(blocks)]  # which checks them

        def work(tx: Tx) -> ConversationRow:
            now = self.clock()
            row = nodes.create_conversation(
                tx,
                new.id,
                title=new.title,
                tags=new.tags,
                mode=new.mode,
                retention=new.retention,
                data=new.data,
                now=now,
                ttl=new.ttl,
            )
            return _insert_first_blocks(tx, row, bodies, now)

        return await self.database.write(work)

    async def create_titled(
        self, title: str, *, data: Mapping[str, Any] = EMPTY
    ) -> tuple[ConversationRow, bool]:
        """Create a conversation with a title, unless there is one: several callers all get the same.

        Args:
            title: The title.
            data: JSON data of the application, for a new conversation.

        Returns:
            The first conversation with this title, and whether it was created by this call.

        Raises:
            InvalidSetting: A value is not allowed.
        """
        title, members = validate_text(title, "title"), validate_data(data)

        def work(tx: Tx) -> tuple[ConversationRow, bool]:
            lock_names(tx)
            if row := conversations.select_titled(tx, title):
                return row, False
            now = self.clock()
            created = nodes.create_conversation(
                tx, new_id("conv"), title=title, data=members, now=now
            )
            return created, True

        return await self.database.write(work)

    async def create_all(self, chats: Iterable[Sequence[Block]]) -> list[ConversationRow]:
        """Create a conversation for each list of blocks, all or none of them.

        Args:
            chats: The blocks that each conversation begins with.

        Returns:
            The rows of the new conversations.
        """
        encoded = [[encode_block(block) for block in Turn(blocks)] for blocks in chats]

        def work(tx: Tx) -> list[ConversationRow]:
            now = self.clock()
            rows = [nodes.create_conversation(tx, new_id("conv"), now=now) for _ in encoded]
            pairs = zip(rows, encoded, strict=True)
            return [_insert_first_blocks(tx, row, bodies, now) for row, bodies in pairs]

        return await self.database.write(work)

    async def conversation(self, name: str | ConversationRow) -> ConversationRow:
        """Return the current row of a conversation.

        Args:
            name: Its id or an earlier row.

        Raises:
            NotInStore: There is no such conversation.
        """
        return await self.database.read(lambda tx: conversations.resolve(tx, name))

    async def conversations(
        self,
        *,
        tag: str | None = None,
        archived: bool | None = False,
        limit: int = 100,
        offset: int = 0,
        since: float | None = None,
        before: float | None = None,
    ) -> list[ConversationRow]:
        """Return conversations, most recently changed first.

        Args:
            tag: Only those with this tag.
            archived: Only archived ones, or only others; None for all.
            limit: The maximum number to return.
            offset: The number to skip.
            since: Only those that changed last at or after this time.
            before: Only those that changed last before this time; with the time of the last row of a page,
                the next page.

        Raises:
            InvalidSetting: The limit or the offset is negative.
        """
        validate_page(limit, offset)
        return await self.database.read(
            lambda tx: conversations.select_conversations(
                tx,
                tag=tag,
                archived=archived,
                limit=limit,
                offset=offset,
                since=since,
                before=before,
            )
        )

    async def update(
        self,
        name: str | ConversationRow,
        *,
        title: str | None = None,
        tags: Iterable[str] | None = None,
        archived: bool | None = None,
        ttl: float | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> ConversationRow:
        """Change the given members of a conversation.

        Args:
            name: Its id or its row.
            title: The new title.
            tags: The new tags, which replace all existing ones.
            archived: Whether it is archived.
            ttl: Seconds after its last change at which it expires.
            data: The new data, which replaces all existing data.

        Returns:
            The row after the change.

        Raises:
            NotInStore: There is no such conversation.
            InvalidSetting: A value is not allowed.
        """
        members = {"title": title, "tags": tags, "archived": archived, "ttl": ttl, "data": data}
        changes = conversations.validate_members(members)
        return await self.database.write(
            lambda tx: conversations.update(tx, name, lambda _: changes, self.clock())
        )

    async def update_with(
        self,
        name: str | ConversationRow,
        compute: Callable[[ConversationRow], Mapping[str, Any]],
    ) -> ConversationRow:
        """Change members of a conversation that depend on their present values, in one transaction.

        Example:
            await store.update_with(row, lambda row: {"tags": (*row.tags, "new")})

        Args:
            name: Its id or its row.
            compute: Returns the members to change, under their names in `update`. It is called with the
                current row in the thread of the database, again if the transaction is repeated.

        Returns:
            The row after the change.

        Raises:
            NotInStore: There is no such conversation.
            InvalidSetting: A value is not allowed.
        """
        return await self.database.write(
            lambda tx: conversations.update(
                tx, name, lambda row: conversations.validate_members(compute(row)), self.clock()
            )
        )

    async def fork(self, origin: ConversationRow, at: int, title: str = "") -> ConversationRow:
        """Create a conversation that continues from a node of another, and shares the blocks up to it.

        Args:
            origin: The conversation to fork.
            at: The node that becomes the head of the fork.
            title: The title of the fork.

        Raises:
            NotInStore: The conversation or the node does not exist.
        """
        name, title = new_id("conv"), validate_text(title, "title")
        return await self._write_at(
            origin, at, lambda tx, _: conversations.fork(tx, name, origin, at, title, self.clock())
        )

    async def delete(self, name: str | ConversationRow) -> None:
        """Delete a conversation with all its rows, and the blocks that no other conversation uses.

        Args:
            name: Its id or its row.

        Raises:
            NotInStore: There is no such conversation.
        """
        groups = await self.database.write(lambda tx: delete.delete_conversation(tx, name))
        await delete.reclaim(self.database, groups)

    async def schedule_delete(
        self, name: str | ConversationRow, at: float | None
    ) -> ConversationRow:
        """Hide a conversation from lists and searches, to be deleted later; or undo that.

        `delete_expired` deletes it after that time.

        Args:
            name: Its id or its row.
            at: When it is deleted, in seconds since 1970; None to retain it.

        Returns:
            The row after the change.

        Raises:
            NotInStore: There is no such conversation.
            InvalidSetting: The time is not finite.
        """
        if at is not None and not abs(at) <= MAX_INTEGER:  # this form also rejects NaN
            raise InvalidSetting("at must be a finite time in seconds since 1970")
        return await self.database.write(lambda tx: conversations.schedule_delete(tx, name, at))

    async def list_scheduled(self) -> list[ConversationRow]:
        """Return the conversations that are about to be deleted, the next one first."""
        return await self.database.read(conversations.select_scheduled)

    async def delete_scheduled(self, row: ConversationRow) -> bool:
        """Delete a conversation that is about to be deleted, unless that was undone.

        Args:
            row: The row that `schedule_delete` returned.

        Returns:
            Whether it was deleted.
        """
        groups = await self.database.write(
            lambda tx: delete.delete_unchanged(tx, row, ("delete_at",))
        )
        if groups is not None:
            await delete.reclaim(self.database, groups)
        return groups is not None

    async def delete_expired(self) -> list[str]:
        """Delete the conversations whose time to live has passed, or whose scheduled deletion is due.

        Returns:
            Their ids.
        """
        return await delete.delete_old(self.database, self.clock(), age=None)

    async def list_expired(self) -> list[str]:
        """Return the ids of the conversations that would be deleted; see `delete_expired`."""
        now = self.clock()
        rows = await self.database.read(lambda tx: conversations.select_old(tx, now, age=None))
        return [row.id for row in rows]

    async def list_older(self, seconds: float, *, tag: str | None = None) -> list[str]:
        """Return the ids of the conversations that would be deleted; see `delete_older`.

        Raises:
            InvalidSetting: The age is not a number of seconds above 0.
        """
        age, now = validate_seconds(seconds, "seconds"), self.clock()
        rows = await self.database.read(
            lambda tx: conversations.select_old(tx, now, age=age, tag=tag)
        )
        return [row.id for row in rows]

    async def delete_older(self, seconds: float, *, tag: str | None = None) -> list[str]:
        """Delete the conversations that did not change for some time.

        Args:
            seconds: The minimum time since their last change, in seconds.
            tag: Only those with this tag.

        Returns:
            Their ids.

        Raises:
            InvalidSetting: The age is not a number of seconds above 0.
        """
        age, now = validate_seconds(seconds, "seconds"), self.clock()
        return await delete.delete_old(self.database, now, age=age, tag=tag)

    # The tree

    async def append(
        self,
        conversation: ConversationRow,
        parent: Node,
        blocks: Sequence[Block],
        *,
        kind: NodeKind = "added",
        kept: int | None = None,
        response: RequestRecord | None = None,
        memory: ConversationState | None = None,
        data: FrozenMap = EMPTY,
        accounts: Telemetry = NO_TELEMETRY,
        head: int | None = None,
        asked_for: str = "",
        replaces: int = 0,
    ) -> Node:
        """Add a node.

        Args:
            conversation: The conversation that adds it.
            parent: The node below which it is added.
            blocks: The blocks that it adds.
            kind: The kind of the node.
            kept: The number of blocks of its parent's path that it retains; all by default.
            response: The response of the node.
            memory: The state of the conversation at this node.
            data: Data of the Turn at this node.
            accounts: The incidents, tool runs and exchanges to store with it.
            head: The node at which the head must be; it is moved from there to the new node.
            asked_for: The idempotency key of the question, if the node is one.
            replaces: The node of the response in the background that has ended with this one. Its row is deleted; if
                another process has done so already, the new node gets no response.

        Returns:
            The new node.

        Raises:
            HeadConflict: The head is at another node. The new node is stored; the error names it.
            NotInStore: The conversation or the parent was deleted.
        """
        bodies = [encode_block(block) for block in blocks]
        number = conversation.number
        state = None
        if memory is not None or data:
            state = node_paths.encode_node_state(
                memory or ConversationState(), data, conversation.mode
            )
        scope = await self._intern_scope(response.scope) if response else 0

        def work(tx: Tx) -> _Appended:
            is_first = not replaces or responses.delete_running(tx, replaces)
            node, moved = nodes.insert_node(
                tx,
                parent,
                bodies,
                conversation=conversation,
                kind=kind,
                now=self.clock(),
                kept=kept,
                memory=state,
                response=response if is_first else None,
                scope=scope,
                head=head,
                single_statement=not (accounts or asked_for or replaces),
            )
            if replaces and is_first:
                telemetry.move_exchanges(tx, replaces, node.id)
            if accounts:
                telemetry.insert_telemetry(tx, accounts, number, node.id, self._body_limit)
            if asked_for:
                idempotency.record_question(tx, number, asked_for, node.id)
            if head is None or moved:
                return node, None
            return node, conversations.select_head(tx, number)

        node, elsewhere = await self.database.write(work)
        if response:
            await self._count_response()
        if elsewhere is not None:
            raise HeadConflict(conversation.id, node.id, elsewhere)
        return node

    async def _count_response(self) -> None:
        """Add a batch of responses to the sums; after a failure, a later batch adds them."""
        self._unsummed += 1
        if self._unsummed >= response_sums.BATCH_SIZE:
            self._unsummed = 0
            with suppress(StoreError):
                await response_sums.add_pending(self.database)

    async def move_head(self, conversation: ConversationRow, node: Node, *, head: int) -> None:
        """Move the head to a node.

        Args:
            conversation: The conversation whose head is moved.
            node: The new head.
            head: The node at which the head must be.

        Raises:
            HeadConflict: The head is at another node, and was not moved.
            NotInStore: The conversation or the node was deleted.
        """

        def work(tx: Tx, _: Node) -> int | None:
            if conversations.move_head(tx, conversation.number, head, node.id, self.clock()):
                return None
            return conversations.select_head(tx, conversation.number)

        elsewhere = await self._write_at(conversation, node.id, work)
        if elsewhere is not None:
            raise HeadConflict(conversation.id, node.id, elsewhere)

    async def load(self, conversation: ConversationRow, node: int | None = None) -> LoadedPath:
        """Return the blocks and the anchors on the path to a node.

        Args:
            conversation: A conversation on the node's tree.
            node: The node; by default the head when the row was read.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
            StoreDamaged: A stored block cannot be read.
        """
        return await self._read_at(conversation, node, self._path_loader(conversation))

    def load_sync(self, conversation: ConversationRow, node: int) -> LoadedPath:
        """Do the same as `load` from synchronous code; blocks the calling thread."""
        work = _at_node(conversation, node, self._path_loader(conversation))
        return self.database.read_sync(conversations.checked(conversation, work))

    async def load_short(self, conversation: ConversationRow, max_blocks: int) -> LoadedPath | Node:
        """Return the path to the head when the row was read, or only its node if the path is long.

        Args:
            conversation: The conversation.
            max_blocks: The maximum number of blocks of a path that is loaded.

        Raises:
            NotInStore: The conversation was deleted.
            StoreDamaged: A stored block cannot be read.
        """
        load_path = self._path_loader(conversation)
        return await self._read_at(
            conversation,
            None,
            lambda tx, node: node if node.length > max_blocks else load_path(tx, node),
        )

    def _path_loader(self, conversation: ConversationRow) -> Callable[[Tx, Node], LoadedPath]:
        return partial(
            node_paths.load_path,
            scopes=self._scope_names,
            mode=conversation.mode,
            retention=conversation.retention,
        )

    async def load_turn(
        self, conversation: ConversationRow, node: int, *, known: Node, turn: Turn
    ) -> tuple[Node, Turn]:
        """Return a node and its Turn, reading only the blocks that the Turn of a known node does not have.

        Args:
            conversation: A conversation on the node's tree.
            node: The node.
            known: Another node of the tree.
            turn: The Turn at the known node.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
            StoreDamaged: A stored block cannot be read.
        """
        change = await self._read_at(
            conversation,
            node,
            lambda tx, found: node_paths.load_path_change(
                tx, found, known.id, scopes=self._scope_names, retention=conversation.retention
            ),
        )
        return change.node, node_paths.apply_change(
            turn, change, conversation.mode, conversation.id
        )

    async def last_blocks(
        self, conversation: ConversationRow, count: int, node: int | None = None
    ) -> tuple[Block, ...]:
        """Return the last blocks on the path to a node, without reading the others.

        Args:
            conversation: A conversation on the node's tree.
            count: The maximum number of blocks.
            node: The node; by default the head when the row was read.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
            StoreDamaged: A stored block cannot be read.
        """
        bodies = await self._read_at(
            conversation, node, lambda tx, found: node_paths.load_last_bodies(tx, found, count)
        )
        return tuple(decode_blocks(bodies))

    async def newest_response(
        self, conversation: ConversationRow, node: int | None = None
    ) -> RequestRecord | None:
        """Return the newest response on the path to a node, or None if there is none.

        Args:
            conversation: A conversation on the node's tree.
            node: The node; by default the head when the row was read.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        return await self._read_at(conversation, node, node_paths.find_newest_response)

    async def node(self, conversation: ConversationRow, node: int) -> Node:
        """Return a node of the conversation's tree, or raise `NotInStore`."""
        return await self._read_at(conversation, node, lambda _, found: found)

    async def find_node(self, conversation: ConversationRow, at: int | str = "") -> Node:
        """Return the node at a position of the conversation's tree.

        Args:
            conversation: A conversation on the tree.
            at: A node number, the provider's id of a response, or ``head``, which is the default: the head
                when the row was read.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node or response.
        """
        at = conversation.head if at in ("", "head") else at
        position: object = at
        if isinstance(at, str) and at.isascii() and at.isdecimal():
            position = int(at) if len(at) <= MAX_NUMBER_LENGTH else None
        found = None
        if isinstance(position, str):
            found = await self.node_of_response(conversation, position)
        elif is_row_number(position):
            found = await self.node(conversation, position)
        if found is None:
            raise NotInStore(f"there is no node or response {at!r} in this conversation")
        return found

    async def tree(self, conversation: ConversationRow) -> list[Node]:
        """Return every node of the conversation's tree in order, including those of its forks."""
        return await self._read(conversation, lambda tx: nodes.select_tree(tx, conversation.tree))

    async def path(
        self, conversation: ConversationRow, node: int | None = None, *, limit: int | None = None
    ) -> list[Node]:
        """Return the nodes from the root to a node (by default the head when the row was read).

        Args:
            conversation: A conversation on the node's tree.
            node: The node; by default the head when the row was read.
            limit: Return only the last nodes of the path.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        at = conversation.head if node is None else node
        path = await self._read(conversation, lambda tx: node_paths.load_ancestry(tx, at, limit))
        if not path or path[0].tree != conversation.tree:
            raise NotInStore(f"there is no node {at} in this conversation")
        return path

    async def children(self, conversation: ConversationRow, node: int) -> list[Node]:
        """Return the nodes that continue from a node, of all conversations on the tree, in order.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        return await self._read_at(conversation, node, nodes.select_children)

    async def pending(self, conversation: ConversationRow) -> list[Node]:
        """Return the questions of a conversation that have no answer, oldest first.

        They are in progress, or were interrupted while the model answered or a tool ran.
        """
        found = await self._read(
            conversation, lambda tx: node_paths.find_unanswered(tx, conversation)
        )
        return [each.question for each in found]

    async def unanswered_after(
        self, conversation: ConversationRow, node: int
    ) -> list[UnansweredQuestion]:
        """Return those of the pending questions that follow directly after a node, or are this node.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        return await self._read_at(
            conversation,
            node,
            lambda tx, found: node_paths.find_unanswered(tx, conversation, found),
        )

    async def newest_below(self, conversation: ConversationRow, node: int) -> Node:
        """Return the newest node that follows from a question: itself, tool results, or an answer."""
        return await self._read_at(conversation, node, nodes.find_newest_descendant)

    async def node_of_response(
        self, conversation: ConversationRow, response_id: str
    ) -> Node | None:
        """Return the node of the response with this provider's id, if there is one."""
        return await self._read(
            conversation, lambda tx: nodes.find_response_node(tx, conversation.tree, response_id)
        )

    async def common_ancestor(self, conversation: ConversationRow, left: int, right: int) -> Node:
        """Return the newest node that is on the paths to both nodes."""

        def work(tx: Tx) -> Node:
            for node in (left, right):
                nodes.select_node(tx, node, conversation.tree)
            return node_paths.find_common_ancestor(tx, left, right)

        return await self._read(conversation, work)

    async def differences(
        self, conversation: ConversationRow, left: int, right: int
    ) -> Differences:
        """Return the blocks of each of two paths after their common prefix."""

        def work(tx: Tx) -> Differences:
            both = (nodes.select_node(tx, node, conversation.tree) for node in (left, right))
            return node_paths.diff_paths(tx, *both)

        return await self._read(conversation, work)

    # Responses

    async def responses(
        self,
        conversation: ConversationRow | None = None,
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> list[RequestRecord]:
        """Return responses in the order in which they were stored.

        Args:
            conversation: Only those of this conversation.
            since: Only those created at or after this time.
            until: Only those created before this time.
        """

        def work(tx: Tx) -> list[RequestRecord]:
            return responses.select_responses_between(
                tx, conversation.number if conversation else None, since, until
            )

        return await (self._read(conversation, work) if conversation else self.database.read(work))

    async def candidates(
        self, scope: str, digests: Sequence[str], *, retention: float | None = None
    ) -> list[AnchorRecord]:
        """Return the completed responses of a scope whose context has one of the digests.

        Args:
            scope: The scope: provider, endpoint and account.
            digests: Digests of prefixes, longest first; the search stops at the first chunk with a
                match.
            retention: Seconds for which the requesting conversation relies on a response.

        Returns:
            Their anchors, which expire by the shorter of both conversations' retentions.
        """
        for chunk in split_chunks(digests):
            found = await self.database.read(
                lambda tx, chunk=chunk: responses.select_anchors(tx, scope, chunk, retention)
            )
            if found:
                return found
        return []

    async def mark_lost(self, record: AnchorRecord, reason: str) -> bool:
        """Record that the provider no longer has a response; return whether that is new."""
        scope = await self._intern_scope(record.scope)
        return await self.database.write(lambda tx: responses.mark_lost(tx, record, scope, reason))

    # Idempotency

    async def claim(
        self,
        conversation: ConversationRow,
        key: str,
        *,
        request_hash: bytes,
        owner: str,
        lease: float,
    ) -> Claim:
        """Claim the turn with an idempotency key.

        Args:
            conversation: The conversation of the turn.
            key: The idempotency key.
            request_hash: A hash of the request; it must be the same for every use of the key.
            owner: The caller's id.
            lease: Seconds for which the claim is valid, by the database's clock.

        Returns:
            The claim: that of the caller, of another caller, or of a completed turn.

        Raises:
            KeyReused: The key belongs to another request.
            NotInStore: The conversation was deleted.
        """
        key = validate_text(key, "key")
        return await self._write(
            conversation,
            lambda tx: idempotency.acquire_claim(
                tx, conversation.number, key, request_hash=request_hash, owner=owner, lease=lease
            ),
        )

    async def renew(
        self, conversation: ConversationRow, key: str, *, owner: str, lease: float
    ) -> bool:
        """Extend the claim of ``owner`` by ``lease`` seconds from now, or release it with 0.

        Returns:
            Whether the claim was still the caller's.

        Raises:
            NotInStore: The conversation was deleted.
        """
        return await self._write(
            conversation,
            lambda tx: idempotency.renew_claim(
                tx, conversation.number, key, owner=owner, lease=lease
            ),
        )

    async def settle(self, conversation: ConversationRow, key: str, answer: int) -> None:
        """Record which node is the answer to the turn with this key.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        await self._write_at(
            conversation,
            answer,
            lambda tx, _: idempotency.record_answer(tx, conversation.number, key, answer),
        )

    # Telemetry

    async def note(self, conversation: ConversationRow, node: int, accounts: Telemetry) -> None:
        """Record incidents, tool runs and exchanges of a node.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        number = conversation.number
        await self._write_at(
            conversation,
            node,
            lambda tx, _: telemetry.insert_telemetry(tx, accounts, number, node, self._body_limit),
        )

    async def exchanges(self, conversation: ConversationRow) -> list[StoredExchange]:
        """Return the stored requests and replies of a conversation in order; see ``keep_bodies``."""
        return await self._read(
            conversation,
            lambda tx: telemetry.select_exchanges(tx, conversation=conversation.number),
        )

    # Search, export, import, maintenance

    async def search(
        self,
        words: str,
        *,
        limit: int = 20,
        offset: int = 0,
        role: str | None = None,
        tag: str | None = None,
        since: float | None = None,
        until: float | None = None,
        order: search.SearchOrder = "newest",
    ) -> list[Hit]:
        """Find blocks by their text, in all conversations.

        Case and accents are ignored. The search index is updated first.

        Args:
            words: The words to search for; a block matches if it has all of them. ``"a phrase"`` matches
                adjacent words, ``begin*`` words with this beginning, ``-word`` or ``NOT word`` excludes
                blocks, and ``OR`` separates alternatives.
            limit: The maximum number of hits.
            offset: The number of hits to skip.
            role: Only blocks of this kind: ``user``, ``assistant``, ``tool_result``, …
            tag: Only conversations with this tag.
            since: Only blocks that were added at or after this time.
            until: Only blocks that were added before this time.
            order: ``newest`` or ``rank``: the best matches first, among the newest 5,000 blocks.

        Returns:
            The hits; a block of several conversations is a hit in each of them.

        Raises:
            InvalidSetting: The order, the limit or the offset is not allowed.
        """
        options = search.SearchOptions(limit, offset, role, tag, since, until, order)
        is_complete = await search.update_index(self.database)
        return await self.database.read(
            lambda tx: search.find_blocks(tx, words, options, index_is_complete=is_complete)
        )

    async def export(self, conversation: ConversationRow) -> str:
        """Return a conversation as lines of JSON: its tree with blocks, anchors and telemetry."""
        lines = await self._read(
            conversation,
            lambda tx: import_export.export_lines(
                tx, conversations.select_conversation(tx, conversation.id)
            ),
        )
        return "".join(f"{line}\n" for line in lines)

    async def import_(self, lines: str | Iterable[str]) -> list[ConversationRow]:
        """Create the conversations in exported lines, all or none of them.

        A conversation whose id exists already gets a new id.

        Args:
            lines: The text of an export, or its lines.

        Returns:
            The rows of the new conversations.

        Raises:
            InvalidJSON: The lines are not a valid export.
        """
        # Not splitlines: JSON may contain characters that it treats as line ends.
        exported = lines.split("\n") if isinstance(lines, str) else list(lines)

        def work(tx: Tx) -> list[ConversationRow]:
            ids = import_export.import_lines(tx, exported)
            return [conversations.select_conversation(tx, name) for name in ids]

        # A scope that is stored with the import could not be used by others until its end.
        for scope in sorted(import_export.list_scopes(exported)):
            await self._intern_scope(scope)
        rows = await self.database.write(work)
        with suppress(StoreBusy):  # then the next statistics add the responses to the sums
            await response_sums.add_pending(self.database)
        return rows

    async def gc(self) -> int:
        """Delete expired conversations and rows that nothing refers to, and return unused space.

        Branches that lost a race, were undone or were regenerated are retained. The conversations of all
        namespaces are included, unless this store is bound to one.

        Returns:
            The number of unused blocks that were deleted.
        """
        await self.delete_expired()
        for name in [] if self.namespace else await self.namespaces():
            await self.use_namespace(name).delete_expired()
        await self.database.write(delete.delete_orphans)
        await self.database.write(lambda tx: response_index.delete_old_objects(tx, self.clock()))
        swept = await delete.delete_unlinked_blocks(self.database)
        await response_sums.rebuild(self.database)
        await delete.reclaim(self.database, await self.database.read(search.list_groups))
        await self.database.reclaim(vacuum=True)
        return swept

    async def verify(self) -> list[Damage]:
        """Recompute every hash and digest, and check every reference, in all namespaces.

        Returns:
            Every damaged row; an empty list for a valid store.

        Raises:
            InvalidSetting: This store is bound to a namespace.
        """
        self._require_default("verify")
        return await verify.check_store(self.database)

    # Transactions

    async def _read(self, conversation: ConversationRow, work: Callable[[Tx], T]) -> T:
        """Run queries about a conversation that must still exist."""
        return await self.database.read(conversations.checked(conversation, work))

    async def _read_at(
        self, conversation: ConversationRow, node: int | None, work: Callable[[Tx, Node], T]
    ) -> T:
        """Run queries about a node of the conversation's tree, by default the head."""
        at = conversation.head if node is None else node
        return await self._read(conversation, _at_node(conversation, at, work))

    async def _write(self, conversation: ConversationRow, work: Callable[[Tx], T]) -> T:
        """Run a transaction on a conversation that must exist, and prevent its deletion meanwhile."""

        def run(tx: Tx) -> T:
            lock_tree_shared(tx, conversation.tree)
            conversations.require_conversation(tx, conversation, tx.dialect.for_key_share)
            return work(tx)

        return await self.database.write(run)

    async def _write_at(
        self, conversation: ConversationRow, node: int, work: Callable[[Tx, Node], T]
    ) -> T:
        """Run a transaction on a node of the conversation's tree."""
        return await self._write(conversation, _at_node(conversation, node, work))

    async def _intern_scope(self, name: str) -> int:
        """Return the number of a scope, which never changes once it is stored."""
        number = self._scope_numbers.get(name)
        if number is None:
            number = await self.database.write(lambda tx: responses.intern_scope(tx, name))
            self._scope_numbers[name] = number
        return number


class SyncStore(SyncFacade[Store]):
    """The methods of ``Store`` for sync code; see ``Store.sync``."""

    namespaces = wrap_method(Store.namespaces)
    create = wrap_method(Store.create)
    conversation = wrap_method(Store.conversation)
    conversations = wrap_method(Store.conversations)
    search = wrap_method(Store.search)
    update = wrap_method(Store.update)
    update_with = wrap_method(Store.update_with)
    fork = wrap_method(Store.fork)
    delete = wrap_method(Store.delete)
    delete_expired = wrap_method(Store.delete_expired)
    delete_older = wrap_method(Store.delete_older)
    append = wrap_method(Store.append)
    load = wrap_method(Store.load)
    tree = wrap_method(Store.tree)
    path = wrap_method(Store.path)
    pending = wrap_method(Store.pending)
    responses = wrap_method(Store.responses)
    exchanges = wrap_method(Store.exchanges)
    export = wrap_method(Store.export)
    import_ = wrap_method(Store.import_)
    gc = wrap_method(Store.gc)
    verify = wrap_method(Store.verify)


def _insert_first_blocks(
    tx: Tx, row: ConversationRow, bodies: Sequence[str], now: float
) -> ConversationRow:
    """Insert the blocks that a new conversation begins with, and return its current row."""
    if not bodies:
        return row
    root = nodes.select_node(tx, row.head, row.tree)
    nodes.insert_node(tx, root, bodies, conversation=row, kind="added", now=now, head=root.id)
    return conversations.select_conversation(tx, row.id)
