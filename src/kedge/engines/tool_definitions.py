"""Definitions of tools in a request.

The same definitions are part of every request of a conversation, where they are encoded for the body and compared
with those of the previous requests. So they cannot be changed, and each of their forms is computed once.
"""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from kedge.engines.request_body import encode_param
from kedge.errors import InvalidSetting
from kedge.turns.frozen_json import ReadOnlyObject, copy_containers

_PREFIX = b'"tools":'
_Converter = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ToolDefinition(ReadOnlyObject):
    """The definition of a tool: a JSON object that cannot be changed, nor can anything in it."""

    @cached_property
    def encoded(self) -> bytes:
        """Its compact JSON.

        Raises:
            InvalidSetting: A value is not JSON.
        """
        return encode_tool(self.copy_members())

    @cached_property
    def text(self) -> str:
        """Its JSON text in the order of its members, which matters to prompt caches."""
        return json.dumps(self.copy_members(), ensure_ascii=False, default=str)

    @cached_property
    def _converted(self) -> dict[_Converter, "ToolDefinition"]:
        return {}

    def convert(self, converter: _Converter) -> "ToolDefinition":
        """Return the definition in the form of another API.

        Args:
            converter: A function of the module of that API; its result is stored.
        """
        converted = self._converted.get(converter)
        if converted is None:
            converted = to_definition(converter(self.copy_members()))
            self._converted[converter] = converted
        return converted

    def copy_members(self) -> dict[str, Any]:
        """Return the members as they are stored, which is faster than reading each; only the dict is a copy."""
        return dict[str, Any].copy(self)


def to_definition(members: Mapping[str, Any]) -> ToolDefinition:
    """Return a definition with these members.

    Raises:
        InvalidSetting: They are nested too deep.
    """
    if type(members) is ToolDefinition:
        return members
    try:
        return ToolDefinition(copy_containers(dict(members)))
    except RecursionError as error:
        raise InvalidSetting("tools cannot be sent as JSON: one is nested too deep") from error


def encode_tool(tool: object) -> bytes:
    """Return the compact JSON of an element of a body's ``tools``.

    Raises:
        InvalidSetting: A value is not JSON.
    """
    if type(tool) is ToolDefinition:
        return tool.encoded
    return encode_param("tools", tool)[len(_PREFIX) :]
