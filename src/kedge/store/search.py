"""Full-text search over blocks.

The index has the words of each block under the block's number. Searches update it, so storing a block
costs nothing extra. The conversations of a matching block are looked up in the tree when it is found,
because conversations share blocks, and are created and deleted.

The index finds the blocks that have the terms of a query. `search_query` evaluates phrases, excluded words and
ranks on the text of those blocks, so that both databases agree.

SQLite overwrites deleted terms only when it rewrites a full-text table, so there is one table for each group
of consecutive blocks: a deletion rewrites only the groups that it changes. The
table ``texts`` has the numbers of all indexed blocks. On PostgreSQL it is the index itself.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from kedge._internal.arguments import check_choice, check_times
from kedge.errors import StoreError
from kedge.store.database.transactions import Database, Tx, join_filters
from kedge.store.nodes import find_used_nodes, select_tree
from kedge.store.records import Hit, validate_page
from kedge.store.search_query import (
    TEXT_INDEXES,
    Query,
    TextIndex,
    build_excerpt,
    fold_text,
    index_terms,
    to_token_text,
)
from kedge.store.stored_blocks import decode_blocks, extract_search_text

SearchRole = Literal["user", "assistant", "system", "reasoning", "tool_call", "tool_result"]
"""A kind of blocks whose text is searched."""
BATCH_SIZE = 1_000
"""The number of nodes that are indexed in one transaction."""
PAGE_SIZE = 500
"""The number of matching blocks that are read at once."""
OVERLAP = 1_000
"""The number of nodes that are indexed again, because nodes may be committed out of order."""
MAX_RANKED = 5_000
"""The number of the newest matching blocks that are ranked."""

_UNINDEXED = """
FROM nodes n JOIN links l ON l.branch = n.branch AND l.place >= n.kept AND l.place < n.length
JOIN blocks b ON b.id = l.block LEFT JOIN texts t ON t.rowid = b.id
WHERE t.rowid IS NULL AND n.id > ? AND n.id <= ?
"""
# The node that added a linked block is the last one of the branch that starts at or before it.
_SELECT_NODES = """
SELECT found.block, n.tree, found.place, n.id, n.created_at FROM (
    SELECT l.block, l.place, (
        SELECT n.id FROM nodes n WHERE n.tree = f.tree AND n.branch = l.branch AND n.kept <= l.place
        ORDER BY n.kept DESC, n.id DESC LIMIT 1
    ) AS node FROM links l JOIN nodes f ON f.id = l.branch WHERE l.block IN ({{}})
) AS found JOIN nodes n ON n.id = found.node WHERE {} ORDER BY n.id
"""
_SELECT_OWN = """
SELECT DISTINCT l.block FROM links l JOIN nodes f ON f.id = l.branch
JOIN conversations c ON c.tree = f.tree WHERE l.block IN ({}) AND c.namespace = ?
"""
_SELECT_CONVERSATIONS = """
SELECT c.id, c.number, c.head,
    EXISTS (SELECT 1 FROM tags t WHERE t.conversation = c.number AND t.tag = ?) AS is_tagged
FROM conversations c WHERE c.tree = ? AND c.namespace = ? AND c.delete_at IS NULL ORDER BY c.number
"""
_NEWEST_TEXT = "SELECT MAX(rowid) FROM texts WHERE rowid < ?"
_GROUP_TABLE = re.compile(r"texts_(\d+)")


class SearchOptions(Struct, frozen=True):
    """The filters, order and limits of a search; see `Store.search`."""

    limit: int = 20
    offset: int = 0
    role: str | None = None
    tag: str | None = None
    since: float | None = None
    until: float | None = None
    order: "SearchOrder" = "newest"

    def __post_init__(self) -> None:
        check_choice("order", self.order, get_args(SearchOrder))
        if self.role is not None:
            check_choice("role", self.role, get_args(SearchRole))
        validate_page(self.limit, self.offset)
        check_times(since=self.since, until=self.until)


SearchOrder = Literal["newest", "rank"]


async def update_index(database: Database) -> bool:
    """Index the blocks that are not indexed yet; return whether the index is complete then."""
    after = await database.read(get_index_position)
    try:
        while after is not None:
            after = await database.write(lambda tx, after=after: index_batch(tx, after))
    except StoreError:  # such as a full disk: blocks that are not indexed are read one by one
        return False
    return True


def index_batch(tx: Tx, after: int) -> int | None:
    """Index the blocks of the next nodes; return the last node, or ``None`` when all are indexed."""
    newest = _newest_node(tx)
    upto = min(after + BATCH_SIZE, newest)
    rows = tx.rows(f"SELECT DISTINCT b.id, b.body {_UNINDEXED}", (after, upto))
    # A deletion, which must find the text of a block in the index, waits.
    locked = lock_blocks(tx, [block for block, _ in rows], tx.dialect.for_key_share)
    insert_texts(
        tx,
        {b: " ".join(index_terms(_fold_body(body))) for b, body in rows if b in locked},
    )
    tx.run("UPDATE indexed SET node = ?", (upto,))
    if upto >= newest:
        return None
    return upto


def lock_blocks(tx: Tx, blocks: Sequence[int], lock: str) -> set[int]:
    """Return the blocks that still exist, locked in one of the ways of the dialect."""
    if not lock:
        return set(blocks)
    query = f"SELECT id FROM blocks WHERE id IN ({{}}) ORDER BY id {lock}"
    return {block for (block,) in tx.rows_among(query, sorted(blocks))}


def insert_texts(tx: Tx, terms: Mapping[int, str]) -> None:
    """Add blocks to the index, by number, with their terms separated by spaces."""
    index = _get_index(tx)
    for group, blocks in _split_groups(tx, terms).items():
        if index.create:
            tx.run(index.create.format(group))
            tx.run_many("INSERT INTO texts (rowid) VALUES (?)", [(block,) for block in blocks])
        tx.run_many(index.insert.format(group), [(each, terms[each]) for each in blocks])


def delete_texts(tx: Tx, blocks: Sequence[int]) -> set[int]:
    """Delete blocks from the index; return their groups, which must be rewritten."""
    indexed = tx.rows_among("SELECT rowid FROM texts WHERE rowid IN ({})", blocks)
    groups = _split_groups(tx, [block for (block,) in indexed])
    for group, members in groups.items():
        for table in {"texts", _get_index(tx).table.format(group)}:
            tx.delete_rows(table, "rowid", members)
    return set(groups)


def list_groups(tx: Tx) -> set[int]:
    """Return the groups of the index that have a separate table."""
    matches = (_GROUP_TABLE.fullmatch(name) for (name,) in tx.rows(tx.dialect.list_tables))
    return {int(match[1]) for match in matches if match}


def rewrite_group(tx: Tx, group: int) -> None:
    """Overwrite deleted data in a group of the index, or drop its table if it is empty."""
    if group not in list_groups(tx):  # another process was faster, or one table has all groups
        return
    index = _get_index(tx)
    start = group * index.texts_per_group
    span = (start, start + index.texts_per_group)
    if tx.rows("SELECT 1 FROM texts WHERE rowid >= ? AND rowid < ? LIMIT 1", span):
        tx.run(index.rewrite.format(group))
    else:
        tx.run(f"DROP TABLE {index.table.format(group)}")


def _split_groups(tx: Tx, blocks: Iterable[int]) -> dict[int, list[int]]:
    size = _get_index(tx).texts_per_group
    groups: dict[int, list[int]] = {}
    for block in blocks:
        groups.setdefault(block // size, []).append(block)
    return groups


def _get_index(tx: Tx) -> TextIndex:
    return TEXT_INDEXES[tx.dialect.name]


def _newest_node(tx: Tx) -> int:
    ((newest,),) = tx.rows("SELECT MAX(id) FROM nodes")
    return newest or 0


def get_index_position(tx: Tx) -> int:
    """Return the node after which indexing continues."""
    ((position,),) = tx.rows("SELECT node FROM indexed")
    return max(0, position - OVERLAP)


def find_unindexed(tx: Tx, upto: int) -> list[int]:
    """Return the blocks of nodes up to this one that are missing in the index."""
    return [block for (block,) in tx.rows(f"SELECT DISTINCT b.id {_UNINDEXED}", (0, upto))]


class _Use(NamedTuple):
    """A conversation that has a block, and the first node that has it there."""

    conversation: str
    node: int
    created_at: float


def find_blocks(
    tx: Tx, text: str, options: SearchOptions, *, index_is_complete: bool = True
) -> list[Hit]:
    """Return the blocks that match a query, once for each of their conversations.

    If the index could not be updated, the blocks that are missing in it are read instead.
    """
    query = Query.parse(text)
    if not query.alternatives:
        return []
    pages = _iter_pages(tx, query)
    if not index_is_complete:
        pages = iter([_scan_unindexed(tx, query), *pages])
    last = options.offset + options.limit
    if options.order == "rank":
        matches = _rank_matches(tx, query, options, pages)
    else:
        matches = _find_newest(tx, query, options, pages, last)
    return [_build_hit(query, match) for match in matches[options.offset : last]]


class _Match(NamedTuple):
    """A block that matches a query, in one of its conversations."""

    score: float
    body: str
    use: "_Use"


def _find_newest(
    tx: Tx, query: Query, options: SearchOptions, pages: "Iterator[_Page]", count: int
) -> list[_Match]:
    """Return at least a number of the newest matches, or all of them."""
    conversations = _Conversations(tx, options)
    matches: list[_Match] = []
    for page in pages:
        scores: dict[int, float] = {}
        for block, body in _select_role(page, options.role):
            # The index alone decides if a text has a word, but not if it has a phrase.
            if not query.needs_text or query.matches(to_token_text(_fold_body(body))):
                scores[block] = 1.0
        matches += conversations.match(page, scores)
        if len(matches) >= count:
            break
    return matches


def _rank_matches(
    tx: Tx, query: Query, options: SearchOptions, pages: "Iterator[_Page]"
) -> list[_Match]:
    """Return the matches among the newest blocks with the terms of a query, the best ones first."""
    conversations = _Conversations(tx, options)
    matches: list[_Match] = []
    scanned = 0
    for page in pages:
        own_page = _select_own(tx, page)
        scanned += len(own_page)
        scores: dict[int, float] = {}
        for block, body in _select_role(own_page, options.role):
            score = query.score(to_token_text(_fold_body(body)))
            if score:
                scores[block] = score
        matches += conversations.match(own_page, scores)
        if scanned >= MAX_RANKED:
            break
    return sorted(matches, key=lambda match: -match.score)


def _select_role(page: "_Page", role: str | None) -> "_Page":
    """Return the blocks of a kind, or all blocks for None."""
    if role is None:
        return page
    return [(block, body) for block, body in page if decode_blocks([body])[0].kind == role]


_Page = list[tuple[int, str]]
"""The numbers and encoded forms of blocks."""


def _select_own(tx: Tx, page: _Page) -> _Page:
    """Return the blocks of the transaction's namespace; only these count toward the ranked ones."""
    rows = tx.rows_among(_SELECT_OWN, [block for block, _ in page], tx.namespace)
    namespace_blocks = {block for (block,) in rows}
    return [row for row in page if row[0] in namespace_blocks]


def _fold_body(body: str) -> str:
    return fold_text(extract_search_text(body))


def _iter_pages(tx: Tx, query: Query) -> Iterator[_Page]:
    """Yield the blocks that have all terms of an alternative, newest first."""
    index = _get_index(tx)
    terms = query.index_expression(index)
    before = 1 << 62
    while (newest := tx.rows(_NEWEST_TEXT, (before,))[0][0]) is not None:
        group = newest // index.texts_per_group
        table = index.table.format(group)
        page = tx.rows(
            f"SELECT b.id, b.body FROM {table} t JOIN blocks b ON b.id = t.rowid "
            f"WHERE {index.match.format(group)} AND t.rowid < ? ORDER BY t.rowid DESC LIMIT ?",
            (terms, before, PAGE_SIZE),
        )
        yield [(block, body) for block, body in page]
        if len(page) < PAGE_SIZE:  # the group has no more
            before = group * index.texts_per_group
        else:
            before, _ = page[-1]


def _scan_unindexed(tx: Tx, query: Query) -> _Page:
    """Return the blocks that are missing in the index and match a query."""
    span = (get_index_position(tx), _newest_node(tx))
    rows = tx.rows(f"SELECT DISTINCT b.id, b.body {_UNINDEXED} ORDER BY b.id DESC", span)
    return [(block, body) for block, body in rows if query.matches(to_token_text(_fold_body(body)))]


_Tree = list[tuple[str, dict[int, int] | None]]


class _Conversations:
    """Finds the conversations that blocks belong to, reading every tree once."""

    def __init__(self, tx: Tx, options: SearchOptions) -> None:
        self._tx = tx
        self._options = options
        self._trees: dict[int, _Tree] = {}

    def match(self, page: _Page, scores: Mapping[int, float]) -> list[_Match]:
        """Return a match for each conversation of the blocks that have a score."""
        uses = self._find_uses([block for block, _ in page if block in scores])
        return [
            _Match(scores[block], body, use)
            for block, body in page
            for use in uses.get(block, {}).values()
        ]

    def _find_uses(self, blocks: Sequence[int]) -> dict[int, dict[str, _Use]]:
        """Return the conversations of each block by id, with the first node that has it."""
        uses: dict[int, dict[str, _Use]] = {}
        options = self._options
        times = {"n.created_at >= ?": options.since, "n.created_at < ?": options.until}
        where, values = join_filters("1 = 1", times)
        rows = self._tx.rows_among(_SELECT_NODES.format(where), blocks, *values)
        for block, tree, position, node, created_at in rows:
            for name, used in self._load_tree(tree):
                if used is None or used.get(node, 0) > position:
                    use = _Use(name, node, created_at)
                    uses.setdefault(block, {}).setdefault(name, use)
        return uses

    def _load_tree(self, tree: int) -> _Tree:
        """Return the conversations of a tree with the nodes they use; None if one uses all nodes."""
        if tree in self._trees:
            return self._trees[tree]
        tag = self._options.tag
        rows = self._tx.rows(_SELECT_CONVERSATIONS, (tag or "", tree, self._tx.namespace))
        selected = [row[:3] for row in rows if tag is None or row[3]]
        conversations: _Tree = []
        if len(rows) <= 1:
            conversations = [(name, None) for name, _, _ in selected]
        else:
            nodes = select_tree(self._tx, tree)
            added: dict[int, list[int]] = {}
            for node in nodes:
                added.setdefault(node.conversation, []).append(node.id)
            for name, number, head in selected:
                ends = [*added.get(number, ()), head]
                conversations.append((name, find_used_nodes(nodes, ends)))
        self._trees[tree] = conversations
        return conversations


def _build_hit(query: Query, match: _Match) -> Hit:
    (block,) = decode_blocks([match.body])
    return Hit(
        match.use.conversation,
        match.use.node,
        block.id,
        block.kind,
        excerpt=build_excerpt(extract_search_text(match.body), query),
        created_at=match.use.created_at,
        score=match.score,
    )
