"""The toolbox: tools that a model may call, by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from kedge.errors import InvalidTool, UnknownTool
from kedge.tools.tool import Tool, tool

AnyTool = Tool[..., Any]


class Toolbox(Mapping[str, AnyTool]):
    """A mapping of names to tools, in the order given.

    Args:
        *tools: Tools or plain functions, which become tools with default options.

    Raises:
        InvalidTool: Two tools have the same name, or a function cannot be a tool.
    """

    __slots__ = ("_tools",)

    def __init__(self, *tools: AnyTool | Callable[..., Any]) -> None:
        self._tools: dict[str, AnyTool] = {}
        for given in tools:
            added = cast("AnyTool", given if isinstance(given, Tool) else tool(given))
            if added.name in self._tools:
                raise InvalidTool(
                    added.name, "this toolbox already has a tool of that name; set another name="
                )
            self._tools[added.name] = added

    def __getitem__(self, name: str) -> AnyTool:
        """Return the tool of this name.

        Raises:
            UnknownTool: There is none; the message suggests similar names.
        """
        try:
            return self._tools[name]
        except KeyError:
            raise UnknownTool(name, list(self._tools)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def definitions(self) -> list[dict[str, Any]]:
        """Return the tools in the form of the Responses API's ``tools`` parameter."""
        return [each.definition() for each in self._tools.values()]

    def with_tools(self, *tools: AnyTool | Callable[..., Any]) -> "Toolbox":
        """Return a toolbox with these tools added."""
        return Toolbox(*self._tools.values(), *tools)

    def without(self, *names: str) -> "Toolbox":
        """Return a toolbox without the named tools.

        Raises:
            UnknownTool: One of the names is not in this toolbox.
        """
        removed = {self[name].name for name in names}
        return Toolbox(*(each for each in self._tools.values() if each.name not in removed))

    def __repr__(self) -> str:
        return f"<Toolbox {', '.join(self._tools) or 'empty'}>"
