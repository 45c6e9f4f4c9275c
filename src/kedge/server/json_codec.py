"""JSON as the server reads and writes it: compact, UTF-8, numbers finite.

One encoder for everything that leaves the server or goes into its database, so that a stored item
and a sent item are the same bytes and nothing has to be encoded twice.
"""

import json
from collections.abc import Mapping
from typing import Any

Item = Mapping[str, Any]
"""One wire item of a conversation: a message, a call, its output, reasoning…"""

_encoder = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False
)


def encode(value: object) -> bytes:
    """Write a value as compact JSON."""
    return _encoder.encode(value).encode()


def decode(data: bytes) -> Any:
    """Read JSON that the server itself wrote."""
    return json.loads(data)


def join_response(request_json: bytes, result_json: bytes, output: bytes) -> bytes:
    """Put a response together from its parts, which are encoded and stored apart."""
    return b'%b,%b,"output":%b}' % (request_json[:-1], result_json[1:-1], output)
