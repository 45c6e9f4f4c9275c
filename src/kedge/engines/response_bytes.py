"""The bytes of a response: the limit of their number, their decompression, and the parts that are decoded at once.

The limit applies to the decompressed bytes of a body or of a complete stream: two megabytes of gzip can become
gigabytes. The HTTP libraries decompress in pieces of at most a megabyte; so does ``make_inflater``, where raw bytes are
passed on.
"""

import zlib
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import suppress
from typing import Any

from kedge._internal.arguments import check_positive_int, read_variable
from kedge.errors import InvalidSetting

MAX_RESPONSE_BYTES = 128 * 1024 * 1024
"""The default, which is enough for a response with several generated images."""
MAX_ERROR_BYTES = 1_000_000
"""The bytes of an error's body that are read."""
LIMIT_VARIABLE = "KEDGE_MAX_RESPONSE_BYTES"
"""The environment variable with another default."""
PIECE_BYTES = 1024 * 1024
"""The maximum size of a decompressed piece."""
PART_BYTES = 4096
"""The bytes of a stream that are decoded before other tasks may run."""
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
    text = read_variable(LIMIT_VARIABLE)
    if not text:
        return MAX_RESPONSE_BYTES
    if not (text.isascii() and text.isdigit() and int(text)):
        raise InvalidSetting(f"{LIMIT_VARIABLE} must be a positive integer, not {text!r}")
    return int(text)


async def read_start(chunks: AsyncIterable[bytes], errors: tuple[type[Exception], ...]) -> bytes:
    """Return the start of an error's body, as far as it can be read."""
    body = bytearray()
    with suppress(*errors):
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_ERROR_BYTES:
                break
    return bytes(body[:MAX_ERROR_BYTES])


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


def iter_parts(piece: bytes) -> Iterator[bytes]:
    """Yield a piece of a body in parts, each of which is decoded in a few milliseconds."""
    for start in range(0, len(piece), PART_BYTES):
        yield piece[start : start + PART_BYTES]
