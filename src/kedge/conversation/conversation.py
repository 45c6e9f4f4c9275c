"""Conversation: a named, durable Turn with a head in its tree of nodes.

It is an engine with its middleware and a position in a store. Every message is a node of a tree in which
nothing is overwritten: ``undo``, ``edit``, ``regenerate`` and ``fork`` continue from another node, and
existing nodes remain. The head moves by compare-and-swap, so any number of processes may work on one
conversation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

from msgspec.structs import replace
from typing_extensions import TypeForm, TypeVar

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_callback, check_choice, check_type, validate_seconds
from kedge._internal.event_loops import SharedLock, SharedResource
from kedge.compaction.summarize import SUMMARY_PROMPT, build_summary_block
from kedge.conversation import lookup
from kedge.conversation.checkpoint import Checkpoint
from kedge.conversation.claims import DEFAULT_LEASE
from kedge.conversation.lazy_conversation import Expected
from kedge.conversation.lookup import Position
from kedge.conversation.messages import append_blocks, as_block, as_turn, filter_blocks
from kedge.conversation.run import ConversationStream
from kedge.conversation.tasks import ConversationTasks
from kedge.engines import Engine, OutputSchema, Reply, ResponsesEngine, find_filters, unwrap
from kedge.engines.options import RequestOptions
from kedge.engines.reply import answer_text
from kedge.engines.request_log import CostFunction
from kedge.engines.responses import delete_unused_objects
from kedge.errors import InvalidSetting
from kedge.middleware.compose import StackSettings, check_stack, with_default_middleware
from kedge.planning import Mode, RequestPlan, check_added_results
from kedge.providers import to_engine
from kedge.store import ConversationRow, Node, RequestRecord, Store
from kedge.store.open import StoreAddress, accept_address, share_store
from kedge.store.records import NodeKind, new_row
from kedge.turns import Block, Turn, TurnDiff, UserBlock, diff, user
from kedge.turns.blocks import build_replacement
from kedge.turns.frozen_json import EMPTY

if TYPE_CHECKING:
    from kedge.conversation.sync import SyncConversation

T = TypeVar("T", default=None)

MEMORY_URL = "sqlite://:memory:"
SETTING_ADVICE = "instructions are system=…, the first messages blocks=[…], options of one request arguments of send()"

Concurrency = Literal["conflict", "queue"]
"""The behavior of a run while the same conversation has another one."""


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


class Conversation(ConversationTasks):
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
        lease: Seconds after which another process may perform a run with an idempotency key, or the next one in the
            queue, if the process of a run does not renew its claim.
        concurrent: The behavior of a run while this conversation has another one, in any process:
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
        self._given_turn = as_turn(blocks)
        if price is not None:
            check_callback("price", price)
        lease = validate_seconds(lease, "lease") or DEFAULT_LEASE
        if isinstance(model, Store):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSetting(
                'the first argument is the model, and the store is store=…: Conversation("openai:gpt-5.1", store=store)'
            )
        self._base_engine = to_engine(model)
        shared_store = share_store(MEMORY_URL if store is None else store)
        owned: list[SharedResource[Any]] = [shared_store]
        if isinstance(model, str):
            owned.append(SharedResource(self._base_engine))
        opened_store = shared_store.resource
        anchors = lookup.with_stored_anchors(opened_store, lambda: self.row.retention)
        engine = with_default_middleware(self._base_engine, innermost=anchors, **stack)
        super().__init__(
            opened_store,
            new,
            owned,
            engine=engine,
            price=price,
            lease=lease,
            is_queued=concurrent == "queue",
        )
        self._inner_engine = unwrap(engine)

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
        return turn.with_blocks(filter_blocks(self.engine, turn))

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
        blocks = tuple(map(as_block, messages))
        return self._stream_question(blocks, at, keep, key, output, options)

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
        return self._stream_stored_question(node, restart, output, options)

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
        blocks = filter_blocks(self.engine, map(as_block, messages))
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
        turn = append_blocks(self.turn, map(as_block, messages))
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
        turn = append_blocks(await self._require_turn(), map(as_block, messages))
        plan_options = await lookup.add_candidates(
            self.engine, self.store, turn, options, self.row.retention
        )
        return await self.engine.probe_and_plan(turn, **plan_options)

    # Navigation; ``refresh`` is in the base class

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
            path = await self.store.load(self.row, node.id)
            return diff(turn, path.turn().take(length))
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
        if at is None:
            at = self.head
        node, length = await self._find_position(at)
        row = await self.store.fork(self.row, node.id, title or self.title)
        forked = self._clone(row, node)
        if self._turn is not None:
            _, forked._turn = await self._load_turn(node.id, row)  # noqa: SLF001
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
        target = await lookup.find_undo_target(self.store, self.row, self.head)
        await self._move_to(target)
        self._undone = undone  # which the move has cleared
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
        undone = self._undone
        if undone:
            target = undone[-1]
        else:
            target = await lookup.find_redo_target(self.store, self.row, self.head)
        await self._move_to(target)
        self._undone = undone[:-1]
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
        blocks = filter_blocks(self.engine, map(as_block, messages))
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
            return turn.edit(old, *filter_blocks(self.engine, [block]))

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
        return self._stream_last_question(output, options)

    @checked
    async def merge_summary_of(
        self, other: "Conversation | SyncConversation | int | Node", *, prompt: str = SUMMARY_PROMPT
    ) -> Node:
        """Request a summary of another conversation or branch from the model, and append it.

        Args:
            other: Another conversation, or a node of this one's tree.
            prompt: The prompt that requests the summary.

        Returns:
            The new node.
        """
        await self._open()
        if isinstance(other, int | Node):
            node = lookup.get_node_number(self.row, other)
            path = await self.store.load(self.row, node)
            turn = path.turn()
            differences = await self.store.differences(self.row, self.head, node)
            shared_length = differences.shared
        else:
            turn = await _get_async(other)._require_turn()  # noqa: SLF001
            shared_length = 0
        await self.store.require_continuable(self.row)  # before the request is paid for
        # The engine is used without middleware, so the filters of the middleware are applied here.
        filters = find_filters(self.engine)
        turn = filters.apply_to_turn(turn, ("input",))
        request = turn.append(user(prompt, origin="merge_summary_of"))
        stream = self._base_engine.stream(request, streaming=False, mode=self.row.mode)
        await stream.finish()
        text = answer_text(filters.apply_to_turn(stream.turn, ("output",))).strip()
        summary = build_summary_block(text, turn.blocks[shared_length:])
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

        A run in progress ends in the mode in which it began.

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
        node = self.head
        if row_before.head == self.head:
            node = row.head  # the change has moved the head
        await self._continue_with(row, node=node)

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

    def _clone(self, row: ConversationRow, node: Node) -> Self:
        """Return another conversation with the same engine and store."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._new = row
        other._row = self._apply_settings(row)
        other._turn = None
        other._node = node
        other._undone = ()
        other._is_new = True
        other._opening = SharedLock()
        for resource in self._owned:
            resource.add_user()
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
