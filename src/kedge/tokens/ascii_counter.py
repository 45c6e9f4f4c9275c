"""Token counts of short ASCII texts without tiktoken, whose encoding takes half a second to build.

Most processes count only a few of them. A text is split by tiktoken's pattern, limited to ASCII. A piece is encoded
by the same rule: starting with single bytes, the adjacent pair with the lowest rank is merged repeatedly.
"""

import re
from functools import cache, partial
from itertools import pairwise

from kedge.tokens.o200k_base import ASCII_SPLIT_PATTERN, find_rank

MAX_TOTAL_LENGTH = 10_000
"""Characters of all texts, after which building the encoding is worthwhile."""
MAX_PIECE_LENGTH = 64  # the time for a piece grows with the square of its length

_PIECE = re.compile(ASCII_SPLIT_PATTERN, re.ASCII)


class AsciiCounter:
    """Counts tokens with the vocabulary file alone."""

    def __init__(self, vocabulary: bytes) -> None:
        self.vocabulary = vocabulary
        self._remaining_length = MAX_TOTAL_LENGTH
        self._find_rank = cache(partial(find_rank, vocabulary))
        self._count_piece = cache(self._merge_pairs)

    def count(self, text: str) -> int | None:
        """Return the number of tokens of a text, or None if tiktoken has to count it."""
        if len(text) > self._remaining_length or not text.isascii():
            return None
        pieces = _PIECE.findall(text)
        if max(map(len, pieces), default=0) > MAX_PIECE_LENGTH:
            return None
        self._remaining_length -= len(text)
        return sum(map(self._count_piece, pieces))

    def _merge_pairs(self, piece: str) -> int:
        content = piece.encode("ascii")
        if self._find_rank(content) is not None:
            return 1
        parts = [content[at : at + 1] for at in range(len(content))]
        while pairs := [
            (rank, at)
            for at, (left, right) in enumerate(pairwise(parts))
            if (rank := self._find_rank(left + right)) is not None
        ]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return len(parts)
