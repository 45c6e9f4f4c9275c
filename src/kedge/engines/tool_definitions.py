"""Definitions of tools in a request.

The same definitions are part of every request of a conversation, where they are encoded for the body and compared
with those of the previous requests. So they cannot be changed, and each of their forms is computed once.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kedge.engines.request_body import encode_param
from kedge.errors import InvalidSetting
from kedge.turns.frozen_json import FrozenMap, compute_once, thaw, wrap_copy

_PREFIX = b'"tools":'


def to_definition(members: Mapping[str, Any]) -> FrozenMap:
    """Return the definition of a tool: its members, which cannot be changed and need not be JSON.

    Raises:
        InvalidSetting: They are nested too deep.
    """
    try:
        return wrap_copy(members)
    except RecursionError as error:
        raise InvalidSetting("tools cannot be sent as JSON: one is nested too deep") from error


def encode_tool(tool: object) -> bytes:
    """Return the compact JSON of an element of a body's ``tools``.

    Raises:
        InvalidSetting: A value is not JSON.
    """
    return compute_once(_encode, tool) if type(tool) is FrozenMap else _encode(tool)


def _encode(tool: object) -> bytes:
    return encode_param("tools", thaw(tool))[len(_PREFIX) :]


def convert_tool(
    definition: Mapping[str, Any], converter: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> FrozenMap:
    """Return a definition in the form of another API; ``converter`` is a function of the module of that API."""
    return compute_once(_compose(converter), to_definition(definition))


@cache
def _compose(converter: Callable[[Any], Mapping[str, Any]]) -> Callable[[FrozenMap], FrozenMap]:
    return lambda definition: to_definition(converter(definition))


def format_tool(definition: Mapping[str, Any]) -> str:
    """Return the JSON text of a definition in the order of its members, which matters to prompt caches."""
    return compute_once(_format, to_definition(definition))


def _format(definition: FrozenMap) -> str:
    return json.dumps(thaw(definition), ensure_ascii=False, default=str)
