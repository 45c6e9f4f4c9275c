"""Queries of a search, and the text that they match.

Text is folded and split here, not by the databases, so that both return the same results. Case and accents
are ignored. Chinese, Japanese, Korean, Thai and other scripts without spaces between words, and emoji, are
indexed by single characters and by pairs; a query in them matches contiguous text.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

EXCERPT_RADIUS = 60
"""The number of characters of an excerpt on each side of the match."""
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
WORD = re.compile(rf"([{_UNSPACED}]+)|(?:[^\W_{_UNSPACED}]|[\u0900-\u0963\u0966-\u0dff])+")
"""A word, or a run of text in a script without spaces as its first group."""
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}]")
_QUERY_PART = re.compile(r'(?P<minus>(?<!\S)-)?(?:"(?P<phrase>[^"]*)"?|(?P<plain>[^\s"]+))')


class TextIndex(Struct, frozen=True):
    """The statements of a full-text index; ``{}`` in a table's name is the number of its group."""

    texts_per_group: int
    """The number of consecutive blocks that share a table of the index."""
    table: str
    """The name of the table of a group."""
    insert: str
    """Adds a block's number and its terms, separated by spaces, to the index."""
    match: str
    """The condition that indexed text has all terms of a query."""
    term: str
    """The form of one term in such a query."""
    prefix: str
    """The form of the beginning of a term in such a query."""
    and_separator: str
    or_separator: str
    create: str = ""
    """Creates the table of a group, unless it exists; empty if one table has all blocks."""
    rewrite: str = ""
    """Overwrites deleted data in the table of a group; empty if the server does that itself."""


TEXT_INDEXES = {
    "sqlite": TextIndex(
        texts_per_group=2_048,
        table="texts_{}",
        insert="INSERT OR REPLACE INTO texts_{} (rowid, body) VALUES (?, ?)",
        match="t.texts_{} MATCH ?",
        term='"{}"',
        prefix='"{}"*',
        and_separator=" AND ",
        or_separator=" OR ",
        create="CREATE VIRTUAL TABLE IF NOT EXISTS texts_{} USING fts5 ("
        "body, tokenize = \"unicode61 remove_diacritics 0 categories 'L* N* Co M* S*'\")",
        rewrite="INSERT INTO texts_{0} (texts_{0}) VALUES ('optimize')",
    ),
    "postgresql": TextIndex(
        texts_per_group=1 << 62,
        table="texts",
        insert="INSERT INTO texts (rowid, words) VALUES (?, array_to_tsvector(string_to_array(?, ' ')))",
        match="t.words @@ ?::tsquery",
        term="'{}'",
        prefix="'{}':*",
        and_separator=" & ",
        or_separator=" | ",
    ),
}
"""The index of each kind of database."""


def fold_text(text: str) -> str:
    """Return a text with case and accents folded."""
    if text.isascii():
        return text.lower()
    letters = unicodedata.normalize("NFKD", text.casefold())
    plain = (
        each for each in letters if not unicodedata.combining(each) or _UNSPACED_LETTER.match(each)
    )
    return unicodedata.normalize("NFC", "".join(plain))


class Atom(Struct, frozen=True):
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
        first = words[0]
        last = words[-1]
        is_prefix = is_prefix and not _is_unspaced(last)
        pattern = " ".join(_get_token(word) for word in words)
        # A word ends at a space; text of a script without spaces may be a part of longer text.
        if not _is_unspaced(first):
            pattern = f" {pattern}"
        if not (_is_unspaced(last) or is_prefix):
            pattern = f"{pattern} "
        terms: list[str] = []
        for word in words:
            token = _get_token(word)
            pairs = _pairs(token) if _is_unspaced(word) else []
            terms += pairs or [token]
        return cls(pattern, tuple(terms), is_prefix)


class Alternative(Struct, frozen=True):
    """Atoms that a text must have, and atoms that it must not have."""

    required: tuple[Atom, ...]
    excluded: tuple[Atom, ...] = ()

    def matches(self, tokens: str) -> bool:
        """Return whether a token text matches."""
        has_all = all(atom.pattern in tokens for atom in self.required)
        return has_all and not any(atom.pattern in tokens for atom in self.excluded)


class Query(Struct, frozen=True):
    """The alternatives of a search, of which a text must match one."""

    alternatives: tuple[Alternative, ...]

    @classmethod
    def parse(cls, text: str) -> "Query":
        """Parse a search: words, ``"phrases"``, ``begin*``, ``-excluded`` or ``NOT``, and ``OR``.

        Other punctuation has no meaning. An alternative without a word to search for is omitted.
        """
        alternatives: list[Alternative] = []
        required: list[Atom] = []
        excluded: list[Atom] = []
        is_negated = False
        for match in _QUERY_PART.finditer(text):
            plain = match["plain"]
            if plain == "OR":
                alternatives.append(Alternative(tuple(required), tuple(excluded)))
                required = []
                excluded = []
            elif plain == "NOT":
                is_negated = True
            elif plain != "AND":
                if match["minus"] or is_negated:
                    excluded += _parse_excluded(match)
                else:
                    required += _parse_required(match)
                is_negated = False
        alternatives.append(Alternative(tuple(required), tuple(excluded)))
        return cls(tuple(each for each in alternatives if each.required))

    @property
    def needs_text(self) -> bool:
        """Whether the text is needed, besides the index, which alone decides if a text has a word."""
        return any(
            each.excluded or any(len(atom.terms) > 1 for atom in each.required)
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
        scores = [0.0]
        for alternative in self.alternatives:
            if alternative.matches(tokens):
                counts = [tokens.count(atom.pattern) for atom in alternative.required]
                scores.append(sum(count / (count + length) for count in counts))
        return max(scores)

    def find(self, folded: str) -> int:
        """Return the position of the first match in a folded text."""
        words = list(WORD.finditer(folded))
        tokens = to_token_text(folded)
        ends = list(accumulate(len(_get_token(word)) + 1 for word in words))
        atoms = (atom for each in self.alternatives for atom in each.required)
        starts = (tokens.find(atom.pattern) + atom.pattern.startswith(" ") for atom in atoms)
        first = min((start for start in starts if start > 0), default=0)
        index = bisect_left(ends, first)
        if index >= len(words):
            return 0
        return words[index].start()

    def index_expression(self, index: TextIndex) -> str:
        """Return the query of the index for the blocks that may match."""
        alternatives: list[str] = []
        for alternative in self.alternatives:
            terms: dict[str, None] = {}
            for atom in alternative.required:
                *complete, last = atom.terms
                terms |= dict.fromkeys(index.term.format(term) for term in complete)
                last_form = index.prefix if atom.is_prefix else index.term
                terms[last_form.format(last)] = None
            alternatives.append(f"({index.and_separator.join(terms)})")
        return index.or_separator.join(alternatives)


def _parse_excluded(match: re.Match[str]) -> list[Atom]:
    """Return the atom of a word or phrase that a text must not have, unless it is only punctuation."""
    words, is_prefix = _split_part(match)
    if not words:
        return []
    return [Atom.build(words, is_prefix=is_prefix)]


def _parse_required(match: re.Match[str]) -> list[Atom]:
    """Return the atoms that a text must have: a phrase, or each word of a part without quotes."""
    words, is_prefix = _split_part(match)
    if words and match["plain"] is None:
        return [Atom.build(words)]
    return [
        Atom.build([word], is_prefix=is_prefix and position == len(words))
        for position, word in enumerate(words, 1)
    ]


def _split_part(match: re.Match[str]) -> tuple[list[re.Match[str]], bool]:
    """Return the words of a part of a query, and whether the last one is the beginning of a word."""
    plain = match["plain"] or ""
    words = list(WORD.finditer(fold_text(plain or match["phrase"] or "")))
    return words, plain.endswith("*")


def to_token_text(folded: str) -> str:
    """Return the words of a folded text, with a space before and after each."""
    return f" {' '.join(map(_get_token, WORD.finditer(folded)))} "


def _is_unspaced(word: re.Match[str]) -> bool:
    """Return whether a match of `WORD` is text in a script without spaces."""
    return bool(word[1])


def _get_token(word: re.Match[str]) -> str:
    return word[1] or word.group()[:MAX_WORD]


def _pairs(run: str) -> list[str]:
    return [run[start : start + 2] for start in range(len(run) - 1)]


def index_terms(folded: str) -> list[str]:
    """Return the distinct terms under which a folded text is indexed."""
    terms: dict[str, None] = {}
    size = 0
    for word in WORD.finditer(folded):
        for term in _list_terms(word):
            if term in terms:
                continue
            size += len(term.encode())
            if size > MAX_INDEXED_BYTES:
                return list(terms)
            terms[term] = None
    return list(terms)


def _list_terms(word: re.Match[str]) -> list[str]:
    """Return the terms of a word: of a script without spaces, the characters and the pairs of them."""
    token = _get_token(word)
    if not _is_unspaced(word):
        return [token]
    return [*token, *_pairs(token)]


def build_excerpt(text: str, query: Query) -> str:
    """Return a piece of the text around the first match."""
    folded = fold_text(text)
    at = query.find(folded)
    if len(folded) != len(text):  # a letter may be folded to none or several
        ends = list(accumulate(len(fold_text(letter)) for letter in text))
        at = bisect_right(ends, at) % len(ends)
    piece = text[max(0, at - EXCERPT_RADIUS) : at + EXCERPT_RADIUS].strip()
    if at > EXCERPT_RADIUS:
        piece = f"…{piece}"
    if at + EXCERPT_RADIUS < len(text):
        piece = f"{piece}…"
    return piece
