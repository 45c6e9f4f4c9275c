"""The definition of tiktoken's encoding o200k_base: pattern, special tokens and vocabulary.

The vocabulary is a file of this package. It has the lines of the published file in sorted order, so that one token
can be found by bisection. A line is a token in base64 and its rank.
"""

import hashlib
from binascii import a2b_base64, b2a_base64
from bisect import bisect_left
from importlib.resources import files

from kedge.errors import BrokenInstallation

VOCABULARY_FILE = "o200k_base.sorted.gz"
VOCABULARY_SHA256 = "09fb0d66f77fe20e504496003bb570f7062d6b9c3e68e6a175956b7c9b73a95c"
SPECIAL_TOKENS = {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
ASCII_SPLIT_PATTERN = (
    SPLIT_PATTERN.replace(_UPPER, "[A-Z]")
    .replace(_LOWER, "[a-z]")
    .replace(r"\p{L}\p{N}", "A-Za-z0-9")
    .replace(r"\p{N}", "[0-9]")
)
"""The pattern for ASCII texts, in the syntax of Python."""


def read_vocabulary() -> bytes:
    """Return the vocabulary.

    Raises:
        BrokenInstallation: The file has been changed.
    """
    import gzip

    content = gzip.decompress(files("kedge.tokens").joinpath(VOCABULARY_FILE).read_bytes())
    if hashlib.sha256(content).hexdigest() != VOCABULARY_SHA256:
        raise BrokenInstallation(
            f"the vocabulary {VOCABULARY_FILE} inside the kedge package is damaged; reinstall kedge"
        )
    return content


def parse_ranks(vocabulary: bytes) -> dict[bytes, int]:
    """Return the rank of every token."""
    fields = vocabulary.split()
    return dict(zip(map(a2b_base64, fields[::2]), map(int, fields[1::2]), strict=True))


def find_rank(vocabulary: bytes, token: bytes) -> int | None:
    """Return the rank of one token, or None if the vocabulary does not contain it."""
    start = b2a_base64(token, newline=False) + b" "

    def read_line_start(position: int) -> bytes:
        line = vocabulary.rfind(b"\n", 0, position) + 1
        return vocabulary[line : line + len(start)]

    line = bisect_left(range(len(vocabulary)), start, key=read_line_start)
    if not vocabulary.startswith(start, line):
        return None
    return int(vocabulary[line + len(start) : vocabulary.index(b"\n", line)])
