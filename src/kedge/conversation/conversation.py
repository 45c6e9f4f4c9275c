"""Conversation: a named, durable Turn with a head in its tree of nodes.

It is an engine with its middleware and a position in a store. Every message is a node of a tree in which
nothing is overwritten: ``undo``, ``edit``, ``regenerate`` and ``fork`` continue from another node, and
existing nodes remain. The head moves by compare-and-swap, so any number of processes may work on one
conversation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, get_args

from msgspec.structs import replace
from typing_extensions import TypeForm, TypeVar

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_callback, check_choice, check_type, validate_seconds
from kedge._internal.event_loops import SharedLock, SharedResource
from kedge.compaction.summarize import SUMMARY_PROMPT, build_summary_block
from kedge.conversation import lookup
from kedge.conversation.checkpoint import Checkpoint
from kedge.conversation.lazy_conversation import (
    MAX_LOADED_BLOCKS,
    Expected,
    LazyConversation,
)
from kedge.conversation.lookup import Position
from kedge.conversation.run import (
    DEFAULT_LEASE,
    ClaimRequest,
    ConversationRun,
    ConversationStream,
    ReplyEvents,
    TaskBuilder,
    TurnTask,
    hold_queue,
)
from kedge.engines import (
    Engine,
    OutputSchema,
    Reply,
    ResponsesEngine,
    find_filters,
    to_output_schema,
    unwrap,
)
from kedge.engines.options import RequestOptions, list_options
from kedge.engines.output_schema import SchemaMismatch
from kedge.engines.reply import answer_text, read_output
from kedge.engines.request_log import CostFunction
from kedge.engines.responses import delete_unused_objects
from kedge.errors import HeadConflict, InvalidSetting, InvalidTurn, OutputInvalid, describe_type
from kedge.middleware.compose import StackSettings, check_stack, with_default_middleware
from kedge.planning import Mode, RequestPlan, check_added_results
from kedge.providers import to_engine
from kedge.store import ConversationRow, Node, RequestRecord, Store
from kedge.store.open import StoreAddress, accept_address, share_store
from kedge.store.records import NodeKind, new_row
from kedge.turns import Block, Turn, TurnDiff, UserBlock, diff, new_id, user
from kedge.turns.blocks import build_replacement
from kedge.turns.frozen_json import EMPTY

if TYPE_CHECKING:
    from kedge.conversation.sync import SyncConversation

T = TypeVar("T", default=None)

MEMORY_URL = "sqlite://:memory:"
SETTING_ADVICE = "instructions are system=…, the first messages blocks=[…], options of one request arguments of send()"

Concurrency = Literal["conflict", "queue"]
"""The behavior of a turn while another one of the same conversation runs."""


class ConversationSettings(StackSettings, total=False):
    """The keyword arguments of ``Conversation.open``: those that apply to the requests of one object."""

    mode: Mode | None
    retention: float | None
    price: CostFunction | None
    lease: float
    concurrent: Concurrency


class NewConversationSettings(ConversationSettings, total=False):
    """The keyword arguments of ``Conversation.create``, in addition to ``store`` and ``id``."""

    title: str
    tags: Iterable[str]
    blocks: Block | str | Iterable[Block | str]
    ttl: float | None
    data: Mapping[str, Any]


class Conversation(LazyConversation):
    """A conversation with a model, in a store or in memory.

    The first use opens it, or creates it if the store does not have it: the first write creates it, and reading
    never does. ``await conversation``, ``async with`` and ``with conversation.sync`` open it at once, and raise the
    errors of the database there. ``async with`` and ``with`` close it at the end.

    Args:
        model: An engine or a model string. Only an engine that is made from a model string is closed with the
            conversation.
        store: The store, its address, or the path of a file; by default the conversation is in memory. A store that
            is opened by its address is shared by the conversations of this process, and closed with the last one.
        id: Its id, to open it again later. Without one, every run of a program starts a new conversation.
        title: The title of a new conversation. This and the next four have no effect on one that exists.
        tags: The tags of a new conversation.
        blocks: The block or blocks that a new conversation begins with; text is a user block. Of a Turn, it has the
            data, the mode and the anchors, too, unless ``mode`` is given.
        ttl: Seconds after its last change at which a new conversation expires; see ``Store.delete_expired``.
        data: Further data to store with a new conversation.
        mode: The mode of the requests of this object; ``"stateless"`` stores nothing with the provider. A new
            conversation retains it.
        retention: Seconds for which the provider is assumed to store a response, likewise.
        price: A function that computes the cost of a response, instead of the current prices (``kedge.usage.prices``).
        lease: Seconds after which another process may run a turn with an idempotency key, or the next one in the
            queue, if the process of a turn does not renew its claim.
        concurrent: The behavior of a turn while another one of this conversation runs, in any process:
            ``"conflict"`` starts at once, and the one that ends last raises ``HeadConflict``; ``"queue"`` waits and
            continues from its answer.
        **stack: The settings of the middleware around the engine, see ``StackSettings``: ``system``, ``tools``,
            ``approve``, ``middleware``, ``compactor``, ``counter``, ``resend_limit`` and ``repair``.

    Raises:
        CannotConnect: The model string is wrong, or its key is missing.
        CannotOpenStore: The address of the store is wrong, or its folder does not exist.
        InvalidSetting: A setting has an invalid value; ``UnknownSetting`` if there is none of this name.
        InvalidTurn: A value in ``blocks`` is not a block.

    Example:
        ```python
        with Conversation("openai:gpt-5.1", store="agent.db", id="ada").sync as chat:
            print(chat.send("What is 2+3?").text)
        ```
    """

    def __init__(
        self,
        model: Engine | str,
        *,
        store: Store | StoreAddress | None = None,
        id: str | None = None,  # noqa: A002 - the name in the public contract
        title: str = "",
        tags: Iterable[str] = (),
        blocks: Block | str | Iterable[Block | str] = (),
        ttl: float | None = None,
        data: Mapping[str, Any] = EMPTY,
        mode: Mode | None = None,
        retention: float | None = None,
        price: CostFunction | None = None,
        lease: float = DEFAULT_LEASE,
        concurrent: Concurrency = "conflict",
        **stack: Unpack[StackSettings],
    ) -> None:
        names = {"store", "id", *NewConversationSettings.__optional_keys__}
        check_stack(stack, names, "a conversation", SETTING_ADVICE)
        check_choice("concurrent", concurrent, get_args(Concurrency))
        _check_id(id, ttl, has_store=store is not None)
        new = new_row(
            title, tags=tags, mode=mode, retention=retention, ttl=ttl, data=data, id=id or ""
        )
        self._given_turn = _as_turn(blocks)
        self.price = None if price is None else check_callback("price", price)
        self.lease = validate_seconds(lease, "lease") or DEFAULT_LEASE
        self._is_queued = concurrent == "queue"
        if isinstance(model, Store):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSetting(
                'the first argument is the model, and the store is store=…: Conversation("openai:gpt-5.1", store=store)'
            )
        self._base_engine = to_engine(model)
        shared_store = share_store(MEMORY_URL if store is None else store)
        owned: list[SharedResource[Any]] = [shared_store]
        if isinstance(model, str):
            owned.append(SharedResource(self._base_engine))
        super().__init__(shared_store.resource, new, owned)
        anchors = lookup.with_stored_anchors(self.store, lambda: self.row.retention)
        self.engine = with_default_middleware(self._base_engine, innermost=anchors, **stack)
        self._inner_engine = unwrap(self.engine)

    @classmethod
    def create(
        cls,
        model: Engine | str,
        *,
        store: Store | StoreAddress | None = None,
        id: str | None = None,  # noqa: A002 - the name in the public contract
        **settings: Unpack[NewConversationSettings],
    ) -> Self:
        """Return a conversation that its first use creates, also if that is ``await``.

        Args:
            model: An engine or a model string.
            store: The store, its address, or the path of a file.
            id: Its id; generated by default.
            **settings: The other keyword arguments of ``Conversation``.

        Raises:
            InvalidSetting: A setting has an invalid value. When it is opened: there is a conversation with this id.
            Blocked: When it is opened: a guard rejects one of the blocks.
        """
        return cls(model, store=store, id=id, **settings)._expect("new")  # noqa: SLF001

    @classmethod
    def open(
        cls,
        model: Engine | str,
        *,
        store: Store | StoreAddress,
        id: str,  # noqa: A002 - the name in the public contract
        **settings: Unpack[ConversationSettings],
    ) -> Self:
        """Return a conversation that must exist when it is opened.

        Args:
            model: An engine or a model string.
            store: The store, its address, or the path of a file.
            id: Its id.
            **settings: The keyword arguments of ``Conversation`` that do not describe a new conversation.

        Raises:
            NotInStore: When it is opened: there is no such conversation, or it is about to be deleted.
        """
        return cls(model, store=store, id=id, **settings)._expect("existing")  # noqa: SLF001

    def _expect(self, expected: Expected) -> Self:
        self._expected = expected
        return self

    def _first_turn(self) -> Turn:
        turn = self._given_turn
        return turn.with_blocks(_filter_blocks(self.engine, turn))

    async def _load(self) -> None:
        if isinstance(self._inner_engine, ResponsesEngine):
            await self._inner_engine.attach_evidence(self.store)
        await super()._load()

    list = staticmethod(accept_address(Store.conversations))
    """Return the conversations of a store, or of the one at an address; see ``Store.conversations``."""
    search = staticmethod(accept_address(Store.search))
    """Return the blocks of a store, or of the one at an address, that match a search; see ``Store.search``."""
    import_ = staticmethod(accept_address(Store.import_))
    """Create the conversations of an export in a store, or in the one at an address; see ``Store.import_``."""

    @property
    def sync(self) -> "SyncConversation":
        """The methods of this conversation for sync code: ``conversation.sync.send("Hello")``."""
        from kedge.conversation.sync import SyncConversation  # imports this module

        return SyncConversation(self)

    # Sending

    @checked
    async def send(
        self,
        *messages: Block | str,
        key: str = "",
        at: Position | None = None,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Reply[T]:
        """Send messages and return the answer after both are stored.

        Args:
            *messages: Blocks or texts.
            key: An idempotency key: the same request with the same key runs once, in any process; later
                calls return the stored reply.
            at: The node, response or block to continue from instead of the head: an object, the number of a node,
                or the id of a response or block. The head moves there with the answer.
            output: The type of the answer: any type that pydantic supports, or a JSON schema.
            **options: The options of an engine's ``run``, such as ``model``.

        Returns:
            The reply; ``reply.output`` is the typed value.

        Raises:
            EngineError: The request failed; completed steps are stored, see ``resume``.
            OutputInvalid: The answer does not match ``output``, also after retries; all answers are stored
                on a branch, and the same key continues from there.
            OutputRefused: The model refused to answer, and ``output`` requests a value.
            HeadConflict: Another process moved the head; the answer is stored on a branch.
            KeyReused: The key belongs to a request with other messages, model or settings.
            Blocked: A guard rejected a message or the answer.
            UnmatchedResult: A tool result among the messages belongs to no open call; nothing was sent or stored.
        """
        options.setdefault("streaming", False)
        return await self.stream(*messages, key=key, at=at, output=output, **options).finish()

    @checked
    def stream(
        self,
        *messages: Block | str,
        key: str = "",
        at: Position | None = None,
        keep: int | None = None,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ConversationStream[T]:
        """Send messages and return a stream of events; after the last one it has the ``reply``.

        Arguments and errors are those of ``send``; errors are raised by the iteration. With ``keep``, the
        messages follow the first ``keep`` blocks of the node instead of all blocks.
        """
        blocks = tuple(_as_block(each) for each in messages)
        build_task = partial(self._build_question, blocks, at, keep, key)
        run = partial(self._run_once, key, blocks, at is not None) if key else self._run
        return self._open_stream(partial(run, build_task), output, options)

    @checked
    async def resume(
        self,
        node: int | Node | None = None,
        *,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Reply[T]:
        """Continue with a question that was stored and never answered.

        Args:
            node: The node of the question; by default the newest one at the head.
            output: The type of the answer.
            **options: The options of an engine's ``run``.

        Returns:
            The reply.

        Raises:
            NotInStore: There is no such question.
        """
        options.setdefault("streaming", False)
        return await self.stream_resume(node, output=output, **options).finish()

    @checked
    def stream_resume(
        self,
        node: int | Node | None = None,
        *,
        restart: bool = False,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ConversationStream[T]:
        """Continue with a question that was stored and never answered, and return the events.

        Args:
            node: The node of the question; by default the newest one at the head.
            restart: Whether to start again at the question, instead of after its last stored step.
            output: The type of the answer. A stored answer that does not match is requested again.
            **options: The options of an engine's ``run``.

        Returns:
            The stream; its iteration raises ``NotInStore`` if there is no such question.
        """
        schema = None if output is None else to_output_schema(output)
        run = partial(self._run, partial(self._resume, node, restart, schema))
        return self._open_stream(run, schema, options)

    async def pending(self) -> Sequence[Node]:
        """Return the questions without an answer, which are in progress or were interrupted.

        A run may be interrupted by an error, a cancellation or a crash, while the model answers or a tool runs.
        """
        row = await self._find_row()
        return await self.store.pending(row) if row else ()

    @checked
    async def append(self, *messages: Block | str, kind: NodeKind = "added") -> Node:
        """Add blocks without a request.

        Args:
            *messages: Blocks or texts.
            kind: The kind of the new node.

        Returns:
            The new node.

        Raises:
            HeadConflict: Another process moved the head; the blocks are stored on a branch.
            Blocked: A guard rejects one of the blocks.
            UnmatchedResult: A tool result among the blocks belongs to no open call; nothing was stored.
        """
        blocks = _filter_blocks(self.engine, map(_as_block, messages))
        return await self._change_turn(lambda turn: turn.append(*blocks), kind)

    @checked
    def plan(self, *messages: Block | str, **options: Unpack[RequestOptions]) -> RequestPlan:
        """Return the plan of the request that ``send`` would send: a dry run.

        Args:
            messages: The messages to send.
            **options: The options of ``send``, and ``streaming`` for a request like that of ``stream``.

        Returns:
            The plan. It is ``conditional`` if a probe of the server, or a response in the store's index, may change it;
            ``probe_and_plan`` looks for both.
        """
        turn = _append_blocks(self.turn, map(_as_block, messages))
        plan = self.engine.plan(turn, **options)
        has_answer = any(not isinstance(block, UserBlock) for block in turn.body)
        is_searched = plan.is_full and plan.mode == "chained" and has_answer
        if is_searched and lookup.needs_lookup(turn, plan.scope):
            return replace(plan, conditional=True)
        return plan

    @checked
    async def probe_and_plan(
        self, *messages: Block | str, **options: Unpack[RequestOptions]
    ) -> RequestPlan:
        """Return the plan of the request that ``send`` would send, after the probes that it would make.

        Args:
            messages: The messages to send.
            **options: As for ``plan``.

        Returns:
            The plan, with the responses in the store's index among its candidates.
        """
        turn = _append_blocks(await self._require_turn(), map(_as_block, messages))
        found = await lookup.add_candidates(
            self.engine, self.store, turn, options, self.row.retention
        )
        return await self.engine.probe_and_plan(turn, **found)

    # Navigation

    async def refresh(self) -> Self:
        """Continue from the current head in the store, and return this conversation."""
        await self._open()
        self._undone = ()
        if not self.row.number:
            if found := await self._find():
                await self._adopt(found)
            return self
        row = await self.store.conversation(self.row)
        await self._continue_with(row, node=row.head)
        return self

    async def tree(self) -> Sequence[Node]:
        """Return every node of the conversation's tree in order, including those of its forks."""
        row = await self._find_row()
        return await self.store.tree(row) if row else ()

    async def path(self) -> Sequence[Node]:
        """Return the nodes from the root to the head."""
        row = await self._find_row()
        return await self.store.path(row, self.head) if row else ()

    @checked
    async def diff(self, other: "Conversation | SyncConversation | Position") -> TurnDiff:
        """Return how another conversation or branch differs from this one.

        Args:
            other: Another conversation, or a position of this one, as for ``goto``.

        Returns:
            The blocks that are added, removed, modified and moved there.

        Raises:
            NotInStore: This conversation has no such node, response or block.
        """
        turn = await self._require_turn()
        if isinstance(other, Position):
            node, length = await self._find_position(other)
            return diff(turn, (await self.store.load(self.row, node.id)).turn().take(length))
        return diff(turn, await _get_async(other)._require_turn())  # noqa: SLF001

    @checked
    async def goto(self, at: Position) -> Self:
        """Move the head to another node; the nodes after it remain in the tree.

        Args:
            at: A node or its number, the id of a response, or a block or its id, which becomes the last one.

        Returns:
            This conversation.

        Raises:
            NotInStore: This conversation has no such node, response or block.
            HeadConflict: Another process moved the head.
        """
        node, length = await self._find_position(at)
        await self._move_to(node)
        if length < node.length:
            await self._change_turn(lambda turn: turn.take(length))
        return self

    @checked
    async def fork(self, at: Position | None = None, *, title: str = "") -> Self:
        """Create a conversation that continues from here or from an earlier point.

        Args:
            at: A node or its number, the id of a response, or a block or its id; by default the head.
            title: Its title; by default this one's.

        Returns:
            The new conversation.

        Raises:
            NotInStore: This conversation has no such node, response or block.
        """
        await self.require_row()
        node, length = await self._find_position(self.head if at is None else at)
        row = await self.store.fork(self.row, node.id, title or self.title)
        forked = self._clone(row, node)
        if self._turn is not None:
            forked._turn = (await self._load_turn(node.id, row))[1]  # noqa: SLF001
        if length < node.length:
            await forked._change_turn(lambda turn: turn.take(length))  # noqa: SLF001
        return forked

    async def undo(self) -> Self:
        """Move the head to before the last question or edit; the nodes after it remain in the tree.

        Raises:
            NotInStore: There is nothing to undo.
            HeadConflict: Another process moved the head.
        """
        await self._open()
        undone = (*self._undone, self._node)
        await self._move_to(await lookup.find_undo_target(self.store, self.row, self.head))
        self._undone = undone
        return self

    async def redo(self) -> Self:
        """Move the head to after the question or edit that was undone last.

        A conversation that was opened again, or changed since, continues with the newest branch below
        its head.

        Raises:
            NotInStore: There is nothing to redo.
            HeadConflict: Another process moved the head.
        """
        await self._open()
        if self._undone:
            *undone, target = self._undone
        else:
            undone, target = [], await lookup.find_redo_target(self.store, self.row, self.head)
        await self._move_to(target)
        self._undone = tuple(undone)
        return self

    @checked
    async def insert(self, index: int, *messages: Block | str) -> Node:
        """Insert blocks before an index, as ``list.insert`` does; nothing is sent.

        Args:
            index: The index of the first new block.
            *messages: Blocks or texts.

        Returns:
            The new node.

        Raises:
            HeadConflict: Another process moved the head; the change is stored on a branch.
            Blocked: A guard rejects one of the blocks.
        """
        blocks = _filter_blocks(self.engine, map(_as_block, messages))
        return await self._change_turn(lambda turn: turn.insert(index, *blocks))

    @checked
    async def remove(self, *blocks: Block | str) -> Node:
        """Remove blocks; the other blocks remain.

        Args:
            *blocks: The blocks to remove, or their ids.

        Returns:
            The new node.

        Raises:
            InvalidTurn: The conversation has no such block.
            HeadConflict: Another process moved the head; the change is stored on a branch.
        """
        return await self._change_turn(lambda turn: turn.remove(*blocks))

    @checked
    async def truncate(self, length: int | Block | str) -> Node:
        """Remove all blocks after the first ones.

        Args:
            length: The number of blocks that remain, negative to count from the end; or the last block
                that remains, or its id.

        Returns:
            The new node.

        Raises:
            InvalidTurn: The conversation has no such block.
            HeadConflict: Another process moved the head; the change is stored on a branch.
        """
        return await self._change_turn(lambda turn: turn.truncate(length))

    @checked
    async def edit(self, old: Block | str, new: Block | str) -> Node:
        """Replace a block; the blocks after it remain.

        Args:
            old: The block to replace, or its id.
            new: The new block, or the text of a user block.

        Returns:
            The new node.

        Raises:
            InvalidTurn: The conversation has no such block.
            InvalidSetting: ``new`` is a text and the block is not a user block.
            HeadConflict: Another process moved the head; the edit is stored on a branch.
        """

        def change(turn: Turn) -> Turn:
            block = build_replacement(turn[turn.index(old)], new)
            return turn.edit(old, *_filter_blocks(self.engine, [block]))

        return await self._change_turn(change)

    async def regenerate(
        self,
        *,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Reply[T]:
        """Send the last question again; the previous answer remains in the tree.

        Args:
            output: The type of the answer.
            **options: The options of an engine's ``run``.

        Returns:
            The new reply.

        Raises:
            NotInStore: The conversation has no question.
        """
        options.setdefault("streaming", False)
        return await self.stream_regenerate(output=output, **options).finish()

    def stream_regenerate(
        self,
        *,
        output: TypeForm[T] | OutputSchema[T] | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ConversationStream[T]:
        """Send the last question again and return the events; the previous answer remains in the tree.

        Args:
            output: The type of the answer.
            **options: The options of an engine's ``run``.

        Returns:
            The stream; its iteration raises ``NotInStore`` if the conversation has no question.
        """
        run = partial(self._run, self._build_regenerate_task)
        return self._open_stream(run, output, options)

    @checked
    async def merge_summary_of(
        self, other: "Conversation | SyncConversation | int | Node", *, ask: str = SUMMARY_PROMPT
    ) -> Node:
        """Request a summary of another conversation or branch from the model, and append it.

        Args:
            other: Another conversation, or a node of this one's tree.
            ask: The prompt that requests the summary.

        Returns:
            The new node.
        """
        await self._open()
        if isinstance(other, int | Node):
            node = lookup.get_node_number(self.row, other)
            loaded = await self.store.load(self.row, node)
            shared = (await self.store.differences(self.row, self.head, node)).shared
            turn = loaded.turn()
        else:
            turn, shared = await _get_async(other)._require_turn(), 0  # noqa: SLF001
        await self.store.require_continuable(self.row)  # before the request is paid for
        # The engine is used without middleware, so the filters of the middleware are applied here.
        filters = find_filters(self.engine)
        turn = filters.apply_to_turn(turn, ("input",))
        request = turn.append(user(ask, origin="merge_summary_of"))
        mode = self.row.mode
        stream = self._base_engine.stream(request, streaming=False, mode=mode)
        await stream.finish()
        text = answer_text(filters.apply_to_turn(stream.turn, ("output",))).strip()
        summary = build_summary_block(text, turn.blocks[shared:])
        return await self.append(summary, kind="merged")

    # Administration

    @checked
    async def rename(self, title: str) -> None:
        """Change the title."""
        await self.update_with(lambda _: {"title": title})

    @checked
    async def tag(self, *tags: str) -> None:
        """Add tags."""
        await self.update_with(lambda row: {"tags": (*row.tags, *tags)})

    @checked
    async def untag(self, *tags: str) -> None:
        """Remove tags."""
        check_type("tags", str, *tags)
        await self.update_with(lambda row: {"tags": [tag for tag in row.tags if tag not in tags]})

    @checked
    async def archive(self, archived: bool = True) -> None:
        """Archive the conversation, or restore it with ``archived=False``."""
        await self.update_with(lambda _: {"archived": archived})

    async def set_mode(self, mode: Mode | None) -> None:
        """Change the mode of the requests of this conversation, from the next request on and in every process.

        A turn that is running ends in the mode in which it began.

        Args:
            mode: The new mode; None for the engine's default.

        Raises:
            InvalidSetting: There is no such mode.
        """
        await self.update_with(lambda _: {"mode": mode})

    async def set_retention(self, seconds: float | None) -> None:
        """Change the time for which the provider is assumed to store a response of this conversation.

        Args:
            seconds: The new time; None for the provider's own.

        Raises:
            InvalidSetting: It is not a number of seconds above 0.
        """
        await self.update_with(lambda _: {"retention": seconds})

    @checked
    async def update_with(self, compute: Callable[[ConversationRow], Mapping[str, Any]]) -> None:
        """Change members of the conversation that depend on their present values; see ``Store.update_with``.

        A changed mode or retention replaces that of this object, too.
        """
        row_before = await self.require_row()
        names: set[str] = set()

        def compute_members(row: ConversationRow) -> Mapping[str, Any]:
            nonlocal row_before
            row_before = row
            members = compute(row)
            if isinstance(members, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - the store checks it
                names.update(members)
            return members

        row = await self.store.update_with(row_before, compute_members)
        if "mode" in names:
            self._new = replace(self._new, mode=row.mode)
        if "retention" in names:
            self._new = replace(self._new, retention=row.retention)
        is_moved = row_before.head == self.head != row.head
        await self._continue_with(row, node=row.head if is_moved else self.head)

    async def delete(self) -> None:
        """Delete the conversation and all blocks that no other conversation uses; this cannot be undone.

        Its conversation objects are deleted at the server of the engine, as far as Kedge made them and no other stored
        conversation continues them. What the server does not delete within 10 seconds is left for ``kedge gc``.
        """
        await self._open()
        await self.store.delete(self.row)
        await delete_unused_objects(self.engine, self.store)

    async def export(self) -> str:
        """Return the complete conversation as lines of JSON, for ``import_``."""
        await self._open()
        return await self.store.export(self.row)

    async def responses(self) -> Sequence[RequestRecord]:
        """Return every response of this conversation, in order."""
        row = await self._find_row()
        return await self.store.responses(row) if row else ()

    # Implementation

    async def _require_row_for(self, change: Callable[[Turn], Turn]) -> ConversationRow:
        """Return the row in the store; create the conversation unless the first change of it is invalid."""
        await self._open()
        if not self.row.number:
            change(self.turn)
        return await self.require_row()

    async def _find_row(self) -> ConversationRow | None:
        """Return the row in the store, if the conversation is there."""
        await self._open()
        return self.row if self.row.number else None

    def _open_stream(
        self, run: Callable[[dict[str, Any]], ReplyEvents], output: Any, options: Mapping[str, Any]
    ) -> ConversationStream[Any]:
        """Return the stream of a run, with the schema of a typed answer among its options."""
        schema = None if output is None else to_output_schema(output)
        listed = list_options(options)
        open_events = partial(run, {**listed, "output": schema} if schema else listed)
        if self._is_queued:
            open_events = partial(self._wait_in_queue, open_events)
        return ConversationStream(open_events, schema)

    async def _wait_in_queue(self, open_events: Callable[[], ReplyEvents]) -> ReplyEvents:
        """Run a turn after the earlier turns of this conversation, from their answer."""
        row = await self.require_row()
        async with self.store.get_queue(row.id).acquire(), hold_queue(self.store, row, self.lease):
            await self._follow_head()
            async with aclosing(open_events()) as events:
                async for event in events:
                    yield event

    def _run(self, build_task: TaskBuilder, options: dict[str, Any]) -> ReplyEvents:
        position = self._set_position
        return ConversationRun(self.engine, build_task, options, self.price, position).events()

    async def _build_task(
        self,
        node: int,
        change: Callable[[Turn], Turn] = lambda turn: turn,
        key: str = "",
        *,
        resumed: bool = True,
    ) -> TurnTask:
        """Return a task that sends the Turn at a node, after a change."""
        checkpoint = Checkpoint(self.store, self.row, *await self._load_turn(node))
        return TurnTask(checkpoint, change(checkpoint.turn), self.head, key, resumed)

    async def _build_question(
        self, blocks: Sequence[Block], at: Position | None, keep: int | None, key: str
    ) -> TurnTask:
        await self._require_row_for(lambda turn: _append_blocks(turn, blocks))
        node = self.head
        if isinstance(at, int | Node):
            node = lookup.get_node_number(self.row, at)
        elif at is not None:
            found, length = await self._find_position(at)
            node = found.id
            if keep is None:
                keep = length

        def add(turn: Turn) -> Turn:
            return _append_blocks(turn if keep is None else turn.take(keep), blocks)

        return await self._build_task(node, add, key, resumed=False)

    async def _run_once(
        self,
        key: str,
        blocks: Sequence[Block],
        is_branch: bool,
        build_task: TaskBuilder,
        options: dict[str, Any],
    ) -> ReplyEvents:
        """Run the turn with this key, or return its reply if it was run already.

        ``is_branch`` means that the turn continues from another node than the head.
        """
        row = await self._require_row_for(lambda turn: _append_blocks(turn, blocks))
        request = ClaimRequest(self.store, row, key, new_id("run"), self.lease)
        model = options.get("model") or unwrap(self._base_engine).model
        claim = await request.acquire(blocks, {**options, "model": model})
        schema = options.get("output")

        async def build_claimed_task() -> TurnTask | Reply[Any]:
            if claim.answer:
                await self._follow_head()
                return await self._load_reply(claim.answer, schema)
            if claim.question:
                point = await self._find_claimed_turn(claim.question, is_branch=is_branch)
                if point is not None:
                    return await self._resume_at(point, key, schema)
            return await build_task()

        async with request.maintain(), aclosing(self._run(build_claimed_task, options)) as events:
            async for event in events:
                yield event

    async def _resume(
        self, node: int | Node | None, restart: bool, schema: OutputSchema[Any] | None
    ) -> TurnTask | Reply[Any]:
        await self._open()
        question = None if node is None else lookup.get_node_number(self.row, node)
        if restart and question is not None:
            point = lookup.ResumePoint(await self.store.node(self.row, question), done=False)
            return await self._resume_at(point, "", schema)
        point = await lookup.find_resume_point(self.store, self.row, question)
        while True:
            task = await self._resume_at(point, "", schema)
            if point.done:
                return task
            # An answer that another process stored meanwhile would be requested and paid for again.
            newest = await lookup.find_resume_point(self.store, self.row, question)
            if newest == point:
                return task
            point = newest

    async def _resume_at(
        self, point: lookup.ResumePoint, key: str, schema: OutputSchema[Any] | None
    ) -> TurnTask | Reply[Any]:
        """Return the task that continues a stored question from this point, or its answer if it has one.

        If an answer does not have the requested type, the run continues with a correction.
        """
        if not point.done:
            await self.store.require_continuable(self.row)  # before tools run
            return await self._build_task(point.node.id, key=key)
        try:
            reply = await self._adopt_answer(point.node, schema)
        except OutputInvalid as invalid:
            mismatch = SchemaMismatch(invalid.problems)
            correction = cast("OutputSchema[Any]", schema).build_correction(mismatch)
            return await self._build_task(point.node.id, lambda turn: turn.append(correction), key)
        if key:
            await self.store.settle(self.row, key, point.node.id)
        return reply

    async def _find_claimed_turn(
        self, question: int, *, is_branch: bool
    ) -> lookup.ResumePoint | None:
        """Return where the turn of a key continues; None if it must be run from the current head.

        A turn whose answer lost the race for the head is on a separate branch: neither on the path
        to the head nor after it. It is not part of the conversation, and runs again, unless it was sent to continue
        from another node.
        """
        point = await lookup.find_resume_point(self.store, self.row, question)
        head = (await self.store.conversation(self.row)).head
        is_stored = await self._is_on_path(point.node.id, head)
        if is_stored or await self._is_on_path(head, point.node.id):
            # The head is where it was when the question was stored, perhaps by another process.
            await self._follow_head()
            return point
        if head != self.head:  # it would lose the race again
            raise HeadConflict(self.id, point.node.id, head)
        return point if is_branch else None

    async def _is_on_path(self, node: int, end: int) -> bool:
        return any(each.id == node for each in await self.store.path(self.row, end))

    async def _follow_head(self) -> None:
        """Continue from the current head in the store, if it has moved."""
        if (await self.store.conversation(self.row)).head != self.head:
            await self.refresh()

    async def _build_regenerate_task(self) -> TurnTask:
        """Return a task for the last question, from the current Turn if it was edited or extended since."""
        if question := lookup.find_last_question(await self.path()):
            return await self._build_task(question.id)
        return await self._build_task(self.head, lookup.truncate_to_question, resumed=False)

    async def _adopt_answer(self, node: Node, schema: OutputSchema[Any] | None) -> Reply[Any]:
        """Return a stored answer, and move the head to it unless it is on the head's path."""
        reply = await self._load_reply(node.id, schema)
        if await self._is_on_path(node.id, (await self.store.conversation(self.row)).head):
            await self._follow_head()
            return reply
        await self.store.move_head(self.row, node, head=self.head)
        self._set_position(node, reply.turn)
        return reply

    async def _load_reply(self, node: int, schema: OutputSchema[Any] | None) -> Reply[Any]:
        """Return the reply that is stored at a node, with its typed value if it has one.

        Raises:
            OutputInvalid: It does not match; a validator of its type may also reject what it accepted before.
        """
        turn = (await self.store.load(self.row, node)).turn(self.id)
        try:
            value = read_output(schema, turn) if schema else None
        except SchemaMismatch as mismatch:
            raise OutputInvalid(answer_text(turn), mismatch.problems, 0, turn) from mismatch
        newest = await self.store.newest_response(self.row, node)
        requests = (newest,) if newest and newest.node == node else ()
        return Reply(answer_text(turn), turn, node, self.id, requests, stored=True, output=value)

    async def _change_turn(self, change: Callable[[Turn], Turn], kind: NodeKind = "edited") -> Node:
        """Store a change of the Turn as a new node, and move the head to it.

        Raises:
            UnmatchedResult: A new result belongs to no open call.
        """

        def check(before: Turn) -> Turn:
            turn = change(before)
            check_added_results(before, turn)
            return turn

        await self._require_row_for(check)
        before = await self._require_turn()
        turn = check(before)
        checkpoint = Checkpoint(self.store, self.row, self._node, before)
        node = await checkpoint.save(turn, kind, head=self.head)
        self._set_position(node, turn)
        return node

    async def _move_to(self, node: Node) -> None:
        await self.store.move_head(self.row, node, head=self.head)
        await self._continue_at(node)

    async def _continue_with(self, row: ConversationRow, node: int) -> None:
        """Continue from a node with a current row."""
        before = self.row
        self._set_row(row)
        if (self.row.mode, self.row.retention) != (before.mode, before.retention):
            self._turn = None  # its mode and the expiry of its anchors depend on them
        if node != self.head:
            await self._continue_at(await self.store.node(row, node))
        if self._turn is None and self._node.length <= MAX_LOADED_BLOCKS:
            await self._require_turn()

    async def _continue_at(self, node: Node) -> None:
        """Continue from a node, without loading a Turn that is not loaded yet."""
        turn = None if self._turn is None else (await self._load_turn(node.id))[1]
        self._set_position(node, turn)

    async def _find_position(self, at: Position) -> tuple[Node, int]:
        """Return the node of a position, and the number of its blocks to use."""
        await self._open()
        blocks = () if isinstance(at, int | Node) else (await self._require_turn()).blocks
        return await lookup.find_position(self.store, self.row, blocks, at)

    async def _require_turn(self) -> Turn:
        """Return the Turn at the head, loading it if necessary."""
        await self._open()
        while self._turn is None:
            node = self._node
            loaded = await self.store.load(self.row, node.id)
            if self._node is node:  # unless another task has moved the head meanwhile
                self._turn = loaded.turn(self.id)
        return self._turn

    async def _load_turn(self, node: int, row: ConversationRow | None = None) -> tuple[Node, Turn]:
        """Return a node and its Turn; blocks of the current Turn are not read again."""
        turn = await self._require_turn()
        if node == self.head and row is None:
            return self._node, turn
        return await self.store.load_turn(row or self.row, node, known=self._node, turn=turn)

    def _clone(self, row: ConversationRow, node: Node) -> Self:
        """Return another conversation with the same engine and store."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._new, other._row = row, self._apply_settings(row)
        other._turn, other._node, other._undone, other._is_new = None, node, (), True
        other._opening = SharedLock()
        for each in self._owned:
            each.add_user()
        return other


def _get_async(other: "Conversation | SyncConversation") -> Conversation:
    from kedge.conversation.sync import SyncConversation  # imports this module

    if isinstance(other, SyncConversation):
        return other._target  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    check_type("other", Conversation, other)
    return other


def _check_id(id: object, ttl: object, *, has_store: bool) -> None:  # noqa: A002
    """Reject an id that cannot be opened again, and settings that need a store."""
    if id is not None and not isinstance(id, str):
        raise InvalidSetting(f"id must be text, not {type(id).__name__}; write id=str(…)")
    if id == "":
        raise InvalidSetting(
            "the id is empty, so the conversation could not be opened again; leave id= out for a new one"
        )
    for name, value in {"id": id, "ttl": ttl}.items():
        if value is not None and not has_store:
            raise InvalidSetting(
                f'{name}= needs store=: a conversation in memory ends with this program; write store="chat.db"'
            )


def _as_block(message: Block | str) -> Block:
    return user(message) if isinstance(message, str) else message


def _as_turn(messages: Block | str | Iterable[Block | str]) -> Turn:
    """Return the Turn of these messages; a Turn itself has data and anchors, too."""
    if isinstance(messages, Turn):
        return messages
    listed = [messages] if isinstance(messages, str | Block) else messages
    if not isinstance(listed, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTurn(f"blocks must be blocks or texts, not {describe_type(listed)}")
    return Turn(map(_as_block, listed))  # which checks them


def _append_blocks(turn: Turn, blocks: Iterable[Block]) -> Turn:
    """Return a Turn with blocks of the caller at its end.

    Raises:
        UnmatchedResult: A result among them belongs to no open call.
    """
    extended = turn.append(*blocks)
    check_added_results(turn, extended)
    return extended


def _filter_blocks(engine: Engine, blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return blocks after the guards of an engine, as they may be stored."""
    filters = find_filters(engine)
    return tuple(filters.apply(block, ("input",)) for block in blocks)
