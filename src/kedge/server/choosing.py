"""May a request choose the tool it chooses? Only one that is offered, here or within the items.

Tools come with the request, and with items that bring more of them along the way. The items are
looked at only where the request's own tools do not settle the matter.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge.server import errors
from kedge.server.wire import Item

Tool = Mapping[str, Any]

BRINGING_TOOLS = frozenset({"additional_tools", "tool_search_output"})
"""Types of items that offer tools."""

NAMES = {"function": "name", "custom": "name", "mcp": "server_label"}
"""By what a tool of this type is chosen; every other is chosen by its type."""


def check_tool_choice(body: Mapping[str, Any], seen: Sequence[Item]) -> None:
    """Refuse to be made to call a tool that nobody offered; ``seen`` is the whole context."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return
    offered = list(_flat(body.get("tools") or ()))
    if choice == "required":
        if not offered and not list(_brought(seen)):
            raise errors.TOOLS_MISSING()
        return
    chosen: Sequence[Tool] = choice["tools"] if choice["type"] == "allowed_tools" else [choice]
    for one in chosen:
        if not _is_among(one, offered) and not _is_among(one, list(_brought(seen))):
            raise errors.TOOL_NOT_OFFERED(choice=_called(one))


def _brought(seen: Sequence[Item]) -> Iterator[Tool]:
    for item in seen:
        if item.get("type") in BRINGING_TOOLS:
            yield from _flat(item["tools"])


def _flat(tools: Sequence[Tool]) -> Iterator[Tool]:
    for tool in tools:
        if tool["type"] == "namespace":
            yield from tool["tools"]
        else:
            yield tool


def _is_among(chosen: Tool, offered: Sequence[Tool]) -> bool:
    key = NAMES.get(str(chosen.get("type")), "type")
    if key == "type":
        # Versions of one tool share the beginning of their type: web_search_preview_2025_03_11.
        kind = str(chosen.get("type"))
        return any(kind.startswith(one["type"]) or one["type"].startswith(kind) for one in offered)
    return any(
        one["type"] == chosen.get("type") and one.get(key) == chosen.get(key) for one in offered
    )


def _called(chosen: Tool) -> object:
    return chosen.get(NAMES.get(str(chosen.get("type")), "type"))
