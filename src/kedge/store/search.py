"""Full-text search, with an index that whoever searches brings up to date.

What is said costs nothing for being found later; the first search after it pays. Words are cut and
folded here (case, accents, one word for each ideograph), so that both databases find the same.
"""

import re
import unicodedata

from kedge.store.block_codec import decode_blocks, extract_text
from kedge.store.database import Tx
from kedge.store.records import Hit

BATCH_SIZE = 1_000
"""How many nodes are indexed in one transaction."""
OVERLAP = 1_000
"""How many nodes are looked at again: numbers are given in one order and committed in another."""
EXCERPT_RADIUS = 60
"""Characters of an excerpt on each side of what was found."""

_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)

_SELECT_UNINDEXED = """
SELECT n.conversation, n.id, b.id, b.body FROM nodes n
JOIN links l ON l.branch = n.branch AND l.place >= n.kept AND l.place < n.length
JOIN blocks b ON b.id = l.block LEFT JOIN heard h ON h.block = b.id
WHERE n.id > ? AND n.id <= ? AND h.block IS NULL ORDER BY n.id
"""


def fold_text(text: str) -> str:
    """Text without case and accents."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in parts if not unicodedata.combining(letter))


def split_words(text: str) -> list[str]:
    """The words of a text, as they are indexed."""
    return _WORD.findall(fold_text(text))


def index_batch(tx: Tx, after: int) -> int | None:
    """Index the next nodes; up to where that is done, or ``None`` when it is done."""
    ((newest,),) = tx.rows("SELECT MAX(id) FROM nodes")
    upto = min(after + BATCH_SIZE, newest or 0)
    rows = tx.rows(_SELECT_UNINDEXED, (after, upto))
    fresh = {block: (number, node, body) for number, node, block, body in reversed(rows)}
    tx.run_many(
        "INSERT INTO texts (rowid, body) VALUES (?, ?)",
        [
            (block, " ".join(split_words(extract_text(body))))
            for block, (_, _, body) in fresh.items()
        ],
    )
    tx.run_many(
        "INSERT INTO heard (block, conversation, node) VALUES (?, ?, ?)",
        [(block, number, node) for block, (number, node, _) in fresh.items()],
    )
    tx.run("DELETE FROM indexed")
    tx.run("INSERT INTO indexed (name, node) VALUES ('texts', ?)", (upto,))
    return upto if upto < (newest or 0) else None


def get_index_position(tx: Tx) -> int:
    """From where to go on indexing."""
    rows = tx.rows("SELECT node FROM indexed WHERE name = 'texts'")
    return max(0, rows[0][0] - OVERLAP) if rows else 0


def find_blocks(tx: Tx, query: str, limit: int) -> list[Hit]:
    """The blocks that hold all words of the query, the newest first."""
    words = split_words(query)
    if not words:
        return []
    quoted = (
        " ".join(f'"{word}"' for word in words) if tx.dialect.name == "sqlite" else " ".join(words)
    )
    rows = tx.rows(
        "SELECT c.id, h.node, b.body FROM texts JOIN heard h ON h.block = texts.rowid "
        "JOIN blocks b ON b.id = h.block JOIN conversations c ON c.number = h.conversation "
        f"WHERE {tx.dialect.text_match} ORDER BY h.block DESC LIMIT ?",
        (quoted, limit),
    )
    return [_build_hit(name, node, body, words) for name, node, body in rows]


def _build_hit(conversation: str, node: int, body: str, words: list[str]) -> Hit:
    (block,) = decode_blocks([body])
    return Hit(conversation, node, block.id, block.kind, _build_excerpt(extract_text(body), words))


def _build_excerpt(text: str, words: list[str]) -> str:
    """A piece of the text around the first word that was found."""
    places = [match.start() for match in re.finditer(r"\w+", text) if _matches_any(match, words)]
    at = places[0] if places else 0
    piece = text[max(0, at - EXCERPT_RADIUS) : at + EXCERPT_RADIUS].strip()
    before = "…" if at > EXCERPT_RADIUS else ""
    return f"{before}{piece}{'…' if at + EXCERPT_RADIUS < len(text) else ''}"


def _matches_any(match: "re.Match[str]", words: list[str]) -> bool:
    return any(word in words for word in split_words(match.group()))
