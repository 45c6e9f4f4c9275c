"""Full-text search, with an index that whoever searches brings up to date.

What is said costs nothing for being found later; the first search after it pays. Words are cut and
folded here (case, accents, one word for each ideograph), so that both databases find the same.
"""

import re
import unicodedata

from kedge.store.database import Tx
from kedge.store.forms import read_blocks, texts_of
from kedge.store.rows import Hit

BATCH = 1_000
"""How many nodes are indexed in one transaction."""
OVERLAP = 1_000
"""How many nodes are looked at again: numbers are given in one order and committed in another."""
AROUND = 60
"""Characters of an excerpt on each side of what was found."""

_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)

_NEW = """
SELECT n.conversation, n.id, b.id, b.body FROM nodes n
JOIN links l ON l.branch = n.branch AND l.place >= n.kept AND l.place < n.length
JOIN blocks b ON b.id = l.block LEFT JOIN heard h ON h.block = b.id
WHERE n.id > ? AND n.id <= ? AND h.block IS NULL ORDER BY n.id
"""


def folded(text: str) -> str:
    """Text without case and accents."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in parts if not unicodedata.combining(letter))


def words_of(text: str) -> list[str]:
    """The words of a text, as they are indexed."""
    return _WORD.findall(folded(text))


def index_more(tx: Tx, after: int) -> int | None:
    """Index the next nodes; up to where that is done, or ``None`` when it is done."""
    ((newest,),) = tx.rows("SELECT MAX(id) FROM nodes")
    upto = min(after + BATCH, newest or 0)
    rows = tx.rows(_NEW, (after, upto))
    fresh = {block: (number, node, body) for number, node, block, body in reversed(rows)}
    tx.run_many(
        "INSERT INTO texts (rowid, body) VALUES (?, ?)",
        [(block, " ".join(words_of(texts_of(body)))) for block, (_, _, body) in fresh.items()],
    )
    tx.run_many(
        "INSERT INTO heard (block, conversation, node) VALUES (?, ?, ?)",
        [(block, number, node) for block, (number, node, _) in fresh.items()],
    )
    tx.run("DELETE FROM indexed")
    tx.run("INSERT INTO indexed (name, node) VALUES ('texts', ?)", (upto,))
    return upto if upto < (newest or 0) else None


def indexed_upto(tx: Tx) -> int:
    """From where to go on indexing."""
    rows = tx.rows("SELECT node FROM indexed WHERE name = 'texts'")
    return max(0, rows[0][0] - OVERLAP) if rows else 0


def find(tx: Tx, query: str, limit: int) -> list[Hit]:
    """The blocks that hold all words of the query, the newest first."""
    words = words_of(query)
    if not words:
        return []
    quoted = (
        " ".join(f'"{word}"' for word in words) if tx.dialect.name == "sqlite" else " ".join(words)
    )
    rows = tx.rows(
        "SELECT c.id, h.node, b.body FROM texts JOIN heard h ON h.block = texts.rowid "
        "JOIN blocks b ON b.id = h.block JOIN conversations c ON c.number = h.conversation "
        f"WHERE {tx.dialect.match} ORDER BY h.block DESC LIMIT ?",
        (quoted, limit),
    )
    return [_hit(name, node, body, words) for name, node, body in rows]


def _hit(conversation: str, node: int, body: str, words: list[str]) -> Hit:
    (block,) = read_blocks([body])
    return Hit(conversation, node, block.id, block.kind, _excerpt(texts_of(body), words))


def _excerpt(text: str, words: list[str]) -> str:
    """A piece of the text around the first word that was found."""
    places = [match.start() for match in re.finditer(r"\w+", text) if _is_one(match, words)]
    at = places[0] if places else 0
    piece = text[max(0, at - AROUND) : at + AROUND].strip()
    before = "…" if at > AROUND else ""
    return f"{before}{piece}{'…' if at + AROUND < len(text) else ''}"


def _is_one(match: "re.Match[str]", words: list[str]) -> bool:
    return any(word in words for word in words_of(match.group()))
