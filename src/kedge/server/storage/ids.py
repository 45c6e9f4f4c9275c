"""Ids that say where a thing is kept, so that the database needs no index of ids.

Everything a request adds shares one key: the number of its node in the database, then random
digits that nobody can guess. The response is ``resp_<key>`` and its items are ``msg_<key><n>``,
``fc_<key><n>`` and so on, ``n`` counting them. A key read out of an id is only a claim: it holds
if the node of that number has that very key.
"""

import re
import secrets

NODE_DIGITS = 10
KEY_DIGITS = 32

ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fc",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctc",
    "reasoning": "rs",
    "compaction": "cmp",
}
"""How the id of an item begins, by its type; other types begin with ``item``."""

_RESPONSE_ID = re.compile(rf"resp_([0-9a-f]{{{KEY_DIGITS}}})")
_ITEM_ID = re.compile(rf"[a-z]+_([0-9a-f]{{{KEY_DIGITS}}})[0-9a-f]{{4,}}")


def new_key(node: int) -> str:
    """Make the key of a new node."""
    return f"{node:0{NODE_DIGITS}x}{secrets.token_hex((KEY_DIGITS - NODE_DIGITS) // 2)}"


def parse_node_number(key: str) -> int:
    """Read the number of its node out of a key."""
    return int(key[:NODE_DIGITS], 16)


def make_response_id(key: str) -> str:
    """Name a response by its key."""
    return f"resp_{key}"


def make_item_id(type: str, key: str, number: int) -> str:
    """Name the ``number``-th item of the request with this key."""
    return f"{ID_PREFIXES.get(type, 'item')}_{key}{number:04x}"


def make_call_id(key: str, number: int, prefix: str = "call") -> str:
    """Name a tool call that is the ``number``-th item of the request with this key."""
    return f"{prefix}_{key}{number:04x}"


def parse_response_key(id: str) -> str | None:
    """Read the key out of a response's id, if this server could have made it."""
    match = _RESPONSE_ID.fullmatch(id)
    return match and match[1]


def parse_item_key(id: str) -> str | None:
    """Read the key out of an item's id, if this server could have made it."""
    match = _ITEM_ID.fullmatch(id)
    return match and match[1]
