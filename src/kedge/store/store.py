"""Store: conversations, their blocks and their responses, on SQLite or PostgreSQL.

Every method is one transaction: it is applied completely or not at all, and is durable when the method
returns. No transaction waits for a model. SQL is in the modules of the tables; this class opens
transactions and checks that the conversation of a row still exists.

Most methods are functions of a transaction, bound to the class, as in ``children = read(nodes.list_children)``. The
function defines the parameters, the result and the docstring of the method.
"""

import inspect
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

from msgspec import UNSET, UnsetType

from kedge._internal.argument_types import checked
from kedge._internal.arguments import validate_seconds
from kedge._internal.event_loops import AsyncResource, SharedLock, SyncFacade, wrap_method
from kedge.errors import HeadConflict
from kedge.events.request_record import RequestRecord
from kedge.planning import Mode
from kedge.planning.anchor_changes import NO_CHANGES, AnchorChanges
from kedge.planning.anchors import ConversationState
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
from kedge.store.conversations import (
    lock_conversation,
    require_conversation,
    select_head,
    validate_members,
)
from kedge.store.database.transactions import Database, NamespaceDatabase, Tx
from kedge.store.node_state import encode_node_state
from kedge.store.records import (
    NO_TELEMETRY,
    ConversationRow,
    Damage,
    Hit,
    LoadedPath,
    Node,
    NodeKind,
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
_Work = Callable[Concatenate[Tx, P], T]

if TYPE_CHECKING:
    from types import CoroutineType

    _Method = Callable[Concatenate["Store", P], CoroutineType[Any, Any, T]]


def read(work: _Work[P, T]) -> "_Method[P, T]":
    """Return the method that runs a function of queries."""
    return _make_method(work, "read", require_conversation)


def write(work: _Work[P, T]) -> "_Method[P, T]":
    """Return the method that runs a function of statements, again after a conflict; it is durable then."""
    return _make_method(work, "write", lock_conversation)


def _make_method(
    work: _Work[P, T], operation: str, check: Callable[[Tx, ConversationRow], None]
) -> "_Method[P, T]":
    """Return a method with the signature and docstring of its function, and the store instead of the transaction.

    If the first parameter is the row of a conversation, the conversation must still exist.
    """
    signature = inspect.signature(work)
    _, *others = signature.parameters.values()
    has_row = bool(others) and others[0].name == "conversation"

    @wraps(work)
    async def method(self: "Store", *args: P.args, **kwargs: P.kwargs) -> T:
        row: Any = kwargs.get("conversation", args[0] if args else None) if has_row else None

        def run_checked(tx: Tx) -> T:
            if row is not None:
                check(tx, row)
            return work(tx, *args, **kwargs)

        return await getattr(self.database, operation)(_bind(self, run_checked))

    store = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(method)["__signature__"] = signature.replace(parameters=[store, *others])
    method.__doc__ = re.sub(r" *tx: The transaction\.\n", "", work.__doc__ or "")
    return checked(method)


def _bind(store: "Store", work: Callable[[Tx], T]) -> Callable[[Tx], T]:
    """Return the work of a transaction with the settings of a store."""

    def run(tx: Tx) -> T:
        tx.clock, tx.scopes = store.clock, store.scope_names
        tx.body_bytes = store.body_bytes if store.keep_bodies else 0
        return work(tx)

    return run


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
        require_default_namespace(self.namespace, "use_namespace")
        return Store(
            NamespaceDatabase(self.database, validate_namespace(name)),
            keep_bodies=self.keep_bodies,
            body_bytes=self.body_bytes,
            clock=self.clock,
        )

    namespaces = read(conversation_table.list_namespaces)
    database_time = read(conversation_table.read_time)

    # Servers

    load_evidence = read(response_index.select_evidence)
    save_evidence = write(response_index.put_evidence)
    claim_object = write(response_index.claim_object)
    release_object = write(response_index.release_object)
    list_unused_objects = read(response_index.list_unused_objects)
    take_unused_objects = write(response_index.take_unused_objects)
    delete_object = write(response_index.delete_object)

    # Requests through a proxy

    list_proxied = read(proxied_requests.list_proxied)
    get_proxied = read(proxied_requests.get_proxied)
    sum_proxied = read(proxied_requests.sum_proxied)
    add_proxied = write(proxied_requests.insert_proxied)

    async def export_proxied(self) -> list[str]:
        """Return the requests with complete bodies as lines of JSON, oldest first.

        Each line has ``name``, ``api``, ``host``, ``status``, ``request`` and ``body``, the form of recordings.
        """
        return await self.database.read(
            lambda tx: proxied_requests.export_recordings(tx, self.body_bytes)
        )

    # Conversations

    conversation = read(conversation_table.get_conversation)
    conversations = read(conversation_table.list_conversations)
    update_with = write(nodes.update_with)
    fork = write(nodes.fork_conversation)
    schedule_delete = write(conversation_table.schedule_delete)
    require_continuable = read(conversation_table.require_continuable)
    list_scheduled = read(conversation_table.list_scheduled)
    list_expired = read(conversation_table.list_expired)
    list_older = read(conversation_table.list_older)

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

    insert = write(nodes.insert_row)
    create_titled = write(nodes.create_titled)
    create_all = write(nodes.create_all)

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
        age, now = validate_seconds(seconds, "seconds"), self.clock()
        return await delete.delete_old(self.database, now, age=age, tag=tag)

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
            changes: How the anchor records of the Turn differ from those of the responses on the path.
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
        scope = await self._intern_scope(response.scope) if response else 0

        def work(tx: Tx) -> tuple[Node, int | None]:
            is_first = not replaces_node or response_table.delete_running(tx, replaces_node)
            if response and not is_first:
                found = nodes.find_response_node(tx, conversation, response.provider_response_id)
                if found:
                    raise nodes.ResponseStored(found)
            node, moved = nodes.insert_node(
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
            return node, None if head is None or moved else select_head(tx, number)

        node, elsewhere = await self.database.write(_bind(self, work))
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

    move_head = write(nodes.move_head)
    last_blocks = read(node_paths.load_last_blocks)
    newest_response = read(node_paths.find_newest_response)
    node = read(nodes.get_node)
    find_node = read(nodes.find_node)
    tree = read(nodes.list_nodes)
    path = read(node_paths.load_ancestry)
    children = read(nodes.list_children)
    pending = read(node_paths.list_pending)
    unanswered_after = read(node_paths.find_unanswered_after)
    newest_below = read(nodes.find_newest_below)
    node_of_response = read(nodes.find_response_node)
    common_ancestor = read(node_paths.find_common_ancestor)
    differences = read(node_paths.diff_paths)

    load = read(node_paths.load_path)
    load_short = read(node_paths.load_short_path)
    load_turn = read(node_paths.load_turn)

    def load_sync(self, conversation: ConversationRow, node: int) -> LoadedPath:
        """Do the same as `load` from synchronous code; blocks the calling thread."""

        def work(tx: Tx) -> LoadedPath:
            require_conversation(tx, conversation)
            return node_paths.load_path(tx, conversation, node)

        return self.database.read_sync(_bind(self, work))

    # Responses

    responses = read(response_table.list_responses)
    candidates = read(response_table.find_anchors)
    mark_lost = write(response_table.mark_lost)

    # Idempotency

    claim = write(idempotency.acquire_claim)
    find_claim = read(idempotency.find_claim)
    renew = write(idempotency.renew_claim)
    settle = write(idempotency.record_answer)

    # Telemetry

    exchanges = read(response_table.list_exchanges)

    note = write(nodes.note_telemetry)

    # Search, export, import, maintenance

    export = read(import_export.export_conversation)

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
        for name in [] if self.namespace else await self.namespaces():
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

    _delete_old_objects = write(response_index.delete_old_objects)

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
