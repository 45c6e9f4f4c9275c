"""The ``TokenCounter`` protocol, and the default implementation with tiktoken.

The same texts are counted again on every request of a chain, so counts are cached, up to a limit. Short texts
are their own cache keys; long ones are stored under their hash, so that the cache contains no large texts.
"""

import hashlib
import re
from binascii import a2b_base64
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib.resources import files
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from kedge.errors import BrokenInstallation
from kedge.security.bounded_dict import BoundedDict
from kedge.tokens.items import count_each, to_compact_json

if TYPE_CHECKING:
    from tiktoken import Encoding


MAX_BLANK_RUN = 100_000
CHUNK_LENGTH = 65_536
# Blanks as tiktoken's pattern defines them: Python's \s also matches the separators 1c to 1f.
_BLANK = r"[^\S\r\n\x1c-\x1f]"


def compile_long_run(length: int) -> re.Pattern[str]:
    """Return a pattern for a complete run of at least this many blanks that no line break ends."""
    return re.compile(rf"(?<!{_BLANK}){_BLANK}{{{length},}}+(?![\r\n])")


_LONG_RUN_PATTERN = compile_long_run(MAX_BLANK_RUN)


def split_text(text: str) -> Iterator[str]:
    """Yield parts of the text whose counts add up to the count of the text; nearly always there is one."""
    start = 0
    if len(text) >= MAX_BLANK_RUN:
        for run in _LONG_RUN_PATTERN.finditer(text):
            stop = run.end() if run.end() == len(text) else run.end() - 1
            yield text[start : run.start()]
            for at in range(run.start(), stop, CHUNK_LENGTH):
                yield text[at : min(at + CHUNK_LENGTH, stop)]
            start = stop
    yield text[start:] if start else text


VOCABULARY_FILE = "o200k_base.tiktoken.gz"
VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
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

_load_lock = Lock()


def get_encoding() -> "Encoding":
    """Return the o200k_base encoding, built at the first call."""
    with _load_lock:
        return _build_encoding()


@cache
def _build_encoding() -> "Encoding":
    from tiktoken import Encoding

    fields = read_vocabulary().split()
    # A line is a token and its rank, and the ranks are the line numbers; the checked hash guarantees it.
    ranks = dict(zip(map(a2b_base64, fields[::2]), range(len(fields) // 2), strict=True))
    return Encoding(
        "o200k_base", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL_TOKENS
    )


def read_vocabulary() -> bytes:
    """Return the published vocabulary.

    Raises:
        BrokenInstallation: The file's hash is not that of the published one.
    """
    import gzip

    content = gzip.decompress(files("kedge.tokens").joinpath(VOCABULARY_FILE).read_bytes())
    if hashlib.sha256(content).hexdigest() != VOCABULARY_SHA256:
        raise BrokenInstallation(
            f"the vocabulary {VOCABULARY_FILE} inside the kedge package is damaged; reinstall kedge"
        )
    return content


MAX_EXACT_LENGTH = 2_000_000
"""Characters of a text that are counted exactly; the count of a longer text is an estimate."""
SAMPLE_CHUNKS = 16
MAX_SHORT_TEXT = 1_024
MAX_CACHED_SHORT = 16_384
MAX_CACHED_LONG = 4_096


class TokenCounter(Protocol):
    """Protocol of token counters. Implement it to use another tokenizer."""

    def count_text(self, text: str) -> int:
        """Return the number of tokens of a text."""
        ...

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Return the number of tokens of items of the Responses API, additive over the items."""
        ...


class TiktokenCounter:
    """A token counter with tiktoken's o200k_base encoding. It works offline and is thread-safe."""

    def __init__(self) -> None:
        # Bound to the instance, so that the cache is freed with the counter.
        self._count_short = lru_cache(maxsize=MAX_CACHED_SHORT)(_count_uncached)
        self._long_cache = BoundedDict[bytes, int](MAX_CACHED_LONG)
        self._lock = Lock()

    def count_text(self, text: str) -> int:
        """Count the tokens of a text.

        Args:
            text: Any text; special tokens such as ``<|endoftext|>`` are counted as ordinary text.

        Returns:
            The number of tokens.
        """
        return self._count_short(text) if len(text) <= MAX_SHORT_TEXT else self._count_long(text)

    def count_items(self, items: Iterable[Mapping[str, Any]]) -> int:
        """Count the tokens of items of the Responses API.

        Args:
            items: Items as dicts, such as messages and function calls.

        Returns:
            The sum over the items; the count of two lists is the count of the joined list.
        """
        return count_each(items, self.count_text)

    def count_json(self, value: object) -> int:
        """Return the number of tokens of a value written as compact JSON, such as a tool definition."""
        return self.count_text(to_compact_json(value))

    def _count_long(self, text: str) -> int:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (cached := self._long_cache.get(key)) is not None:
                self._long_cache.move_to_end(key)
                return cached
        tokens = _count_uncached(text)  # outside the lock: a long text takes a while
        with self._lock:
            self._long_cache[key] = tokens
        return tokens


def _count_uncached(text: str) -> int:
    if len(text) > MAX_EXACT_LENGTH:
        return _estimate(text)
    encode = get_encoding().encode_ordinary
    return sum(len(encode(piece)) for piece in split_text(text))


def _estimate(text: str) -> int:
    """Extrapolate from chunks at equal distances, so the time does not grow with the text.

    No model reads texts of this length, and counting one exactly can take a minute.
    """
    encode = get_encoding().encode_ordinary
    last = len(text) - CHUNK_LENGTH
    starts = [last * number // (SAMPLE_CHUNKS - 1) for number in range(SAMPLE_CHUNKS)]
    tokens = sum(len(encode(text[start : start + CHUNK_LENGTH])) for start in starts)
    return tokens * len(text) // (SAMPLE_CHUNKS * CHUNK_LENGTH)


DEFAULT_COUNTER = TiktokenCounter()
"""The counter of this process."""
count_text = DEFAULT_COUNTER.count_text
"""Return the number of tokens of a text, with the default counter."""
count_items = DEFAULT_COUNTER.count_items
"""Return the number of tokens of items of the Responses API, with the default counter."""
count_json = DEFAULT_COUNTER.count_json
"""Return the number of tokens of a JSON value, with the default counter."""
