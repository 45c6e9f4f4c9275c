"""List conversations with their totals, in a few queries.

One query selects, sorts and limits a page of conversations; totals are read for that page only, so that
lists stay fast at ten thousand conversations.
"""

import re
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from kedge._internal.arguments import check_times
from kedge.planning.anchors import limit_expiry, relied_until
from kedge.store.conversations import HAS_TAG, select_conversations
from kedge.store.database.transactions import Tx, join_filters, marks
from kedge.store.node_paths import find_unanswered, load_bodies
from kedge.store.nodes import get_node, select_question_previews
from kedge.store.records import (
    FAILED_SQL,
    ConversationRow,
    StoredExchange,
    has_failed,
    validate_page,
)
from kedge.store.response_sums import ALL_DAYS
from kedge.store.responses import select_node_exchanges
from kedge.store.store import Store
from kedge.store.stored_blocks import (
    PREVIEW_CHARS,
    decode_blocks,
    hash_block_id,
    preview_body,
)
from kedge.turns import AssistantBlock, Block, UserBlock

ListFilter = Literal["active", "branched", "failed", "archived", "all"]
ListOrder = Literal["newest", "oldest", "responses", "tokens", "cost", "title"]
LIST_FILTERS: tuple[ListFilter, ...] = get_args(ListFilter)
LIST_ORDERS: tuple[ListOrder, ...] = get_args(ListOrder)
FIRST_BLOCKS = 4
"""The number of blocks that are read for the first question."""
LAST_BLOCKS = 4
"""The number of blocks that are read for the last answer."""

_CONDITIONS: dict[ListFilter, str] = {
    "active": "c.archived = 0",
    "branched": "c.archived = 0 AND c.tree IN (SELECT tree FROM nodes WHERE kind <> 'failed' "
    "AND tree IN (SELECT tree FROM nodes WHERE parent > 0 AND (branch = id OR kept = length)) "
    "GROUP BY tree, parent HAVING COUNT(*) > 1)",
    "failed": "c.archived = 0 AND c.number IN (SELECT conversation FROM responses "
    f"WHERE {FAILED_SQL})",
    "archived": "c.archived = 1",
    "all": "1 = 1",
}
_STARTED = (
    "(c.title <> '' OR (SELECT length FROM nodes WHERE id = c.head) > 0 "
    "OR EXISTS (SELECT 1 FROM nodes n WHERE n.tree = c.tree AND n.parent = c.head))"
)
_SUMS_JOIN = (
    "LEFT JOIN (SELECT conversation, SUM({0}) AS much FROM ("
    f"SELECT conversation, {{0}} FROM conversation_sums WHERE namespace = ? AND day = {ALL_DAYS} "
    "UNION ALL SELECT conversation, {1} FROM responses WHERE node > (SELECT node FROM summed)"
    ") AS parts GROUP BY conversation) sums ON sums.conversation = c.number"
)
_BY_SUM = "COALESCE(sums.much, 0) DESC, c.number DESC"
_TOKENS = "COALESCE(input_tokens, 0) + COALESCE(output_tokens, 0)"
_SORTS: dict[ListOrder, tuple[str, str]] = {
    "newest": ("", "c.updated_at DESC, c.number DESC"),
    "oldest": ("", "c.updated_at, c.number"),
    "title": ("", "CASE WHEN c.title = '' THEN 1 ELSE 0 END, c.title, c.number"),
    "responses": (_SUMS_JOIN.format("responses", "1"), _BY_SUM),
    "tokens": (_SUMS_JOIN.format("tokens", _TOKENS), _BY_SUM),
    "cost": (_SUMS_JOIN.format("cost", "COALESCE(cost, 0.0)"), _BY_SUM),
}
_HAS_MODEL = (
    "(EXISTS (SELECT 1 FROM conversation_sums s WHERE s.namespace = c.namespace "
    f"AND s.day = {ALL_DAYS} AND s.conversation = c.number AND s.model = ?) "
    "OR c.number IN (SELECT conversation FROM responses WHERE model = ? "
    "AND node > (SELECT node FROM summed)))"
)
_OWN_ROWS = "conversation IN (SELECT number FROM conversations WHERE namespace = ?)"
"""The condition for rows of the transaction's namespace."""


class ConversationSummary(Struct, frozen=True):
    """A conversation and its totals."""

    row: ConversationRow
    first_words: str = ""
    last_answer: str = ""
    responses: int = 0
    failed: int = 0
    lost: int = 0
    forks: int = 0
    """The number of conversations that were forked from it."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    median_seconds: float | None = None
    """The median duration of its responses."""
    expires_at: float | None = None
    """When the provider deletes the last of the responses."""
    relied_until: float | None = None
    """Until when a response can be continued; see `planning.anchors.relied_until`."""
    model: str = ""
    unanswered: str = ""
    """The status of the newest question at the head, if it has no answer: pending, failed or cancelled."""


async def list_summaries(
    store: Store,
    *,
    show: ListFilter = "active",
    order: ListOrder = "newest",
    ids: Sequence[str] | None = None,
    tag: str | None = None,
    model: str | None = None,
    started: bool = False,
    since: float | None = None,
    until: float | None = None,
    scheduled: bool = False,
    limit: int = 50,
    offset: int = 0,
) -> tuple[list[ConversationSummary], int]:
    """Return a page of conversations, and the total number of matches.

    Args:
        store: The store.
        show: Which conversations to list.
        order: Their order.
        ids: List only these.
        tag: List only conversations with this tag.
        model: List only conversations with an answer of this model.
        started: Whether to omit conversations without a title and without a message.
        since: List only conversations that changed last at or after this time.
        until: List only conversations that changed last before this time.
        scheduled: Whether to include conversations that are about to be deleted.
        limit: The maximum number of conversations.
        offset: The number of conversations to skip.

    Raises:
        InvalidSetting: The limit or the offset is negative, or a time is not finite.
    """
    validate_page(limit, offset)
    check_times(since=since, until=until)
    conditions = [_CONDITIONS[show], "c.namespace = ?"]
    if started:
        conditions.append(_STARTED)
    if not scheduled:
        conditions.append("c.delete_at IS NULL")
    if ids is not None:
        conditions.append(f"c.id IN ({marks(ids) or 'NULL'})")
    filters: dict[str, Any] = {
        _HAS_MODEL: model,
        HAS_TAG: tag,
        "c.updated_at >= ?": since,
        "c.updated_at < ?": until,
    }
    where, values = join_filters(" AND ".join(conditions), filters)
    return await store.read(
        _select_page, where, [*(ids or ()), *values], order, limit=limit, offset=offset
    )


def _select_page(
    tx: Tx, where: str, values: Sequence[Any], order: ListOrder, *, limit: int, offset: int
) -> tuple[list[ConversationSummary], int]:
    """Return a page of the conversations that meet a condition, whose first placeholder is the namespace."""
    values = (tx.namespace, *values)
    ((total,),) = tx.rows(f"SELECT COUNT(*) FROM conversations c WHERE {where}", values)
    join, sort = _SORTS[order]
    page = f"{join} WHERE {where} ORDER BY {sort} LIMIT ? OFFSET ?"
    page_values = [*values, limit, offset]
    if join:
        page_values.insert(0, tx.namespace)
    rows = select_conversations(tx, page, page_values)
    return _build_summaries(tx, rows), total


async def list_labels(store: Store) -> tuple[list[str], list[str]]:
    """Return the tags and the models of a store's conversations, for filters."""
    return await store.read(_select_labels)


def _select_labels(tx: Tx) -> tuple[list[str], list[str]]:
    tags = tx.rows(
        f"SELECT tag FROM tags WHERE {_OWN_ROWS} GROUP BY tag ORDER BY COUNT(*) DESC, tag LIMIT 200",
        (tx.namespace,),
    )
    models = tx.rows(
        "SELECT model FROM response_sums WHERE model <> '' AND namespace = ? UNION "
        "SELECT model FROM responses WHERE model <> '' AND node > (SELECT node FROM summed) "
        f"AND {_OWN_ROWS} ORDER BY model LIMIT 200",
        (tx.namespace, tx.namespace),
    )
    return [tag for (tag,) in tags], [model for (model,) in models]


async def find_by_title(store: Store, text: str, limit: int) -> list[str]:
    """Return the ids of conversations whose title contains this text."""
    return await store.read(_select_titled, text, limit)


def _select_titled(tx: Tx, text: str, limit: int) -> list[str]:
    query = (
        "SELECT c.id FROM conversations c WHERE c.namespace = ? "
        "AND LOWER(c.title) LIKE ? ESCAPE '!' LIMIT ?"
    )
    return [name for (name,) in tx.rows(query, (tx.namespace, _contains(text.lower()), limit))]


def _contains(text: str) -> str:
    """Return the pattern of LIKE, with the escape character ``!``, for values that contain a text."""
    escaped = re.sub(r"([!%_])", r"!\1", text)
    return f"%{escaped}%"


async def load_exchanges(store: Store, node: int) -> list[StoredExchange]:
    """Return the stored requests and replies for a node, in order."""
    return await store.read(select_node_exchanges, node)


async def load_attached(store: Store, conversation: ConversationRow, block_id: str) -> list[Block]:
    """Return the blocks of a tree that have this id; after an edit there can be several."""
    return await store.read_in(conversation, _select_attached, block_id)


def _select_attached(tx: Tx, conversation: ConversationRow, block_id: str) -> list[Block]:
    query = (
        "SELECT DISTINCT b.id, b.body FROM blocks b JOIN links l ON l.block = b.id "
        "JOIN nodes n ON n.id = l.branch WHERE b.id_hash = ? AND n.tree = ? ORDER BY b.id"
    )
    rows = tx.rows(query, (hash_block_id(block_id), conversation.tree))
    return [block for block in decode_blocks([body for _, body in rows]) if block.id == block_id]


async def get_revision(store: Store) -> tuple[int, int]:
    """Return two numbers that change with every new response or incident."""
    return await store.read(_select_revision)


def _select_revision(tx: Tx) -> tuple[int, int]:
    query = f"SELECT COALESCE(MAX({{}}), 0) FROM {{}} WHERE {_OWN_ROWS}"
    ((newest,),) = tx.rows(query.format("node", "responses"), (tx.namespace,))
    ((incident,),) = tx.rows(query.format("id", "incidents"), (tx.namespace,))
    return newest, incident


class _Response(NamedTuple):
    """What a summary needs of a response."""

    status: str
    is_resent: int
    stored: int
    model: str
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    cost: float | None
    seconds: float
    created_at: float
    expires_at: float | None
    root_created_at: float

    @property
    def is_usable(self) -> bool:
        """Whether the provider has it, as far as is known."""
        return self.status == "completed" and bool(self.stored)


def _build_summaries(tx: Tx, rows: Sequence[ConversationRow]) -> list[ConversationSummary]:
    numbers = [row.number for row in rows]
    responses: dict[int, list[_Response]] = {}
    for number, *values in tx.rows_among(_SELECT_RESPONSES, numbers):
        responses.setdefault(number, []).append(_Response(*values))
    forks = dict(tx.rows_among(_SELECT_FORKS, numbers))
    return [
        _build_summary(tx, row, responses.get(row.number, []), forks.get(row.number, 0))
        for row in rows
    ]


# The responses of some conversations, which are found by the index on the nodes of their trees.
_SELECT_RESPONSES = (
    f"SELECT r.conversation, {', '.join(f'r.{name}' for name in _Response.__annotations__)} "
    "FROM conversations c JOIN nodes n ON n.tree = c.tree JOIN responses r ON r.node = n.id "
    "WHERE c.number IN ({}) AND r.conversation = c.number"
)
_SELECT_FORKS = (
    "SELECT c.number, COUNT(*) FROM conversations c JOIN conversations f ON f.tree = c.tree "
    "AND f.namespace = c.namespace AND f.forked_from = c.id WHERE c.number IN ({}) GROUP BY c.number"
)


def _build_summary(
    tx: Tx, row: ConversationRow, responses: Sequence[_Response], forks: int
) -> ConversationSummary:
    head = get_node(tx, row)
    unanswered = find_unanswered(tx, row, head)
    first_bodies = load_bodies(tx, head, 0, FIRST_BLOCKS, PREVIEW_CHARS)
    last_bodies = load_bodies(tx, head, head.length - LAST_BLOCKS, head.length, PREVIEW_CHARS)
    costs = [response.cost for response in responses if response.cost is not None]
    ends = [
        response.expires_at
        for response in responses
        if response.is_usable and response.expires_at is not None
    ]
    return ConversationSummary(
        row,
        first_words=_first_preview(first_bodies, UserBlock) or _read_first_question(tx, row),
        last_answer=_first_preview(last_bodies[::-1], AssistantBlock),
        responses=len(responses),
        failed=sum(
            has_failed(response.status, is_resent=bool(response.is_resent))
            for response in responses
        ),
        lost=sum(response.status == "lost" for response in responses),
        forks=int(forks),
        input_tokens=sum(response.input_tokens or 0 for response in responses),
        cached_tokens=sum(response.cached_tokens or 0 for response in responses),
        output_tokens=sum(response.output_tokens or 0 for response in responses),
        cost=sum(costs) if costs else None,
        median_seconds=median(response.seconds for response in responses) if responses else None,
        expires_at=max(ends, default=None),
        relied_until=_compute_relied_until(row, responses),
        model=max((response.model for response in responses), default=""),
        unanswered=unanswered[-1].status if unanswered else "",
    )


def _read_first_question(tx: Tx, row: ConversationRow) -> str:
    """Return the beginning of the first question of a conversation, which may have no answer."""
    bodies = select_question_previews(tx, row.tree, conversation=row.number, limit=1)
    return _first_preview(list(bodies.values()), UserBlock)


def _compute_relied_until(row: ConversationRow, responses: Sequence[_Response]) -> float | None:
    """Return the time until which the last of the completed responses is relied on."""
    ends = [
        relied_until(
            response.created_at,
            limit_expiry(response.created_at, response.expires_at, row.retention),
            response.root_created_at,
        )
        for response in responses
        if response.is_usable
    ]
    return max((end for end in ends if end is not None), default=None)


def _first_preview(bodies: Sequence[str], kind: type[Block]) -> str:
    texts = (preview_body(body, kind) for body in bodies)
    return next((text for text in texts if text is not None), "")
