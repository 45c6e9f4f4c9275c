"""Store: conversations, their blocks and their responses, on SQLite or PostgreSQL.

Every method is one transaction: it is applied completely or not at all, and is durable when the method
returns. No transaction waits for a model. SQL is in the modules of the tables, whose functions get the
transaction; this class opens transactions and checks that the conversation of a row still exists.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

from msgspec import UNSET, UnsetType

from kedge._internal.argument_types import checked
from kedge._internal.arguments import validate_seconds
from kedge._internal.event_loops import AsyncResource, SharedLock, SyncFacade, wrap_method
from kedge.errors import HeadConflict
from kedge.events.request_record import RequestRecord
from kedge.evidence import object_claims
from kedge.planning import Mode
from kedge.planning.anchor_changes import NO_CHANGES, AnchorChanges
from kedge.planning.anchors import AnchorRecord, ConversationState
from kedge.store import changes as conversation_changes
from kedge.store import conversations as conversation_table
from kedge.store import (
    delete,
    idempotency,
    import_export,
    node_paths,
    nodes,
    proxied_requests,
    response_index,
    response_sums,
    search,
    verify,
)
from kedge.store import responses as response_table
from kedge.store.append import insert_node
from kedge.store.conversations import (
    lock_conversation,
    require_conversation,
    select_head,
    validate_members,
)
from kedge.store.database.transactions import Database, NamespaceDatabase, Tx
from kedge.store.node_paths import Differences, UnansweredQuestion
from kedge.store.node_state import encode_node_state
from kedge.store.proxied_requests import ProxiedRequest, ProxyTotals
from kedge.store.records import (
    NO_TELEMETRY,
    Claim,
    ConversationRow,
    Damage,
    Hit,
    LoadedPath,
    Node,
    NodeKind,
    StoredExchange,
    Telemetry,
    new_row,
    require_default_namespace,
    validate_namespace,
)
from kedge.store.stored_blocks import to_stored_block
from kedge.turns import Block, Turn
from kedge.turns.frozen_json import EMPTY, FrozenMap

NO_STATE = ConversationState()
P = ParamSpec("P")
T = TypeVar("T")


class Store(AsyncResource):
    """Conversations, each with a head on a tree of nodes, in a database.

    Use `open_store` to make one; its first use opens it, or ``await store``.

    Methods that take a `ConversationRow` raise `NotInStore` if that
    conversation was deleted since the row was read, also if another one has its id now.

    A store contains the conversations of one namespace: the default namespace, or the one of `use_namespace`.
    Conversations of other namespaces do not exist for any of its methods.

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
        self.scope_names: dict[int, str] = {}
        self._scope_numbers: dict[str, int] = {}
        self._unsummed = 0
        self._queues: WeakValueDictionary[str, SharedLock] = WeakValueDictionary()
        self._queue_lock = threading.Lock()

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
        """Return the lock for which the queued runs of a conversation wait in this process."""
        with self._queue_lock:
            return self._queues.setdefault(name, SharedLock())

    # Transactions

    async def read(
        self, work: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of queries against one consistent state.

        Args:
            work: The function; its first parameter is the transaction.
            *args: Its other arguments.
            **kwargs: Its keyword arguments.
        """
        return await self.database.read(lambda tx: work(self._bind(tx), *args, **kwargs))

    async def write(
        self, work: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of statements, again after a conflict; the changes are durable then.

        Args:
            work: The function; its first parameter is the transaction. It has no other effects.
            *args: Its other arguments.
            **kwargs: Its keyword arguments.
        """
        return await self.database.write(lambda tx: work(self._bind(tx), *args, **kwargs))

    async def read_in(
        self,
        conversation: ConversationRow,
        work: Callable[Concatenate[Tx, ConversationRow, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a function of queries about a conversation.

        Raises:
            NotInStore: The conversation was deleted since its row was read.
        """

        def read_existing(tx: Tx) -> T:
            require_conversation(tx, conversation)
            return work(tx, conversation, *args, **kwargs)

        return await self.read(read_existing)

    async def write_in(
        self,
        conversation: ConversationRow,
        work: Callable[Concatenate[Tx, ConversationRow, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a function of statements about a conversation, which nobody can delete meanwhile.

        Raises:
            NotInStore: The conversation was deleted since its row was read.
        """

        def write_existing(tx: Tx) -> T:
            lock_conversation(tx, conversation)
            return work(tx, conversation, *args, **kwargs)

        return await self.write(write_existing)

    def _bind(self, tx: Tx) -> Tx:
        """Return a transaction with the settings of this store."""
        tx.clock = self.clock
        tx.scopes = self.scope_names
        tx.body_bytes = self.body_bytes if self.keep_bodies else 0
        return tx

    # Namespaces

    @property
    def namespace(self) -> str:
        """The namespace of this store's conversations; empty for the default one."""
        if isinstance(self.database, NamespaceDatabase):
            return self.database.namespace
        return ""

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
        require_default_namespace(self.namespace, "use_namespace")
        return Store(
            NamespaceDatabase(self.database, validate_namespace(name)),
            keep_bodies=self.keep_bodies,
            body_bytes=self.body_bytes,
            clock=self.clock,
        )

    @checked
    async def namespaces(self, *, scheduled: bool = False) -> list[str]:
        """Return the names of the namespaces that have conversations, without the default one.

        Args:
            scheduled: Whether to return only those with conversations that are about to be deleted.

        Returns:
            The names, in alphabetical order.

        Raises:
            InvalidSetting: This store is bound to a namespace.
        """
        return await self.read(conversation_table.list_namespaces, scheduled=scheduled)

    @checked
    async def database_time(self) -> float:
        """Return the time of the database's clock, which all processes share, in seconds since 1970."""
        return await self.read(conversation_table.read_time)

    # Servers

    @checked
    async def load_evidence(self, key: str) -> dict[str, Any] | None:
        """Return the evidence about the memory of a server; see `kedge.evidence.server_evidence`."""
        return await self.read(response_index.select_evidence, key)

    @checked
    async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store the evidence about the memory of a server, replacing the previous one."""
        await self.write(response_index.put_evidence, key, form)

    @checked
    async def claim_object(
        self, scope: str, object_id: str, last: str, *, owner: str
    ) -> object_claims.Claim:
        """Claim a conversation object of a server for a request; see `kedge.evidence.object_claims`.

        Args:
            scope: The provider, endpoint and account.
            object_id: The conversation object.
            last: The last response in the object, as far as the caller knows; empty for a new object.
            owner: Identifies the process.

        Returns:
            Whether the object ends with this response, may do so, or is continued by another line of history.
        """
        return await self.write(response_index.claim_object, scope, object_id, last, owner=owner)

    @checked
    async def release_object(self, scope: str, object_id: str, last: str, *, owner: str) -> None:
        """Record the last response in a conversation object that ``owner`` has claimed."""
        await self.write(response_index.release_object, scope, object_id, last, owner=owner)

    @checked
    async def list_unused_objects(self) -> list[object_claims.UnusedObject]:
        """Return the conversation objects that Kedge made and that no stored line of history continues.

        An object whose last request is less than a day old may be in use, unless its conversation was deleted.

        Returns:
            The objects, the least recently used first.
        """
        return await self.read(response_index.list_unused_objects)

    @checked
    async def take_unused_objects(self, scope: str, limit: int) -> list[object_claims.UnusedObject]:
        """Return unused objects of a server to delete there; from now on they cannot be claimed.

        Args:
            scope: The provider, endpoint and account.
            limit: The maximum number of objects.

        Returns:
            The objects, as `list_unused_objects` does, which lists them until `delete_object`.
        """
        return await self.write(response_index.take_unused_objects, scope, limit)

    @checked
    async def delete_object(self, unused: object_claims.UnusedObject) -> None:
        """Delete the claim of an unused object that its server has deleted."""
        await self.write(response_index.delete_object, unused)

    # Requests through a proxy

    @checked
    async def list_proxied(
        self, *, limit: int = 100, before: int = 0, body_bytes: int = 0
    ) -> list[ProxiedRequest]:
        """Return requests that were sent through a proxy, newest first, without their responses.

        Args:
            limit: The maximum number of requests.
            before: The number of the request before which to continue; 0 for the newest.
            body_bytes: The maximum size of the bodies to read; larger ones are None.

        Returns:
            The requests.

        Raises:
            InvalidSetting: The limit is negative.
        """
        return await self.read(
            proxied_requests.list_proxied, limit=limit, before=before, body_bytes=body_bytes
        )

    @checked
    async def get_proxied(self, number: int) -> ProxiedRequest:
        """Return one request that was sent through a proxy, with its bodies if they were stored.

        Raises:
            NotInStore: There is none.
        """
        return await self.read(proxied_requests.get_proxied, number)

    @checked
    async def sum_proxied(self) -> ProxyTotals:
        """Return the sums over the stored requests that were sent through a proxy."""
        return await self.read(proxied_requests.sum_proxied)

    @checked
    async def add_proxied(self, requests: Sequence[ProxiedRequest]) -> None:
        """Store requests that were sent through a proxy; bodies only with ``keep_bodies``.

        Args:
            requests: The requests; the newest 10,000 of this namespace are retained.
        """
        await self.write(proxied_requests.insert_proxied, requests)

    async def export_proxied(self) -> list[str]:
        """Return the requests with complete bodies as lines of JSON, oldest first.

        Each line has ``name``, ``api``, ``host``, ``status``, ``request`` and ``body``, the form of recordings.
        """
        return await self.database.read(
            lambda tx: proxied_requests.export_recordings(tx, self.body_bytes)
        )

    # Conversations

    @checked
    async def conversation(self, name: str | ConversationRow) -> ConversationRow:
        """Return the current row of a conversation.

        Args:
            name: Its id or an earlier row.

        Raises:
            NotInStore: There is no such conversation.
        """
        return await self.read(conversation_table.get_conversation, name)

    @checked
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
        """Return conversations, most recently changed first, except those that are about to be deleted.

        Args:
            tag: Only those with this tag.
            archived: Only archived ones, or only others; None for all.
            limit: The maximum number to return.
            offset: The number to skip.
            since: Only those that changed last at or after this time.
            before: Only those that changed last before this time; with the time of the last row of a page,
                the next page.

        Raises:
            InvalidSetting: The limit or the offset is negative, or a time is not finite.
        """
        return await self.read(
            conversation_table.list_conversations,
            tag=tag,
            archived=archived,
            limit=limit,
            offset=offset,
            since=since,
            before=before,
        )

    @checked
    async def update_with(
        self, name: str | ConversationRow, compute: Callable[[ConversationRow], Mapping[str, Any]]
    ) -> ConversationRow:
        """Change members of a conversation that depend on their present values, in one transaction.

        Example:
            await store.update_with(row, lambda row: {"tags": (*row.tags, "new")})

        Args:
            name: Its id or its row.
            compute: Returns the members to change, under their names in `update`. It is called with the
                current row in the thread of the database, again if the transaction is repeated. None is the default
                of ``mode``, ``retention`` and ``ttl``, and leaves any other member as it is.

        Returns:
            The row after the change.

        Raises:
            NotInStore: There is no such conversation.
            InvalidSetting: A value is not allowed; ``UnknownSetting`` if there is no member of this name.
        """
        return await self.write(conversation_changes.update_with, name, compute)

    @checked
    async def fork(
        self, conversation: ConversationRow, at: int, title: str = ""
    ) -> ConversationRow:
        """Create a conversation that continues from a node of another, and shares the blocks up to it.

        Args:
            conversation: The conversation to fork.
            at: The node that becomes the head of the fork.
            title: The title of the fork.

        Raises:
            NotInStore: The conversation or the node does not exist, or the conversation is about to be deleted.
        """
        return await self.write_in(conversation, conversation_changes.fork_conversation, at, title)

    @checked
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
        return await self.write(conversation_table.schedule_delete, name, at)

    @checked
    async def require_continuable(self, conversation: ConversationRow) -> None:
        """Check that a conversation still exists and is not about to be deleted.

        Args:
            conversation: The conversation, as it was read.

        Raises:
            NotInStore: It was deleted, or is about to be deleted.
        """
        await self.read_in(conversation, conversation_table.require_continuable)

    @checked
    async def list_scheduled(self) -> list[ConversationRow]:
        """Return the conversations that are about to be deleted, the next one first."""
        return await self.read(conversation_table.list_scheduled)

    @checked
    async def list_expired(self) -> list[str]:
        """Return the ids of the conversations that would be deleted; see `Store.delete_expired`."""
        return await self.read(conversation_table.list_expired)

    @checked
    async def list_older(self, seconds: float, *, tag: str | None = None) -> list[str]:
        """Return the ids of the conversations that would be deleted; see `Store.delete_older`.

        Raises:
            InvalidSetting: The age is not a number of seconds above 0.
        """
        return await self.read(conversation_table.list_older, seconds, tag=tag)

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
        blocks: Turn | Sequence[Block] = (),
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
            blocks: Blocks that it begins with, written in the same transaction; of a Turn, its data and anchors, too.

        Returns:
            The row of the new conversation.

        Raises:
            InvalidSetting: A value is not allowed, or there is a conversation with this id already.
        """
        row = new_row(title, tags=tags, mode=mode, retention=retention, ttl=ttl, data=data, id=id)
        return await self.insert(row, blocks)

    @checked
    async def insert(
        self, new: ConversationRow, blocks: Turn | Sequence[Block] = ()
    ) -> ConversationRow:
        """Create the conversation of a new row, with its first node and the blocks that it begins with.

        Args:
            new: The row of `new_row`.
            blocks: Blocks that it begins with, written in the same transaction; of a Turn, its data and anchors, too.

        Returns:
            The row of the new conversation.

        Raises:
            InvalidSetting: There is a conversation with this id already.
        """
        return await self.write(conversation_changes.insert_row, new, blocks)

    @checked
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
        return await self.write(conversation_changes.create_titled, title, data=data)

    @checked
    async def create_all(self, chats: Sequence[Sequence[Block]]) -> list[ConversationRow]:
        """Create a conversation for each list of blocks, all or none of them.

        Args:
            chats: The blocks that each conversation begins with.

        Returns:
            The rows of the new conversations.
        """
        return await self.write(conversation_changes.create_all, chats)

    @checked
    async def update(
        self,
        name: str | ConversationRow,
        *,
        title: str | None = None,
        tags: Iterable[str] | None = None,
        archived: bool | None = None,
        data: Mapping[str, Any] | None = None,
        mode: Mode | UnsetType | None = UNSET,
        retention: float | UnsetType | None = UNSET,
        ttl: float | UnsetType | None = UNSET,
    ) -> ConversationRow:
        """Change the given members of a conversation.

        Args:
            name: Its id or its row.
            title: The new title.
            tags: The new tags, which replace all existing ones.
            archived: Whether it is archived.
            data: The new data, which replaces all existing data.
            mode: The mode of its requests; None for the engine's default. A node is added if the head has another
                mode, which a middleware has set.
            retention: Seconds for which the provider is assumed to store a response; None for the provider's own.
            ttl: Seconds after its last change at which it expires; None if it never does.

        Returns:
            The row after the change.

        Raises:
            NotInStore: There is no such conversation.
            InvalidSetting: A value is not allowed.
        """
        members: dict[str, Any] = {"title": title, "tags": tags, "archived": archived, "data": data}
        optional = {"mode": mode, "retention": retention, "ttl": ttl}
        members |= {name: value for name, value in optional.items() if value is not UNSET}
        changes = validate_members(members)  # once: the tags may be an iterator
        return await self.update_with(name, lambda _: changes)

    @checked
    async def delete(self, name: str | ConversationRow) -> None:
        """Delete a conversation with all its rows, and the blocks that no other conversation uses.

        Args:
            name: Its id or its row.

        Raises:
            NotInStore: There is no such conversation.
            StoreError: It may still be in the files, although it was deleted.
        """
        groups = await self.database.write(lambda tx: delete.delete_conversation(tx, name))
        await delete.reclaim(self.database, groups)

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

    @checked
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
        age = validate_seconds(seconds, "seconds")
        return await delete.delete_old(self.database, self.clock(), age=age, tag=tag)

    # The tree

    @checked
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
        changes: AnchorChanges = NO_CHANGES,
        telemetry: Telemetry = NO_TELEMETRY,
        head: int | None = None,
        key: str = "",
        replaces_node: int = 0,
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
            changes: How the anchor records of the Turn differ from the records of the responses on the path.
            telemetry: The incidents, tool runs and exchanges to store with it.
            head: The node at which the head must be; it is moved from there to the new node.
            key: The idempotency key of the question, if the node is one.
            replaces_node: The node of the response in the background that this node completes; its row is deleted.

        Returns:
            The new node.

        Raises:
            InvalidTurn: Two of the blocks have one id, or the path to the parent has a block with the id of a new one.
                Nothing was added.
            HeadConflict: The head is at another node. The new node is stored; the error names it.
            NotInStore: The conversation or the parent was deleted. A conversation that is about to be deleted gets only
                what completes a question: answers, tool results and failed requests.
            ResponseStored: Another process has stored this response of the background, and nothing was added.
        """
        stored_blocks = [to_stored_block(block) for block in blocks]
        number = conversation.number
        state = encode_node_state(
            memory or NO_STATE, data, conversation.mode, parent=parent.memory, changes=changes
        )
        scope = 0
        if response:
            scope = await self._intern_scope(response.scope)

        def work(tx: Tx) -> tuple[Node, int | None]:
            """Return the new node, and the head if it should have been moved and was at another node."""
            is_first = not replaces_node or response_table.delete_running(tx, replaces_node)
            if response and not is_first:
                stored = nodes.find_response_node(tx, conversation, response.provider_response_id)
                if stored:
                    raise nodes.ResponseStored(stored)
            node, moved = insert_node(
                tx,
                parent,
                stored_blocks,
                conversation=conversation,
                kind=kind,
                now=tx.clock(),
                kept=kept,
                memory=state,
                response=response if is_first else None,
                scope=scope,
                head=head,
                single_statement=not (telemetry or key or replaces_node),
            )
            if replaces_node and is_first:
                response_table.move_exchanges(tx, replaces_node, node.id)
            if telemetry:
                response_table.insert_telemetry(tx, telemetry, number, node.id)
            if key:
                idempotency.record_question(tx, number, key, node.id)
            if head is None or moved:
                return node, None
            return node, select_head(tx, number)

        node, elsewhere = await self.write(work)
        if response:
            await self._count_response()
        if elsewhere is not None:
            raise HeadConflict(conversation.id, node.id, elsewhere)
        return node

    async def _count_response(self) -> None:
        """Add a batch of responses to the sums."""
        self._unsummed += 1
        if self._unsummed >= response_sums.BATCH_SIZE:
            self._unsummed = 0
            await response_sums.add_pending(self.database)

    @checked
    async def move_head(self, conversation: ConversationRow, node: Node, *, head: int) -> None:
        """Move the head to a node.

        Args:
            conversation: The conversation whose head is moved.
            node: The new head.
            head: The node at which the head must be.

        Raises:
            HeadConflict: The head is at another node, and was not moved.
            NotInStore: The conversation or the node was deleted, or the conversation is about to be deleted.
        """
        await self.write_in(conversation, conversation_changes.move_head, node, head=head)

    @checked
    async def last_blocks(
        self, conversation: ConversationRow, count: int, node: int | None = None
    ) -> tuple[Block, ...]:
        """Return the last blocks on the path to a node, without reading the others.

        Args:
            conversation: A conversation on the node's tree.
            count: The maximum number of blocks.
            node: The node; by default the head when the row was read.

        Raises:
            InvalidSetting: The number of blocks is not an integer of at least 0.
            NotInStore: The conversation was deleted, or its tree has no such node.
            StoreDamaged: A stored block cannot be read.
        """
        return await self.read_in(conversation, node_paths.load_last_blocks, count, node)

    @checked
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
        return await self.read_in(conversation, node_paths.find_newest_response, node)

    @checked
    async def node(self, conversation: ConversationRow, node: int | None = None) -> Node:
        """Return a node of the conversation's tree, by default the head when the row was read.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        return await self.read_in(conversation, nodes.get_node, node)

    @checked
    async def find_node(self, conversation: ConversationRow, at: int | str = "head") -> Node:
        """Return the node at a position of the conversation's tree.

        Args:
            conversation: A conversation on the tree.
            at: A node number, the provider's id of a response, or ``head``, which is the default: the head
                when the row was read. A text is never a node number: some servers count their responses.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node or response.
        """
        return await self.read_in(conversation, nodes.find_node, at)

    @checked
    async def tree(self, conversation: ConversationRow) -> list[Node]:
        """Return every node of the conversation's tree in order, including the nodes of its forks."""
        return await self.read_in(conversation, nodes.list_nodes)

    @checked
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
        return await self.read_in(conversation, node_paths.load_ancestry, node, limit=limit)

    @checked
    async def children(self, conversation: ConversationRow, node: int) -> list[Node]:
        """Return the nodes that continue from a node, of all conversations on the tree, in order.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        return await self.read_in(conversation, nodes.list_children, node)

    @checked
    async def pending(self, conversation: ConversationRow) -> list[Node]:
        """Return the questions of a conversation that have no answer, oldest first.

        They are in progress, or were interrupted while the model answered or a tool ran.
        """
        return await self.read_in(conversation, node_paths.list_pending)

    @checked
    async def unanswered_after(
        self, conversation: ConversationRow, node: int
    ) -> list[UnansweredQuestion]:
        """Return the pending questions that follow directly after a node, and the node itself if it is one.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        return await self.read_in(conversation, node_paths.find_unanswered_after, node)

    @checked
    async def newest_below(self, conversation: ConversationRow, node: int) -> Node:
        """Return the newest node that follows from a question and did not fail: itself, tool results, or an answer."""
        return await self.read_in(conversation, nodes.find_newest_below, node)

    @checked
    async def node_of_response(
        self, conversation: ConversationRow, response_id: str
    ) -> Node | None:
        """Return the newest node of the response with this provider's id, if there is one."""
        return await self.read_in(conversation, nodes.find_response_node, response_id)

    @checked
    async def common_ancestor(self, conversation: ConversationRow, left: int, right: int) -> Node:
        """Return the newest node that is on the paths to both nodes."""
        return await self.read_in(conversation, node_paths.find_common_ancestor, left, right)

    @checked
    async def differences(
        self, conversation: ConversationRow, left: int, right: int
    ) -> Differences:
        """Return the blocks of each of two paths after their common prefix."""
        return await self.read_in(conversation, node_paths.diff_paths, left, right)

    @checked
    async def load(self, conversation: ConversationRow, node: int | None = None) -> LoadedPath:
        """Return the blocks and the anchors on the path to a node.

        Args:
            conversation: A conversation on the node's tree.
            node: The node; by default the head when the row was read.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
            StoreDamaged: A stored block cannot be read.
        """
        return await self.read_in(conversation, node_paths.load_path, node)

    @checked
    async def load_short(self, conversation: ConversationRow, max_blocks: int) -> LoadedPath | Node:
        """Return the path to the head when the row was read, or only its node if the path is long.

        Args:
            conversation: The conversation.
            max_blocks: The maximum number of blocks of a path that is loaded.

        Raises:
            NotInStore: The conversation was deleted.
            StoreDamaged: A stored block cannot be read.
        """
        return await self.read_in(conversation, node_paths.load_short_path, max_blocks)

    @checked
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
        return await self.read_in(conversation, node_paths.load_turn, node, known=known, turn=turn)

    def load_sync(self, conversation: ConversationRow, node: int) -> LoadedPath:
        """Do the same as `load` from synchronous code; blocks the calling thread."""

        def work(tx: Tx) -> LoadedPath:
            require_conversation(tx, conversation)
            return node_paths.load_path(self._bind(tx), conversation, node)

        return self.database.read_sync(work)

    # Responses

    @checked
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

        Raises:
            InvalidSetting: A time is not finite.
        """
        if conversation is None:
            return await self.read(response_table.list_responses, since=since, until=until)
        return await self.read_in(
            conversation, response_table.list_responses, since=since, until=until
        )

    @checked
    async def find_anchors(
        self, scope: str, digests: Sequence[str], *, retention: float | None = None
    ) -> list[AnchorRecord]:
        """Return the completed responses of a scope whose context has one of the digests.

        This is ``find`` of `kedge.planning.anchor_index.AnchorIndex` for the responses of conversations.

        Args:
            scope: The scope: provider, endpoint and account.
            digests: Digests of prefixes, longest first; the search stops at the first chunk with a
                match.
            retention: Seconds for which the requesting conversation relies on a response.

        Returns:
            Their anchors, which expire by the shorter of both conversations' retentions.
        """
        return await self.read(response_table.find_anchors, scope, digests, retention=retention)

    @checked
    async def mark_lost(self, record: AnchorRecord, reason: str) -> bool:
        """Record that the provider no longer has a response; return whether that is new."""
        return await self.write(response_table.mark_lost, record, reason)

    async def mark_unknown(self, node: int, error: str, error_code: str = "") -> bool:
        """Record that nobody knows what became of a response in the background; return whether that is new.

        Args:
            node: The node with the record of the response.
            error: Why it is unknown.
            error_code: The code of the server's error, if there is one.
        """
        return await self.write(response_table.mark_unknown, node, error, error_code)

    # Idempotency

    @checked
    async def claim(
        self,
        conversation: ConversationRow,
        key: str,
        *,
        request_hash: bytes,
        owner: str,
        lease: float,
    ) -> Claim:
        """Claim the message with an idempotency key, unless another caller answers it or it is done.

        Args:
            conversation: The conversation of the turn.
            key: The idempotency key.
            request_hash: A hash of the request; it must be the same for every use of the key.
            owner: The caller's id.
            lease: Seconds for which the claim is valid, by the database's clock.

        Returns:
            The claim of the caller, of another caller, or of a completed turn.

        Raises:
            KeyReused: The key belongs to another request.
            NotInStore: The conversation was deleted.
        """
        return await self.write_in(
            conversation,
            idempotency.acquire_claim,
            key,
            request_hash=request_hash,
            owner=owner,
            lease=lease,
        )

    @checked
    async def find_claim(self, conversation: ConversationRow, key: str) -> Claim | None:
        """Return the claim on the message with an idempotency key, if the key was used; the caller does not own it."""
        return await self.read_in(conversation, idempotency.find_claim, key)

    @checked
    async def renew(
        self, conversation: ConversationRow, key: str, *, owner: str, lease: float
    ) -> bool:
        """Extend the claim of ``owner`` by ``lease`` seconds from now, or release it with 0.

        A released claim without a stored question is deleted: nothing was sent, and its key may be used for another
        message.

        Returns:
            Whether the claim was still the caller's.

        Raises:
            NotInStore: The conversation was deleted.
        """
        return await self.write_in(
            conversation, idempotency.renew_claim, key, owner=owner, lease=lease
        )

    @checked
    async def settle(self, conversation: ConversationRow, key: str, answer: int) -> None:
        """Record which node is the answer to the message with this key, which completes it.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        await self.write_in(conversation, idempotency.record_answer, key, answer)

    # Telemetry

    @checked
    async def exchanges(self, conversation: ConversationRow) -> list[StoredExchange]:
        """Return the stored requests and replies of a conversation in order; see ``keep_bodies``."""
        return await self.read_in(conversation, response_table.list_exchanges)

    @checked
    async def note(self, conversation: ConversationRow, node: int, telemetry: Telemetry) -> None:
        """Record incidents, tool runs and exchanges of a node.

        Raises:
            NotInStore: The conversation was deleted, or its tree has no such node.
        """
        await self.write_in(conversation, conversation_changes.note_telemetry, node, telemetry)

    # Search, export, import, maintenance

    @checked
    async def export(self, conversation: ConversationRow) -> str:
        """Return a conversation as lines of JSON: its tree with blocks, anchors and telemetry.

        These are the nodes that it added and their ancestors.
        """
        return await self.read_in(conversation, import_export.export_conversation)

    @checked
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
            InvalidSetting: The role, the order, the limit, the offset or a time is not allowed.
        """
        options = search.SearchOptions(limit, offset, role, tag, since, until, order)
        is_complete = await search.update_index(self.database)
        return await self.database.read(
            lambda tx: search.find_blocks(tx, words, options, index_is_complete=is_complete)
        )

    @checked
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
        parsed = await self.database.read(lambda _: import_export.parse_lines(exported))
        # A scope that is stored with the import could not be used by others until its end.
        for scope in import_export.list_scopes(parsed):
            await self._intern_scope(scope)
        rows = await self.database.write(lambda tx: import_export.import_lines(tx, parsed))
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
        if not self.namespace:
            for name in await self.namespaces():
                await self.use_namespace(name).delete_expired()
        await self.database.write(delete.delete_orphans)
        await self._delete_old_objects()
        swept = await delete.delete_unlinked_blocks(self.database)
        await response_sums.rebuild(self.database)
        groups = await self.database.read(search.list_groups)
        await delete.reclaim(self.database, groups, vacuum=True)
        return swept

    async def verify(self) -> list[Damage]:
        """Recompute every hash and digest, and check every reference, in all namespaces.

        Returns:
            Every damaged row; an empty list for a valid store.

        Raises:
            InvalidSetting: This store is bound to a namespace.
        """
        require_default_namespace(self.namespace, "verify")
        return await verify.check_store(self.database)

    async def _delete_old_objects(self) -> None:
        """Delete the claims of objects that others made and no request used for long, and of too many unused ones."""
        await self.write(response_index.delete_old_objects)

    async def _intern_scope(self, name: str) -> int:
        """Return the number of a scope, which never changes once it is stored."""
        number = self._scope_numbers.get(name)
        if number is None:
            number = await self.database.write(lambda tx: response_table.intern_scope(tx, name))
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
