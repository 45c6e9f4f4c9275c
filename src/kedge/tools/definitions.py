"""Definitions of tools: the members of a request that describe a tool, and the forms in which a caller writes tools.

The same definitions are part of every request of a conversation, where they are encoded for the body and compared
with those of the previous requests. So they cannot be changed, and each of their forms is computed once.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

from kedge.errors import InvalidSetting, describe_type
from kedge.turns.frozen_json import FrozenMap, compute_once, wrap_copy

OfferedTools = Mapping[str, Any] | Callable[..., Any] | Iterable[Any]
"""Functions, tools, toolboxes and tool definitions, or one of these."""


def to_definition(members: Mapping[str, Any]) -> FrozenMap:
    """Return the definition of a tool: its members, which cannot be changed and need not be JSON.

    Raises:
        InvalidSetting: They are nested too deep.
    """
    try:
        return wrap_copy(members)
    except RecursionError as error:
        raise InvalidSetting("tools cannot be sent as JSON: one is nested too deep") from error


def convert_tool(
    definition: Mapping[str, Any], converter: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> FrozenMap:
    """Return a definition in the form of another API; ``converter`` is a function of the module of that API."""
    return compute_once(_compose(converter), to_definition(definition))


@cache
def _compose(converter: Callable[[Any], Mapping[str, Any]]) -> Callable[[FrozenMap], FrozenMap]:
    return lambda definition: to_definition(converter(definition))


def list_tools(tools: object) -> list[Any]:
    """Return the entries of ``tools``: one function, tool, toolbox or definition is a list of one.

    Raises:
        InvalidSetting: It is neither a list nor one of these.
    """
    if callable(tools) or isinstance(tools, Mapping):
        return [tools]
    if isinstance(tools, str | bytes) or not isinstance(tools, Iterable):
        raise InvalidSetting(
            "tools must be a list of functions, tools, toolboxes and definitions, or one of these, "
            f"not {describe_type(tools)}"
        )
    return list(cast("Iterable[Any]", tools))


def split_tools(tools: OfferedTools) -> tuple[list[Any], tuple[Mapping[str, Any], ...]]:
    """Return the tools and functions that a run calls, and the definitions that it only offers."""
    functions: list[Any] = []
    definitions: list[Mapping[str, Any]] = []
    for each in list_tools(tools):
        if not hasattr(each, "definitions") and isinstance(each, Mapping):
            definitions.append(cast("Mapping[str, Any]", each))
        else:  # a function, a tool or a toolbox
            functions.append(each)
    return functions, tuple(definitions)
