"""The JSON encoding of the server: compact, UTF-8, finite numbers.

The same encoder is used for responses and for the database, so that a stored item and a sent item have
the same bytes and nothing is encoded twice.
"""

from collections.abc import Mapping
from typing import Any

from kedge.json_codec import decode, encode

__all__ = ["Item", "decode", "encode", "join_response"]

Item = Mapping[str, Any]
"""One item of a conversation in the format of the API: a message, a call, an output, reasoning…"""


def join_response(request_json: bytes, result_json: bytes, output: bytes) -> bytes:
    """Join the encoded parts of a response, which are stored separately."""
    return b'%b,%b,"output":%b}' % (request_json[:-1], result_json[1:-1], output)
