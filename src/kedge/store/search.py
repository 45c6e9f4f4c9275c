"""Full-text search over blocks.

The index holds the words of each block under the block's number. It is brought up to date by searches,
so that storing a block costs nothing extra. Which conversations a matching block belongs to is looked up
in the tree when it is found: conversations share blocks, and come and go.

Text is folded and split here, not by the databases, so that both find the same. Case and accents do not
matter. Chinese, Japanese, Korean, Thai and other scripts without spaces between words are indexed by
single characters and by pairs; a query in them matches as a contiguous piece of text.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kedge.store.block_codec import decode_blocks, extract_text
from kedge.store.database import Tx
from kedge.store.nodes import find_used_nodes, lock_links_shared, select_tree
from kedge.store.records import Hit

BATCH_SIZE = 1_000
"""How many nodes are indexed in one transaction."""
PAGE_SIZE = 500
"""How many matching blocks are read at once."""
OVERLAP = 1_000
"""How many nodes are indexed again: they get their numbers in one order and are committed in another."""
EXCERPT_RADIUS = 60
"""Characters of an excerpt on each side of the match."""
MAX_WORD = 100
"""Longer words are indexed, and searched for, by their beginning."""
MAX_INDEXED_BYTES = 500_000
"""How many bytes of distinct words of one block are indexed; PostgreSQL accepts 1 MiB."""

# Thai, Lao, Myanmar, Khmer, kana, Han and Hangul.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
# Vowel signs of Indic scripts are no letters to Python, but parts of words.
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


def fold_text(text: str) -> str:
    """Return a text without case and accents."""
    if text.isascii():
        return text.lower()
    letters = unicodedata.normalize("NFKD", text.casefold())
    plain = (
        each for each in letters if not unicodedata.combining(each) or _UNSPACED_LETTER.match(each)
    )
    return unicodedata.normalize("NFC", "".join(plain))


@dataclass(frozen=True)
class Query:
    """The words of a search."""

    words: tuple[str, ...]
    """Words of scripts with spaces; a text must contain each."""
    runs: tuple[str, ...]
    """Pieces of text in scripts without spaces; a text must contain each."""

    @classmethod
    def parse(cls, text: str) -> "Query":
        """Split what a person typed; punctuation has no meaning."""
        found = list(_WORD.finditer(fold_text(text)))
        words = [match.group()[:MAX_WORD] for match in found if not match[1]]
        return cls(tuple(words), tuple(match[1] for match in found if match[1]))

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """The terms of the index that a matching block has."""
        terms = [*self.words]
        for run in self.runs:
            terms += _pairs(run) or [run]
        return tuple(dict.fromkeys(terms))

    def matches(self, folded: str) -> bool:
        """Whether a text that has all terms contains every run; pairs may come from several places."""
        return all(run in folded for run in self.runs)

    def find(self, folded: str) -> int:
        """Return the position of the first match in a text."""
        places = [folded.find(run) for run in self.runs]
        for match in _WORD.finditer(folded) if self.words else ():
            if match.group()[:MAX_WORD] in self.words:
                places.append(match.start())
                break
        return min((place for place in places if place >= 0), default=0)


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


def index_batch(tx: Tx, after: int) -> int | None:
    """Index the blocks of the next nodes; return the last node, or ``None`` when all are indexed."""
    lock_links_shared(tx)  # or a block could be deleted before its text is seen
    newest = _newest_node(tx)
    upto = min(after + BATCH_SIZE, newest)
    rows = tx.rows(f"SELECT DISTINCT b.id, b.body {_UNINDEXED}", (after, upto))
    tx.run_many(
        tx.dialect.insert_text,
        [(block, " ".join(index_terms(fold_text(extract_text(body))))) for block, body in rows],
    )
    tx.run("DELETE FROM indexed")
    tx.run("INSERT INTO indexed (name, node) VALUES ('texts', ?)", (upto,))
    return upto if upto < newest else None


def _newest_node(tx: Tx) -> int:
    return tx.rows("SELECT MAX(id) FROM nodes")[0][0] or 0


def get_index_position(tx: Tx) -> int:
    """Return the node after which indexing continues."""
    rows = tx.rows("SELECT node FROM indexed WHERE name = 'texts'")
    return max(0, rows[0][0] - OVERLAP) if rows else 0


def find_unindexed(tx: Tx, upto: int) -> list[int]:
    """Return the blocks of nodes up to this one that are missing in the index."""
    return [block for (block,) in tx.rows(f"SELECT DISTINCT b.id {_UNINDEXED}", (0, upto))]


def find_blocks(tx: Tx, text: str, limit: int, *, index_is_complete: bool = True) -> list[Hit]:
    """Return the blocks that match a query, newest first, once for each of their conversations.

    If the index could not be brought up to date, the blocks that are missing in it are read instead.
    """
    query = Query.parse(text)
    if not query.terms:
        return []
    hits: list[Hit] = []
    conversations = _Conversations(tx)
    pages = _iter_pages(tx, query)
    if not index_is_complete:
        pages = iter([_scan_unindexed(tx, query), *pages])
    for page in pages:
        matching = [(block, body) for block, body in page if query.matches(_fold_body(body))]
        users = conversations.find([block for block, _ in matching])
        hits += [
            _build_hit(name, node, body, query)
            for block, body in matching
            for name, node in users.get(block, {}).items()
        ]
        if len(hits) >= limit:
            break
    return hits[:limit]


def _fold_body(body: str) -> str:
    return fold_text(extract_text(body))


def _iter_pages(tx: Tx, query: Query) -> Iterator[list[tuple[int, str]]]:
    """Yield the blocks that have all terms of a query, newest first."""
    dialect = tx.dialect
    terms = dialect.term_separator.join(dialect.quote_term.format(term) for term in query.terms)
    before = 1 << 62
    while True:
        page = tx.rows(
            "SELECT b.id, b.body FROM texts JOIN blocks b ON b.id = texts.rowid "
            f"WHERE {dialect.text_match} AND texts.rowid < ? ORDER BY texts.rowid DESC LIMIT ?",
            (terms, before, PAGE_SIZE),
        )
        yield [(block, body) for block, body in page]
        if len(page) < PAGE_SIZE:
            return
        before = page[-1][0]


def _scan_unindexed(tx: Tx, query: Query) -> list[tuple[int, str]]:
    """Return the blocks that are missing in the index and have all terms of a query."""
    span = (get_index_position(tx), _newest_node(tx))
    rows = tx.rows(f"SELECT DISTINCT b.id, b.body {_UNINDEXED} ORDER BY b.id DESC", span)
    wanted = set(query.terms)
    return [(block, body) for block, body in rows if wanted <= {*index_terms(_fold_body(body))}]


class _Conversations:
    """Finds the conversations that blocks belong to, reading every tree once."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self._trees: dict[int, list[tuple[str, dict[int, int] | None]]] = {}

    def find(self, blocks: Sequence[int]) -> dict[int, dict[str, int]]:
        """Return the conversations of each block by id, with the first node that has it."""
        found: dict[int, dict[str, int]] = {}
        if not blocks:
            return found
        marks = ", ".join("?" * len(blocks))
        for block, tree, place, node in self._tx.rows(_SELECT_NODES.format(marks=marks), blocks):
            for name, used in self._load_tree(tree):
                if used is None or used.get(node, 0) > place:
                    found.setdefault(block, {}).setdefault(name, node)
        return found

    def _load_tree(self, tree: int) -> list[tuple[str, dict[int, int] | None]]:
        """Return the conversations of a tree, with the nodes they use; None if one uses all."""
        if tree not in self._trees:
            query = "SELECT id, number, head FROM conversations WHERE tree = ? ORDER BY number"
            rows = self._tx.rows(query, (tree,))
            nodes = select_tree(self._tx, tree) if len(rows) > 1 else []
            own: dict[int, list[int]] = {}
            for node in nodes:
                own.setdefault(node.conversation, []).append(node.id)
            self._trees[tree] = [
                (name, find_used_nodes(nodes, [*own.get(number, ()), head]) if nodes else None)
                for name, number, head in rows
            ]
        return self._trees[tree]


def _build_hit(conversation: str, node: int, body: str, query: Query) -> Hit:
    (block,) = decode_blocks([body])
    return Hit(conversation, node, block.id, block.kind, _build_excerpt(extract_text(body), query))


def _build_excerpt(text: str, query: Query) -> str:
    """Return a piece of the text around the first match."""
    folded = fold_text(text)
    at = query.find(folded)
    if len(folded) != len(text):  # then one letter may be folded to none or several
        lengths = (len(fold_text(letter)) for letter in text)
        at = _letter_at(lengths, at)
    piece = text[max(0, at - EXCERPT_RADIUS) : at + EXCERPT_RADIUS].strip()
    before = "…" if at > EXCERPT_RADIUS else ""
    return f"{before}{piece}{'…' if at + EXCERPT_RADIUS < len(text) else ''}"


def _letter_at(lengths: Iterator[int], position: int) -> int:
    """Return the index of the letter that covers a position, given the length of each."""
    for index, length in enumerate(lengths):
        position -= length
        if position < 0:
            return index
    return 0
