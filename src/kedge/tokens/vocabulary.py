"""The o200k_base vocabulary, from our own package data.

``tiktoken.get_encoding`` would download it; the encoding is therefore built by hand from the
bundled file, which is the published one (compressed) and is checked against its published hash.
Reading it takes a few hundred milliseconds and some tens of megabytes, so it happens once, at the
first count, under a lock.
"""

import hashlib
from binascii import a2b_base64
from functools import cache
from importlib.resources import files
from threading import Lock
from typing import TYPE_CHECKING

from kedge.errors import BrokenInstallation

if TYPE_CHECKING:
    from tiktoken import Encoding

FILE = "o200k_base.tiktoken.gz"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
SPECIAL = {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
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

_loading = Lock()


def encoding() -> "Encoding":
    """Give the o200k_base encoding, built at the first call."""
    with _loading:
        return _build()


@cache
def _build() -> "Encoding":
    from tiktoken import Encoding

    words = published_file().split()
    # A line is a token and its rank, and the ranks are the line numbers; the hash vouches for it.
    ranks = dict(zip(map(a2b_base64, words[::2]), range(len(words) // 2), strict=True))
    return Encoding("o200k_base", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL)


def published_file() -> bytes:
    """Read the vocabulary as it was published, and check that it is that."""
    import gzip

    content = gzip.decompress(files("kedge.tokens").joinpath(FILE).read_bytes())
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise BrokenInstallation(
            f"the vocabulary {FILE} inside the kedge package is damaged; reinstall kedge"
        )
    return content
