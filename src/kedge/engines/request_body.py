"""The body of a request: the items of its input, and its bytes."""

from collections.abc import Mapping
from typing import Any, cast

from kedge._internal.json_text import encode
from kedge.engines.params import encode_params
from kedge.planning import RequestPlan
from kedge.turns.frozen_json import FrozenMap, compute_once, thaw
from kedge.wire.fields import CALL_ARGUMENTS
from kedge.wire.message_renderer import hash_call_id

MAX_CALL_ID_LENGTH = 64
"""The maximum length of a call id in the Responses API; ids of other providers may be longer."""


def build_input(plan: RequestPlan) -> list[dict[str, Any]]:
    """Return the input items of a plan, with shorter ids for calls of other providers where needed.

    A call that the server generated itself is not in the input of the request with its result, which keeps its id.
    """
    items = plan.input()
    shorter: dict[str, dict[str, str]] = {}
    for item in items:
        if item["type"] in CALL_ARGUMENTS and len(item["call_id"]) > MAX_CALL_ID_LENGTH:
            name = hash_call_id(f"kedge.call/1  {item['call_id']}")
            shorter[item["call_id"]] = {"call_id": name}
    if not shorter:
        return items
    return [item | shorter.get(item.get("call_id", ""), {}) for item in items]


_PREFIX = b'"tools":'


def encode_tool(tool: object) -> bytes:
    """Return the compact JSON of an element of a body's ``tools``.

    Raises:
        InvalidSetting: A value is not JSON.
    """
    if type(tool) is FrozenMap:
        return compute_once(_encode, tool)
    return _encode(tool)


def _encode(tool: object) -> bytes:
    return encode_params({"tools": thaw(tool)})[len(_PREFIX) :]


_ITEM_LISTS = frozenset({"input", "messages"})
"""The body members that are rendered from blocks."""


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request body.

    Raises:
        InvalidSetting: A parameter is not JSON.
    """
    members: list[bytes] = []
    params: dict[str, Any] = {}
    for name, value in body.items():
        if name in _ITEM_LISTS:
            members.append(b'"%b":%b' % (name.encode(), encode(value)))
        elif name == "tools" and type(value) is list:
            listed = map(encode_tool, cast("list[Any]", value))
            members.append(b'"tools":[%b]' % b",".join(listed))
        else:
            params[name] = value
    if params:  # before the items, which are the longest part
        members.insert(0, encode_params(params))
    return b"{%b}" % b",".join(members)
