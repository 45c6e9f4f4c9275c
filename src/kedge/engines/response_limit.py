"""The maximum size of a response, for all parts of Kedge that read one.

It applies to the decompressed bytes of a body or of a complete stream: two megabytes of gzip can become gigabytes.
The HTTP libraries decompress in pieces of at most a megabyte; so does ``make_inflater``, where raw bytes are passed on.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from kedge.errors import InvalidSetting, StreamTooLarge
from kedge.planning.anchors import check_positive_int

MAX_RESPONSE_BYTES = 128 * 1024 * 1024
"""The default, which is enough for a response with several generated images."""
MAX_ERROR_BYTES = 1_000_000
"""The bytes of an error's body that are read."""
LIMIT_VARIABLE = "KEDGE_MAX_RESPONSE_BYTES"
"""The environment variable with another default."""
PIECE_BYTES = 1024 * 1024
"""The maximum size of a decompressed piece."""
READABLE_CODINGS = ("identity", "gzip", "x-gzip", "deflate")
"""The compressions of responses that can be read."""

Inflater = Callable[[bytes], Iterator[bytes]]


def resolve_limit(max_bytes: int | None = None) -> int:
    """Return the maximum size of a response: the given one, that of the environment, or the default.

    Raises:
        InvalidSetting: It is not a positive integer.
    """
    if max_bytes is not None:
        return check_positive_int("max_response_bytes", max_bytes)
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return MAX_RESPONSE_BYTES
    if not (text.isascii() and text.isdigit() and int(text)):
        raise InvalidSetting(f"{LIMIT_VARIABLE} must be a positive integer, not {text!r}")
    return int(text)


class SizeLimit:
    """Counts the bytes of one response.

    Args:
        max_bytes: The maximum.
    """

    __slots__ = ("_left", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self._left = max_bytes

    def add(self, chunk: bytes) -> bytes:
        """Count a chunk and return it.

        Raises:
            StreamTooLarge: The response is larger than the maximum.
        """
        self._left -= len(chunk)
        if self._left < 0:
            raise StreamTooLarge("response", self.max_bytes)
        return chunk


def make_inflater(encoding: str) -> Inflater | None:
    """Return a function that decompresses the chunks of a body in pieces, or None for an unknown compression."""
    encoding = encoding.lower()
    if encoding in ("", "identity"):
        return lambda chunk: iter((chunk,))
    if encoding not in READABLE_CODINGS:
        return None
    window = zlib.MAX_WBITS if encoding == "deflate" else 16 + zlib.MAX_WBITS
    decompressor: Any = zlib.decompressobj(window)

    def inflate(chunk: bytes) -> Iterator[bytes]:
        while piece := decompressor.decompress(chunk, PIECE_BYTES):
            yield piece
            chunk = decompressor.unconsumed_tail

    return inflate
