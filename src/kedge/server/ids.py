"""Ids that carry their place, so that no index of items is needed.

Everything a request adds shares one random key: the response is ``resp_<key>`` and its items are
``msg_<key><n>``, ``fc_<key><n>``…, where ``n`` is a four-digit hexadecimal number. From an item's
id alone the server knows which stored node to look in.
"""

import re
import secrets

KEY_DIGITS = 32

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fc",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctc",
    "reasoning": "rs",
    "compaction": "cmp",
}
"""How the id of an item begins, by its type; other types begin with ``item``."""

_RESPONSE = re.compile(rf"resp_([0-9a-f]{{{KEY_DIGITS}}})")
_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{{KEY_DIGITS}}})[0-9a-f]{{4}}")


def new_key() -> str:
    """Make the key of a new response or conversation."""
    return secrets.token_hex(KEY_DIGITS // 2)


def response_id(key: str) -> str:
    """Name a response by its key."""
    return f"resp_{key}"


def item_id(type: str, key: str, number: int) -> str:
    """Name the ``number``-th item of the request with this key."""
    return f"{PREFIXES.get(type, 'item')}_{key}{number:04x}"


def key_of_response(id: str) -> str | None:
    """Read the key out of a response's id, if this server could have made it."""
    match = _RESPONSE.fullmatch(id)
    return match and match[1]


def key_of_item(id: str) -> str | None:
    """Read the key out of an item's id, if this server could have made it."""
    match = _ITEM.fullmatch(id)
    return match and match[1]
