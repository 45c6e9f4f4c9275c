"""The opening of a conversation by its first use, once for all tasks, threads and event loops, and its position.

Reading never creates a conversation. Until the first write, a new one has a row with the number 0 and the Turn of the
blocks that it begins with.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, Self

from msgspec.structs import replace

from kedge._internal.display import pluralize
from kedge._internal.event_loops import AsyncResource, SharedLock, SharedResource, run_to_end
from kedge.conversation import lookup
from kedge.conversation.checkpoint import limit_retention
from kedge.conversation.lookup import Position
from kedge.errors import InvalidSetting, KedgeError, NotInStore
from kedge.planning import Mode, get_state, set_state
from kedge.store import ConversationRow, Node, Store
from kedge.store.conversations import reject_scheduled
from kedge.store.node_state import decode_mode
from kedge.turns import Block, Turn
from kedge.turns.turn import rename_turn

MAX_LOADED_BLOCKS = 2_000
"""The maximum number of blocks that are loaded when a conversation is opened; more are loaded when needed."""

Expected = Literal["any", "new", "existing"]
"""Whether the conversation may be in the store already, must not be, or must be."""
NOT_OPEN = (
    "this conversation is not open yet: write `await conversation` first, or use it with `async with`; "
    "conversation.sync opens it by itself"
)
CLOSED = "this conversation is closed; make another Conversation with its id to continue it"


class LazyConversation(AsyncResource):
    """A conversation and its position in a store, read when they are first needed.

    Args:
        store: The store.
        new: The row for a new conversation; its mode and retention, if set, replace those of an existing one.
        owned: What is closed with this object.
    """

    _expected: Expected = "any"
    """Whether it may exist."""

    def __init__(
        self, store: Store, new: ConversationRow, owned: Sequence[SharedResource[Any]]
    ) -> None:
        self.store = store
        self._new = new
        self._owned = tuple(owned)
        self._opening = SharedLock()
        self._row: ConversationRow | None = None
        self._node = Node(0, 0, 0, 0, 0, "root", 0, 0, 0)
        self._turn: Turn | None = None
        """The Turn at the node; None until a long conversation needs it."""
        self._undone: tuple[Node, ...] = ()
        """The heads before each ``undo`` since the last other change; the newest last."""
        self._is_new = False
        self._is_closed = False

    @property
    def id(self) -> str:
        """The id of the conversation, which never changes."""
        return self._new.id

    @property
    def row(self) -> ConversationRow:
        """Its row in the store, as last known; its number is 0 until it is created."""
        if self._row is None:
            raise KedgeError(NOT_OPEN)
        return self._row

    @property
    def is_open(self) -> bool:
        """Whether the conversation was opened."""
        return self._row is not None

    @property
    def is_new(self) -> bool:
        """Whether the store did not have the conversation when this object opened it."""
        return bool(self.row) and self._is_new  # ``row`` raises an error unless it is open

    @property
    def title(self) -> str:
        """Its title."""
        return self.row.title

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags."""
        return self.row.tags

    @property
    def head(self) -> int:
        """The id of the last known head; 0 until the conversation is created."""
        return self.row.head

    @property
    def turn(self) -> Turn:
        """The conversation up to the last known head.

        A conversation of more than 2,000 blocks is opened without them. They are loaded by the first method that
        needs them, or by this property, which blocks the calling thread while it reads the store.
        """
        if self._turn is None:
            self._turn = self.store.load_sync(self.row, self.head).turn(self.id)
        return self._turn

    def __await__(self) -> Generator[Any, None, Self]:
        """Open the conversation, if no other use has opened it."""
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def aclose(self) -> None:
        """Close what this object has opened: its engine if a model string was given, and its store if an address was.

        A store and an engine that several conversations use are closed by the last of them. This object cannot be
        used again.
        """
        self._is_closed = True
        owned = self._owned
        self._owned = ()
        for resource in owned:
            await resource.aclose()

    def __repr__(self) -> str:
        if self._row is None:
            return f"<Conversation {self.id}, not open>"
        length = pluralize(self._node.length, "block")
        return f"<Conversation {self.id} at node {self.head}, {length}>"

    async def require_row(self) -> ConversationRow:
        """Return the row in the store; creates the conversation if it is new.

        Raises:
            InvalidSetting: It must be new, and another process has created it.
        """
        await self._open()
        if not self.row.number:
            async with self._opening.acquire():
                if not self.row.number:
                    await run_to_end(self._create())
        return self.row

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

    async def refresh(self) -> Self:
        """Continue from the current head in the store, and return this conversation."""
        await self._open()
        self._undone = ()
        if not self.row.number:
            stored_row = await self._find()
            if stored_row is not None:
                await self._adopt(stored_row)
            return self
        row = await self.store.conversation(self.row)
        await self._continue_with(row, node=row.head)
        return self

    # Opening

    async def _open(self) -> Self:
        if self._is_closed:
            raise KedgeError(CLOSED)
        if self._row is None:
            async with self._opening.acquire():
                if self._row is None:
                    await run_to_end(self._load())
        return self

    async def _load(self) -> None:
        """Read the conversation, or begin a new one."""
        stored_row = await self._find()
        if stored_row is not None:
            await self._adopt(stored_row)
        elif self._expected == "new":
            await self._create()
        else:
            turn = rename_turn(self._first_turn(), self.id)
            state = get_state(turn)
            self._turn = set_state(turn, replace(state, mode=self._new.mode or state.mode))
            self._row = self._new
            self._is_new = True

    async def _find(self) -> ConversationRow | None:
        await self.store
        if self._expected == "new":
            return None
        try:
            return await self.store.conversation(self.id)
        except NotInStore:
            if self._expected == "existing":
                raise
            return None

    async def _create(self) -> None:
        """Create the conversation, or open the one that another process has created meanwhile."""
        try:
            row = await self.store.insert(self._new, self._first_turn())
        except InvalidSetting:
            # The row may be invalid, or there is one with this id.
            stored_row = await self._find()
            if stored_row is None:
                raise
            await self._adopt(stored_row)
            self._is_new = False
        else:
            await self._adopt(row)
            self._is_new = True

    def _first_turn(self) -> Turn:
        """Return the Turn that a new conversation begins with."""
        raise NotImplementedError

    async def _adopt(self, stored_row: ConversationRow) -> None:
        """Continue at the head of a row that was read, unless it is about to be deleted."""
        reject_scheduled(stored_row)
        row = self._apply_settings(stored_row)
        loaded = await self.store.load_short(row, MAX_LOADED_BLOCKS)
        if isinstance(loaded, Node):
            self._node = loaded
            self._turn = None
        else:
            self._node = loaded.node
            self._turn = loaded.turn(row.id)
        self._row = row

    def _apply_settings(self, row: ConversationRow) -> ConversationRow:
        """Return a row with the mode and the retention of this object's requests."""
        mode = self._new.mode or row.mode
        retention = self._new.retention or row.retention
        return replace(row, mode=mode, retention=retention)

    # Position

    async def _follow_head(self) -> None:
        """Continue from the current head in the store, if it has moved."""
        if (await self.store.conversation(self.row)).head != self.head:
            await self.refresh()

    async def _is_on_path(self, node: int, end: int) -> bool:
        path = await self.store.path(self.row, end)
        return any(step.id == node for step in path)

    async def _find_position(self, at: Position) -> tuple[Node, int]:
        """Return the node of a position, and the number of its blocks to use."""
        await self._open()
        blocks: Sequence[Block] = ()
        if not isinstance(at, int | Node):
            blocks = (await self._require_turn()).blocks
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

    async def _move_to(self, node: Node) -> None:
        """Move the head, and continue from there."""
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
        turn: Turn | None = None
        if self._turn is not None:
            _, turn = await self._load_turn(node.id)
        self._set_position(node, turn)

    def _set_row(self, row: ConversationRow) -> None:
        """Continue with a current row at the known head, at which the Turn of this object ends."""
        self._row = replace(self._apply_settings(row), head=self._node.id)

    def _set_position(self, node: Node, turn: Turn | None) -> None:
        """Continue from a node; None for a Turn that is not loaded."""
        self._node = node
        self._undone = ()
        if turn is not None:
            turn = _with_mode(turn, decode_mode(node.memory, self.row.mode))
            turn = limit_retention(turn, self.row.retention)
        self._turn = turn
        self._set_row(self.row)


def _with_mode(turn: Turn, mode: Mode | None) -> Turn:
    """Return a Turn with the mode that it has when it is loaded: its own, or else that of the conversation."""
    state = get_state(turn)
    if state.mode == mode:
        return turn
    return set_state(turn, replace(state, mode=mode))
