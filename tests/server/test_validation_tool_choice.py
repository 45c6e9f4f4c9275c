"""A tool choice must refer to an available tool."""

from typing import Any

import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.schema.requests import check_tool_choice

FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "f"}
SEARCH = {"type": "web_search_preview_2025_03_11"}
MCP = {"type": "mcp", "server_label": "s"}
NAMESPACE = {"type": "namespace", "name": "n", "description": "", "tools": [FUNCTION]}
ADDITIONAL_TOOLS = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}

ACCEPTED: list[tuple[Any, list[Any], list[Any]]] = [
    (None, [], []),
    ("auto", [], []),
    ("none", [], []),
    ("required", [FUNCTION], []),
    ("required", [], [ADDITIONAL_TOOLS]),
    ({"type": "function", "name": "f"}, [FUNCTION], []),
    ({"type": "function", "name": "f"}, [NAMESPACE], []),
    ({"type": "function", "name": "f"}, [], [{"role": "user", "content": "x"}, ADDITIONAL_TOOLS]),
    ({"type": "custom", "name": "f"}, [FUNCTION, CUSTOM], []),
    ({"type": "mcp", "server_label": "s", "name": "t"}, [MCP], []),
    ({"type": "web_search_preview"}, [SEARCH], []),
    ({"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION, MCP]}, [MCP, FUNCTION], []),
]
REJECTED: list[tuple[Any, list[Any], str]] = [
    ("required", [], "Tool choice 'required' must be specified with 'tools' parameter."),
    ({"type": "function", "name": "g"}, [FUNCTION], "Tool choice 'g' not found in 'tools'"),
    ({"type": "function", "name": "f"}, [CUSTOM], "Tool choice 'f' not found in 'tools'"),
    ({"type": "mcp", "server_label": "x"}, [MCP], "Tool choice 'x' not found in 'tools'"),
    ({"type": "shell"}, [FUNCTION], "Tool choice 'shell' not found in 'tools' parameter."),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION, CUSTOM]},
        [FUNCTION],
        "Tool choice 'f' not found in 'tools' parameter.",
    ),
]


@for_each(("choice", "tools", "seen"), ACCEPTED)
def test_available_tool_is_accepted(choice: Any, tools: list[Any], seen: list[Any]) -> None:
    """A tool may be defined by the request, by a namespace or by an item of the context."""
    check_tool_choice({"tool_choice": choice, "tools": tools}, seen)


@for_each(("choice", "tools", "message"), REJECTED)
def test_unavailable_tool_is_rejected(choice: Any, tools: list[Any], message: str) -> None:
    """The error contains the tool choice that was not found, as in the hosted API."""
    with pytest.raises(ApiError) as exc_info:
        check_tool_choice({"tool_choice": choice, "tools": tools}, [])
    assert exc_info.value.message.startswith(message)
    assert (exc_info.value.param, exc_info.value.code) == ("tool_choice", None)
