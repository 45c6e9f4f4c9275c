"""Find nodes, anchors and the model of a conversation in a store.

The middleware next to the engine connects a store to every request. It receives a Turn exactly as it is about to be
sent. It awaits ``request.before_send`` with it, so that new blocks are stored before they are sent. If no record of the
Turn itself is valid, it searches the store's index for a response with the same content, from any conversation and
process; the scope separates accounts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from kedge._internal.argument_types import checked
from kedge.engines import Engine, Request, unwrap
from kedge.engines.stack import StackLayer
from kedge.errors import InvalidType, NotInStore, describe_type
from kedge.planning import AnchorRecord, find_problems, get_state
from kedge.planning.anchor_index import iter_prefix_digests
from kedge.planning.anchors import base_scope, matches_prefix
from kedge.planning.digests import get_prefix_index
from kedge.providers.registry import ADDRESS_PROVIDERS
from kedge.store import ConversationRow, Node, RequestRecord, Store
from kedge.store.open import StoreAddress, share_store, use_store
from kedge.turns import Block, Turn, UserBlock

MODEL_KEY = "model"
"""The member of a conversation's data with the model string that it was last used with."""
SERVER_SCOPE = "kedge/"
"""The beginning of the scopes of servers with a page; see ``serve.database_scope``."""
_ACCOUNT_HASH = re.compile(r"/[0-9a-f]{16}\Z")
_LOCAL_HOST = re.compile(r"(localhost|127\.[\d.]+|\[?::1\]?)(:\d+)?(/|\Z)")
UNDO_STEP = 16
"""The number of nodes before the head that are read first to find the target of an undo."""
_FOLLOW_UP_KINDS = frozenset({"answered", "results", "failed", "compacted"})
"""Kinds of nodes that follow from a question, and are undone with it."""


Position = int | str | Node | Block
"""A position of a conversation: a node or its number, the id of a response, or a block or its id."""


class ResumePoint(msgspec.Struct, frozen=True):
    """The newest node below a question, and whether it is the final answer."""

    node: Node
    done: bool


async def find_position(
    store: Store, row: ConversationRow, blocks: Sequence[Block], at: Position
) -> tuple[Node, int]:
    """Return the node of a position, and the number of its blocks to use.

    A block is one of ``blocks``, the blocks at the head, and is found by its id.

    Raises:
        NotInStore: The conversation has no such node, response or block.
    """
    if isinstance(at, int | Node):
        node = await store.find_node(row, get_node_number(row, at))
        return node, node.length
    if not isinstance(at, str | Block):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(f"a position is a node, a block or an id, not {describe_type(at)}")
    block_id = at if isinstance(at, str) else at.id
    block_ids = [block.id for block in blocks]
    if block_id in block_ids:
        length = block_ids.index(block_id) + 1
        return _find_block_node(await store.path(row), length), length
    if isinstance(at, str):
        node = await store.find_node(row, at)
        return node, node.length
    raise NotInStore(f"there is no block {block_id!r} at the head of this conversation")


def _find_block_node(path: Sequence[Node], length: int) -> Node:
    """Return the first node of a path with the first blocks of its end, none of which a later node removes."""
    last_removal = max((node.depth for node in path if node.kept < length), default=-1)
    return next(node for node in path if node.length >= length and node.depth >= last_removal)


def get_node_number(row: ConversationRow, node: int | Node) -> int:
    """Return the number of a node.

    Raises:
        NotInStore: It is a node of another tree.
    """
    if isinstance(node, int):
        return node
    if not isinstance(node, Node):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(f"a node or its number is needed, not {describe_type(node)}")
    if node.tree != row.tree:
        raise NotInStore(f"node {node.id} belongs to another conversation, not to {row.id!r}")
    return node.id


def find_last_question(path: Sequence[Node]) -> Node | None:
    """Return the last question of a path, if only its answers and tool results come after it."""
    for node in reversed(path):
        if node.kind == "asked":
            return node
        if node.kind not in _FOLLOW_UP_KINDS:
            return None
    return None


def truncate_to_question(turn: Turn) -> Turn:
    """Return the Turn up to the last user block."""
    for length in range(len(turn), 0, -1):
        if isinstance(turn.blocks[length - 1], UserBlock):
            return turn.take(length)
    raise NotInStore("this conversation has no question yet; send one first")


async def find_undo_target(store: Store, row: ConversationRow, head: int) -> Node:
    """Return the node before the last question or change."""
    limit = UNDO_STEP
    while True:
        path = await store.path(row, head, limit=limit)
        index = len(path) - 1
        while index and path[index].kind in _FOLLOW_UP_KINDS:
            index -= 1
        if index:
            return path[index - 1]
        if not path[0].parent:
            raise NotInStore("there is nothing to undo")
        limit *= UNDO_STEP


async def find_redo_target(store: Store, row: ConversationRow, head: int) -> Node:
    """Return the end of the newest step below the head: a question with its answer, or a change."""
    for step in reversed(await _find_continuations(store, row, head)):
        end = step
        while following := [
            node
            for node in await _find_continuations(store, row, end.id)
            if node.kind in _FOLLOW_UP_KINDS
        ]:
            end = following[-1]
        if end.kind != "asked":  # a question without an answer is continued by resume
            return end
    raise NotInStore("there is nothing to redo")


async def _find_continuations(store: Store, row: ConversationRow, node: int) -> list[Node]:
    """Return the nodes that the conversation itself added after a node, except failed ones."""
    return [
        each
        for each in await store.children(row, node)
        if each.conversation == row.number and each.kind != "failed"
    ]


async def find_resume_point(
    store: Store, row: ConversationRow, question: int | None
) -> ResumePoint:
    """Return where to continue with a question; by default the newest unanswered one at the head."""
    if question is None:
        question = _find_pending_question(await store.pending(row), row.head)
    newest = await store.newest_below(row, question)
    if newest.kind != "answered":
        return ResumePoint(newest, done=False)
    loaded = await store.load(row, newest.id)
    return ResumePoint(newest, done=not find_problems(loaded.turn()))


def _find_pending_question(pending: Sequence[Node], head: int) -> int:
    """Return the newest question at the head that has no answer."""
    questions_at_head = [node.id for node in pending if head in (node.id, node.parent)]
    if questions_at_head:
        return questions_at_head[-1]
    problem = "there is no unanswered question at the head of this conversation"
    if pending:
        numbers = ", ".join(str(node.id) for node in pending)
        problem = f"{problem}; unanswered elsewhere in its tree: nodes {numbers}"
    raise NotInStore(problem)


@checked
def with_stored_anchors(
    store: Store | StoreAddress, get_retention: Callable[[], float | None] = lambda: None
) -> Callable[[Engine], StackLayer]:
    """Find anchors by content, in the index of a store.

    Args:
        store: The store whose responses may be continued, or its address; then it is closed with the engine.
        get_retention: Returns the seconds for which the provider is assumed to store a response.

    Returns:
        A middleware; it must be next to the engine.
    """
    return lambda engine: _StoredAnchors(engine, store, get_retention)


class _StoredAnchors(StackLayer):
    def __init__(
        self, inner: Engine, store: Store | StoreAddress, get_retention: Callable[[], float | None]
    ) -> None:
        super().__init__(inner)
        self._shared_store = share_store(store)
        self.store = self._shared_store.resource
        self.get_retention = get_retention
        self.scope = getattr(unwrap(inner), "scope", "")

    async def prepare(self, turn: Turn, request: Request) -> Request:
        """Return the request with anchors from the index among its candidates."""
        if request.before_send is not None:
            await request.before_send(turn)
        anchors = await find_anchors(self.store, turn, self.scope, self.get_retention())
        candidates = (*request.candidates, *anchors)
        return structs.replace(request, candidates=candidates, before_send=None)

    async def aclose(self) -> None:
        """Close the inner engine, and a store that was opened by its address."""
        await super().aclose()
        await self._shared_store.aclose()


@checked
async def find_anchors(
    store: Store | StoreAddress, turn: Turn, scope: str, retention: float | None = None
) -> list[AnchorRecord]:
    """Search the index of a store for responses that contain a prefix of this Turn.

    The index is not searched while a record of the Turn itself is valid: nearly always it is the
    longest, and missing a longer one only makes the request longer.

    Args:
        store: The store to search, or its address.
        turn: The Turn to send.
        scope: The provider, endpoint and account whose responses may be used.
        retention: Seconds for which the provider is assumed to store a response.

    Returns:
        The records of the longest prefixes found.
    """
    if not needs_lookup(turn, scope):
        return []
    digests = list(iter_prefix_digests(get_prefix_index(turn)))
    async with use_store(store) as opened:
        return await opened.find_anchors(scope, digests, retention=retention)


def needs_lookup(turn: Turn, scope: str) -> bool:
    """Return whether the index of a store is searched for a Turn: no record of the Turn itself is valid."""
    index = get_prefix_index(turn)
    return bool(scope) and not any(
        record.scope == scope and record.status == "completed" and matches_prefix(record, index)
        for record in reversed(get_state(turn).anchors)
    )


async def add_candidates(
    engine: Engine,
    store: Store,
    turn: Turn,
    options: Mapping[str, Any],
    retention: float | None = None,
) -> dict[str, Any]:
    """Return the options of a request with anchors from the index among its candidates, for a plan.

    Args:
        engine: The engine, with its middleware.
        store: The store whose responses may be continued.
        turn: The Turn to send.
        options: The options of ``Request.of``.
        retention: Seconds for which the provider is assumed to store a response.
    """
    planned_turn = engine.plan(turn, **options).source  # as changed by middleware
    scope = getattr(unwrap(engine), "scope", "")
    anchors: list[AnchorRecord] = []
    if isinstance(planned_turn, Turn):
        anchors = await find_anchors(store, planned_turn, scope, retention)
    return {**options, "candidates": (*options.get("candidates", ()), *anchors)}


def find_recorded_model(row: ConversationRow, response: RequestRecord | None) -> str:
    """Return the model string that a conversation was last used with; empty if none is recorded.

    The command line, the page, the API and MCP all continue a conversation with this model, unless the user
    names another one. A model string with an address must be confirmed before it is used, because
    the store may contain imported conversations.

    Args:
        row: The conversation; its data may contain the model string.
        response: The newest response on the path to continue, if there is one.

    Returns:
        A model string. For a model of ``kedge serve`` with another name than ``practice`` it begins with
        ``kedge:``, which only that server can use.
    """
    model = row.data.get(MODEL_KEY)
    if not isinstance(model, str):
        model = ""
    if response is None:
        return model
    if response.scope.startswith(SERVER_SCOPE):
        if response.model == "practice":
            return "practice"
        return f"kedge:{response.model}"
    if response.provider in (model.partition(":")[0], "practice"):
        return model or response.provider
    return name_model(response.provider, response.scope, response.model)


def name_model(provider: str, scope: str, model: str) -> str:
    """Return the model string for a model at the address in a scope, which has no scheme."""
    if provider not in ADDRESS_PROVIDERS:
        return f"{provider}:{model}"
    address = base_scope(scope).removeprefix(f"{provider}/").replace("%20", " ")
    address = _ACCOUNT_HASH.sub("", address)
    scheme = "http" if _LOCAL_HOST.match(address) else "https"
    return f"{provider}:{scheme}://{address}#{model}"
