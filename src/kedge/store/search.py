"""Full-text search over blocks.

The index has the words of each block under the block's number. Searches update it, so storing a block
costs nothing extra. The conversations of a matching block are looked up in the tree when it is found,
because conversations share blocks, and are created and deleted.

Text is folded and split here, not by the databases, so that both return the same results. Case and accents
are ignored. Chinese, Japanese, Korean, Thai and other scripts without spaces between words, and emoji, are
indexed by single characters and by pairs; a query in them matches contiguous text.

The index finds the blocks that have the terms of a query. Phrases, excluded words and ranks are evaluated
here, on the text of those blocks, so that both databases agree.

SQLite overwrites deleted terms only when it rewrites a full-text table, so there is one table for each group
of consecutive blocks: a deletion rewrites only the groups that it changes. The
table ``texts`` has the numbers of all indexed blocks. On PostgreSQL it is the index itself.
"""

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from kedge.errors import InvalidSetting, StoreReadOnly
from kedge.store.block_codec import decode_blocks, extract_text
from kedge.store.database import Database, Dialect, Tx, lock_links_shared, marks
from kedge.store.nodes import find_used_nodes, select_tree
from kedge.store.records import Hit, validate_page

BATCH_SIZE = 1_000
"""The number of nodes that are indexed in one transaction."""
PAGE_SIZE = 500
"""The number of matching blocks that are read at once."""
OVERLAP = 1_000
"""The number of nodes that are indexed again, because nodes may be committed out of order."""
EXCERPT_RADIUS = 60
"""The number of characters of an excerpt on each side of the match."""
MAX_RANKED = 5_000
"""The number of the newest matching blocks that are ranked."""
TYPICAL_LENGTH = 500
"""The length of a text, in characters, at which its length does not change its rank."""
MAX_WORD = 100
"""Longer words are indexed, and searched for, by their beginning."""
MAX_INDEXED_BYTES = 500_000
"""The maximum size of the distinct indexed words of one block, in bytes; PostgreSQL accepts 1 MiB."""

# Thai, Lao, Myanmar, Khmer, kana, Han and Hangul, and emoji.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
    r"\u2300-\u23ff\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
)
# Vowel signs of Indic scripts are not letters to Python, but are parts of words.
_WORD = re.compile(rf"([{_UNSPACED}]+)|(?:[^\W_{_UNSPACED}]|[\u0900-\u0963\u0966-\u0dff])+")
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}]")

_UNINDEXED = """
FROM nodes n JOIN links l ON l.branch = n.branch AND l.place >= n.kept AND l.place < n.length
JOIN blocks b ON b.id = l.block LEFT JOIN texts t ON t.rowid = b.id
WHERE t.rowid IS NULL AND n.id > ? AND n.id <= ?
"""
# The node that added a linked block is the last one of the branch that starts at or before it.
_SELECT_NODES = """
SELECT l.block, f.tree, l.place, (
    SELECT n.id FROM nodes n WHERE n.tree = f.tree AND n.branch = l.branch AND n.kept <= l.place
    ORDER BY n.kept DESC, n.id DESC LIMIT 1
) AS node FROM links l JOIN nodes f ON f.id = l.branch WHERE l.block IN ({marks}) ORDER BY node
"""

_SELECT_OWN = """
SELECT DISTINCT l.block FROM links l JOIN nodes f ON f.id = l.branch
JOIN conversations c ON c.tree = f.tree WHERE c.namespace = ? AND l.block IN ({marks})
"""
_SELECT_CONVERSATIONS = """
SELECT c.id, c.number, c.head,
    EXISTS (SELECT 1 FROM tags t WHERE t.conversation = c.number AND t.tag = ?) AS is_tagged
FROM conversations c WHERE c.tree = ? AND c.namespace = ? AND c.delete_at IS NULL ORDER BY c.number
"""
_NEWEST_TEXT = "SELECT MAX(rowid) FROM texts WHERE rowid < ?"
_GROUP_TABLE = re.compile(r"texts_(\d+)")
_QUERY_PART = re.compile(r'(?P<minus>(?<!\S)-)?(?:"(?P<phrase>[^"]*)"?|(?P<plain>[^\s"]+))')


def fold_text(text: str) -> str:
    """Return a text with case and accents folded."""
    if text.isascii():
        return text.lower()
    letters = unicodedata.normalize("NFKD", text.casefold())
    plain = (
        each for each in letters if not unicodedata.combining(each) or _UNSPACED_LETTER.match(each)
    )
    return unicodedata.normalize("NFC", "".join(plain))


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The filters, order and limits of a search; see `Store.search`."""

    limit: int = 20
    offset: int = 0
    role: str | None = None
    tag: str | None = None
    since: float | None = None
    until: float | None = None
    order: "SearchOrder" = "newest"

    def __post_init__(self) -> None:
        if self.order not in get_args(SearchOrder):
            choices = ", ".join(get_args(SearchOrder))
            raise InvalidSetting(f"order must be one of {choices}, not {self.order!r}")
        validate_page(self.limit, self.offset)


SearchOrder = Literal["newest", "rank"]


@dataclass(frozen=True, slots=True)
class Atom:
    """A word, a beginning of words, a phrase, or a piece of text in a script without spaces.

    ``pattern`` occurs in the token text of every text that has the atom; see `to_token_text`. ``terms``
    are the terms of the index that such a text has; of a prefix, the last one is the beginning of a term.
    """

    pattern: str
    terms: tuple[str, ...]
    is_prefix: bool = False

    @classmethod
    def build(cls, words: Sequence[re.Match[str]], *, is_prefix: bool = False) -> "Atom":
        """Create an atom from adjacent words."""
        first, last = words[0], words[-1]
        is_prefix = is_prefix and not last[1]
        start, end = "" if first[1] else " ", "" if last[1] or is_prefix else " "
        tokens = [_get_token(match) for match in words]
        terms: list[str] = []
        for match, token in zip(words, tokens, strict=True):
            terms += (_pairs(token) or [token]) if match[1] else [token]
        return cls(f"{start}{' '.join(tokens)}{end}", tuple(terms), is_prefix)

    @property
    def is_word(self) -> bool:
        """Whether the index alone decides if a text has it."""
        return len(self.terms) == 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """Atoms that a text must have, and atoms that it must not have."""

    required: tuple[Atom, ...]
    excluded: tuple[Atom, ...] = ()

    def matches(self, tokens: str) -> bool:
        """Return whether a token text matches."""
        has_all = all(atom.pattern in tokens for atom in self.required)
        return has_all and not any(atom.pattern in tokens for atom in self.excluded)


@dataclass(frozen=True, slots=True)
class Query:
    """The alternatives of a search, of which a text must match one."""

    alternatives: tuple[Alternative, ...]

    @classmethod
    def parse(cls, text: str) -> "Query":
        """Parse a search: words, ``"phrases"``, ``begin*``, ``-excluded`` or ``NOT``, and ``OR``.

        Other punctuation has no meaning. An alternative without a word to search for is omitted.
        """
        found: list[tuple[list[Atom], list[Atom]]] = [([], [])]
        is_negated = False
        for match in _QUERY_PART.finditer(text):
            plain, phrase = match["plain"], match["phrase"]
            if plain == "OR":
                found.append(([], []))
            elif plain == "NOT":
                is_negated = True
            elif plain != "AND":
                words = list(_WORD.finditer(fold_text(plain or phrase or "")))
                is_prefix = bool(plain) and plain.endswith("*")
                if words and (match["minus"] or is_negated):
                    found[-1][1].append(Atom.build(words, is_prefix=is_prefix))
                elif words and plain is None:
                    found[-1][0].append(Atom.build(words))
                else:
                    for word in words:
                        last = word is words[-1]
                        found[-1][0].append(Atom.build([word], is_prefix=is_prefix and last))
                is_negated = False
        return cls(tuple(Alternative(tuple(need), tuple(avoid)) for need, avoid in found if need))

    @property
    def needs_text(self) -> bool:
        """Whether the text is needed, besides the index, to decide if it matches."""
        return any(
            each.excluded or not all(atom.is_word for atom in each.required)
            for each in self.alternatives
        )

    def matches(self, tokens: str) -> bool:
        """Return whether a token text matches; see `to_token_text`."""
        return any(each.matches(tokens) for each in self.alternatives)

    def score(self, tokens: str) -> float:
        """Return the score of a token text: BM25 without the frequency of terms in other texts.

        It depends only on the text, so that every database returns the same order.
        """
        length = 1.2 * (0.25 + 0.75 * len(tokens) / TYPICAL_LENGTH)
        scores = [
            sum(count / (count + length) for count in map(tokens.count, patterns))
            for each in self.alternatives
            if each.matches(tokens)
            for patterns in [[atom.pattern for atom in each.required]]
        ]
        return max(scores, default=0.0)

    def find(self, folded: str) -> int:
        """Return the position of the first match in a folded text."""
        words = list(_WORD.finditer(folded))
        tokens = to_token_text(folded)
        ends = list(accumulate(len(_get_token(word)) + 1 for word in words))
        atoms = (atom for each in self.alternatives for atom in each.required)
        starts = (tokens.find(atom.pattern) + atom.pattern.startswith(" ") for atom in atoms)
        first = min((start for start in starts if start > 0), default=0)
        index = bisect_left(ends, first)
        return words[index].start() if index < len(words) else 0

    def index_expression(self, dialect: Dialect) -> str:
        """Return the query of the index for the blocks that may match."""
        alternatives: list[str] = []
        for each in self.alternatives:
            terms: dict[str, None] = {}
            for atom in each.required:
                *plain, last = atom.terms
                quoted = dialect.quote_prefix if atom.is_prefix else dialect.quote_term
                terms |= dict.fromkeys(dialect.quote_term.format(term) for term in plain)
                terms[quoted.format(last)] = None
            alternatives.append(f"({dialect.term_separator.join(terms)})")
        return dialect.or_separator.join(alternatives)


def to_token_text(folded: str) -> str:
    """Return the words of a folded text, with a space before and after each."""
    return f" {' '.join(map(_get_token, _WORD.finditer(folded)))} "


def _get_token(match: re.Match[str]) -> str:
    return match[1] or match.group()[:MAX_WORD]


def _pairs(run: str) -> list[str]:
    return [run[start : start + 2] for start in range(len(run) - 1)]


def index_terms(folded: str) -> list[str]:
    """Return the distinct terms under which a folded text is indexed."""
    terms: dict[str, None] = {}
    size = 0
    for match in _WORD.finditer(folded):
        run = match[1]
        for term in (*run, *_pairs(run)) if run else (match.group()[:MAX_WORD],):
            if term not in terms:
                size += len(term.encode())
                if size > MAX_INDEXED_BYTES:
                    return list(terms)
                terms[term] = None
    return list(terms)


async def update_index(database: Database) -> bool:
    """Index the blocks that are not indexed yet; return whether the index is complete then."""
    after = await database.read(get_index_position)
    try:
        while after is not None:
            after = await database.write(lambda tx, after=after: index_batch(tx, after))
    except StoreReadOnly:  # blocks that are not indexed are read one by one
        return False
    return True


def index_batch(tx: Tx, after: int) -> int | None:
    """Index the blocks of the next nodes; return the last node, or ``None`` when all are indexed."""
    lock_links_shared(tx)  # or a block could be deleted before its text is read
    newest = _newest_node(tx)
    upto = min(after + BATCH_SIZE, newest)
    rows = tx.rows(f"SELECT DISTINCT b.id, b.body {_UNINDEXED}", (after, upto))
    insert_texts(tx, {block: " ".join(index_terms(_fold_body(body))) for block, body in rows})
    tx.run("DELETE FROM indexed")
    tx.run("INSERT INTO indexed (name, node) VALUES ('texts', ?)", (upto,))
    return upto if upto < newest else None


def insert_texts(tx: Tx, terms: Mapping[int, str]) -> None:
    """Add blocks to the index, by number, with their terms separated by spaces."""
    dialect = tx.dialect
    for group, blocks in _split_groups(tx, terms).items():
        if dialect.create_text_table:
            tx.run(dialect.create_text_table.format(group))
            tx.run_many("INSERT INTO texts (rowid) VALUES (?)", [(block,) for block in blocks])
        tx.run_many(dialect.insert_text.format(group), [(each, terms[each]) for each in blocks])


def delete_texts(tx: Tx, blocks: Sequence[int]) -> set[int]:
    """Delete blocks from the index; return their groups, which must be rewritten."""
    query = f"SELECT rowid FROM texts WHERE rowid IN ({marks(blocks)})"
    indexed = [block for (block,) in tx.rows(query, blocks)] if blocks else []
    groups = _split_groups(tx, indexed)
    for group, members in groups.items():
        for table in {"texts", tx.dialect.text_table.format(group)}:
            tx.run(f"DELETE FROM {table} WHERE rowid IN ({marks(members)})", members)
    return set(groups)


def list_groups(tx: Tx) -> set[int]:
    """Return the groups of the index that have a separate table."""
    matches = (_GROUP_TABLE.fullmatch(name) for (name,) in tx.rows(tx.dialect.list_tables))
    return {int(match[1]) for match in matches if match}


def rewrite_group(tx: Tx, group: int) -> None:
    """Overwrite deleted data in a group of the index, or drop its table if it is empty."""
    if group not in list_groups(tx):  # another process was faster, or one table has all groups
        return
    start = group * tx.dialect.texts_per_group
    span = (start, start + tx.dialect.texts_per_group)
    if tx.rows("SELECT 1 FROM texts WHERE rowid >= ? AND rowid < ? LIMIT 1", span):
        tx.run(tx.dialect.rewrite_texts.format(group))
    else:
        tx.run(f"DROP TABLE {tx.dialect.text_table.format(group)}")


def _split_groups(tx: Tx, blocks: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for block in blocks:
        groups.setdefault(block // tx.dialect.texts_per_group, []).append(block)
    return groups


def _newest_node(tx: Tx) -> int:
    return tx.rows("SELECT MAX(id) FROM nodes")[0][0] or 0


def get_index_position(tx: Tx) -> int:
    """Return the node after which indexing continues."""
    rows = tx.rows("SELECT node FROM indexed WHERE name = 'texts'")
    return max(0, rows[0][0] - OVERLAP) if rows else 0


def find_unindexed(tx: Tx, upto: int) -> list[int]:
    """Return the blocks of nodes up to this one that are missing in the index."""
    return [block for (block,) in tx.rows(f"SELECT DISTINCT b.id {_UNINDEXED}", (0, upto))]


@dataclass(frozen=True, slots=True)
class _Match:
    """A matching block as part of one conversation."""

    body: str
    use: "_Use"
    score: float


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
    matches: list[_Match] = []
    conversations = _Conversations(tx, options)
    pages = _iter_pages(tx, query)
    if not index_is_complete:
        pages = iter([_scan_unindexed(tx, query), *pages])
    last = options.offset + options.limit
    is_ranked = options.order == "rank"
    scanned = 0
    for found in pages:
        page = _select_own(tx, found) if is_ranked else found
        scanned += len(page)
        selected = [row for row in page if options.role in (None, _get_kind(options, row[1]))]
        scores = {block: _score(body, query, is_ranked=is_ranked) for block, body in selected}
        uses = conversations.find([block for block, _ in selected if scores[block]])
        matches += [
            _Match(body, use, scores[block])
            for block, body in selected
            for use in uses.get(block, {}).values()
        ]
        if scanned >= MAX_RANKED if is_ranked else len(matches) >= last:
            break
    if is_ranked:
        matches.sort(key=lambda match: -match.score)
    return [_build_hit(match, query) for match in matches[options.offset : last]]


def _select_own(tx: Tx, page: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the blocks of the transaction's namespace; only these count toward the ranked ones."""
    if not page:
        return []
    rows = tx.rows(_SELECT_OWN.format(marks=marks(page)), (tx.namespace, *(b for b, _ in page)))
    namespace_blocks = {block for (block,) in rows}
    return [row for row in page if row[0] in namespace_blocks]


def _get_kind(options: SearchOptions, body: str) -> str | None:
    return decode_blocks([body])[0].kind if options.role else None


def _score(body: str, query: Query, *, is_ranked: bool) -> float:
    """Return the score of a block that has all terms of a query; 0 if it does not match."""
    if not is_ranked and not query.needs_text:
        return 1.0
    tokens = to_token_text(_fold_body(body))
    return query.score(tokens) if is_ranked else float(query.matches(tokens))


def _fold_body(body: str) -> str:
    return fold_text(extract_text(body))


def _iter_pages(tx: Tx, query: Query) -> Iterator[list[tuple[int, str]]]:
    """Yield the blocks that have all terms of an alternative, newest first."""
    dialect = tx.dialect
    terms = query.index_expression(dialect)
    before = 1 << 62
    while (newest := tx.rows(_NEWEST_TEXT, (before,))[0][0]) is not None:
        group = newest // dialect.texts_per_group
        table = dialect.text_table.format(group)
        page = tx.rows(
            f"SELECT b.id, b.body FROM {table} t JOIN blocks b ON b.id = t.rowid "
            f"WHERE {dialect.text_match.format(group)} AND t.rowid < ? ORDER BY t.rowid DESC LIMIT ?",
            (terms, before, PAGE_SIZE),
        )
        yield [(block, body) for block, body in page]
        is_last = len(page) < PAGE_SIZE
        before = group * dialect.texts_per_group if is_last else page[-1][0]


def _scan_unindexed(tx: Tx, query: Query) -> list[tuple[int, str]]:
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

    def find(self, blocks: Sequence[int]) -> dict[int, dict[str, _Use]]:
        """Return the conversations of each block by id, with the first node that has it."""
        found: dict[int, dict[str, _Use]] = {}
        if not blocks:
            return found
        rows = self._tx.rows(_SELECT_NODES.format(marks=marks(blocks)), blocks)
        times = self._load_times([row[3] for row in rows])
        for block, tree, position, node in rows:
            if node not in times:
                continue
            for name, used in self._load_tree(tree):
                if used is None or used.get(node, 0) > position:
                    found.setdefault(block, {}).setdefault(name, _Use(name, node, times[node]))
        return found

    def _load_times(self, nodes: Sequence[int]) -> dict[int, float]:
        """Return the creation times of the nodes in the time range of the search."""
        since = -math.inf if self._options.since is None else self._options.since
        until = math.inf if self._options.until is None else self._options.until
        query = f"SELECT id, created_at FROM nodes WHERE id IN ({marks(nodes)})"
        rows = self._tx.rows(query, nodes) if nodes else []
        return {node: created_at for node, created_at in rows if since <= created_at < until}

    def _load_tree(self, tree: int) -> _Tree:
        """Return the conversations of a tree with the nodes they use; None if one uses all nodes."""
        if tree not in self._trees:
            tag = self._options.tag
            rows = self._tx.rows(_SELECT_CONVERSATIONS, (tag or "", tree, self._tx.namespace))
            nodes = select_tree(self._tx, tree) if len(rows) > 1 else []
            added: dict[int, list[int]] = {}
            for node in nodes:
                added.setdefault(node.conversation, []).append(node.id)
            self._trees[tree] = [
                (name, find_used_nodes(nodes, [*added.get(number, ()), head]) if nodes else None)
                for name, number, head, is_tagged in rows
                if tag is None or is_tagged
            ]
        return self._trees[tree]


def _build_hit(match: _Match, query: Query) -> Hit:
    (block,) = decode_blocks([match.body])
    name, node, created_at = match.use
    excerpt = _build_excerpt(extract_text(match.body), query)
    return Hit(name, node, block.id, block.kind, excerpt, created_at, match.score)


def _build_excerpt(text: str, query: Query) -> str:
    """Return a piece of the text around the first match."""
    folded = fold_text(text)
    at = query.find(folded)
    if len(folded) != len(text):  # a letter may be folded to none or several
        lengths = (len(fold_text(letter)) for letter in text)
        at = _letter_at(lengths, at)
    piece = text[max(0, at - EXCERPT_RADIUS) : at + EXCERPT_RADIUS].strip()
    before = "…" if at > EXCERPT_RADIUS else ""
    return f"{before}{piece}{'…' if at + EXCERPT_RADIUS < len(text) else ''}"


def _letter_at(lengths: Iterator[int], position: int) -> int:
    """Return the index of the letter at a position, from the length of each letter."""
    for index, length in enumerate(lengths):
        position -= length
        if position < 0:
            return index
    return 0
