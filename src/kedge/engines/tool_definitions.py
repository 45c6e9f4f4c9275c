"""Definitions of tools in a request.

The same definitions are part of every request of a conversation, where they are encoded for the body and compared
with those of the previous requests. So they cannot be changed, and each encoded form is computed once.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeGuard, cast

from kedge.engines.request_body import encode_param
from kedge.errors import InvalidSetting
from kedge.turns.frozen_json import ReadOnlyObject, copy_containers

encode_settings = json.JSONEncoder(default=str, sort_keys=True).encode
"""Return values as JSON text for a comparison; values that are not JSON are written as text."""
_PREFIX = b'"tools":'


class ToolDefinition(ReadOnlyObject):
    """The definition of a tool: a JSON object that cannot be changed, nor can anything in it."""

    @property
    def _plain(self) -> dict[str, Any]:
        """The members as they are stored, which takes less time than reading them."""
        return dict[str, Any].copy(self)

    @cached_property
    def encoded(self) -> bytes:
        """Its compact JSON.

        Raises:
            InvalidSetting: A value is not JSON.
        """
        return encode_param("tools", self._plain)[len(_PREFIX) :]

    @cached_property
    def text(self) -> str:
        """Its JSON text in the order of its members, which matters to prompt caches."""
        return json.dumps(self._plain, default=str)

    @cached_property
    def settings_text(self) -> str:
        """Its JSON text as a part of the settings of a request; see ``encode_settings``."""
        return encode_settings(self._plain)


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


def are_definitions(value: object) -> TypeGuard[list[ToolDefinition]]:
    """Return whether a member of a body is a list of definitions of this class."""
    if type(value) is not list:
        return False
    return all(type(each) is ToolDefinition for each in cast("list[object]", value))
