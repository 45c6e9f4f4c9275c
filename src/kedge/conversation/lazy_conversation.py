"""The opening of a conversation: by its first use, once for all tasks, threads and event loops.

Reading never creates a conversation. Until the first write, a new one has a row with the number 0 and the Turn of the
blocks that it begins with.
"""

from collections.abc import Generator, Sequence
from typing import Any, Literal, Self

from msgspec.structs import replace

from kedge._internal.display import pluralize
from kedge._internal.event_loops import AsyncResource, SharedLock, SharedResource, run_to_end
from kedge.conversation.checkpoint import limit_retention
from kedge.errors import InvalidSetting, KedgeError, NotInStore
from kedge.planning import Mode, get_state, set_state
from kedge.store import ConversationRow, Node, Store
from kedge.store.conversations import reject_scheduled
from kedge.store.node_state import decode_mode
from kedge.turns import Turn
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
        owned, self._owned, self._is_closed = self._owned, (), True
        for each in owned:
            await each.aclose()

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
        found = await self._find()
        if found is not None:
            await self._adopt(found)
        elif self._expected == "new":
            await self._create()
        else:
            turn = rename_turn(self._first_turn(), self.id)
            state = get_state(turn)
            self._turn = set_state(turn, replace(state, mode=self._new.mode or state.mode))
            self._row, self._is_new = self._new, True

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
        is_new = True
        try:
            row = await self.store.insert(self._new, self._first_turn())
        except InvalidSetting:
            found = None if self._expected == "new" else await self._find()
            if found is None:
                raise
            row, is_new = found, False
        await self._adopt(row)
        self._is_new = is_new

    def _first_turn(self) -> Turn:
        """Return the Turn that a new conversation begins with."""
        raise NotImplementedError

    async def _adopt(self, found: ConversationRow) -> None:
        """Continue at the head of a row that was read, unless it is about to be deleted."""
        reject_scheduled(found)
        row = self._apply_settings(found)
        loaded = await self.store.load_short(row, MAX_LOADED_BLOCKS)
        if isinstance(loaded, Node):
            self._node, self._turn = loaded, None
        else:
            self._node, self._turn = loaded.node, loaded.turn(row.id)
        self._row = row

    def _apply_settings(self, row: ConversationRow) -> ConversationRow:
        """Return a row with the mode and the retention of this object's requests."""
        new = self._new
        mode, retention = new.mode or row.mode, new.retention or row.retention
        return replace(row, mode=mode, retention=retention)

    def _set_row(self, row: ConversationRow) -> None:
        """Continue with a current row at the known head, at which the Turn of this object ends."""
        self._row = replace(self._apply_settings(row), head=self._node.id)

    def _set_position(self, node: Node, turn: Turn | None) -> None:
        """Continue from a node; None for a Turn that is not loaded."""
        self._node, self._undone = node, ()
        if turn is not None:
            turn = _with_mode(turn, decode_mode(node.memory, self.row.mode))
            turn = limit_retention(turn, self.row.retention)
        self._turn = turn
        self._set_row(self.row)


def _with_mode(turn: Turn, mode: Mode | None) -> Turn:
    """Return a Turn with the mode that it has when it is loaded: its own, or else that of the conversation."""
    state = get_state(turn)
    return turn if state.mode == mode else set_state(turn, replace(state, mode=mode))
