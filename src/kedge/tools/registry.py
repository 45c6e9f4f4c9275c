"""A toolbox: the tools that a model may call, by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from kedge.errors import InvalidTool, UnknownTool
from kedge.tools.tool import Tool, tool

AnyTool = Tool[..., Any]


class Toolbox(Mapping[str, AnyTool]):
    """Tools under their names, in the order given. Plain functions become tools."""

    __slots__ = ("_tools",)

    def __init__(self, *tools: AnyTool | Callable[..., Any]) -> None:
        self._tools: dict[str, AnyTool] = {}
        for given in tools:
            made = cast("AnyTool", given if isinstance(given, Tool) else tool(given))
            if made.name in self._tools:
                raise InvalidTool(
                    made.name, "this toolbox has one of that name already; give it another name="
                )
            self._tools[made.name] = made

    def __getitem__(self, name: str) -> AnyTool:
        """The tool of this name; ``UnknownTool`` says which name may have been meant."""
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
        """The tools as a request of the Responses API lists them."""
        return [each.definition() for each in self._tools.values()]

    def with_tools(self, *tools: AnyTool | Callable[..., Any]) -> "Toolbox":
        """These tools and more."""
        return Toolbox(*self._tools.values(), *tools)

    def without(self, *names: str) -> "Toolbox":
        """These tools but the named ones, which must be there."""
        left_out = {self[name].name for name in names}
        return Toolbox(*_exclude(self._tools.values(), left_out))

    def __repr__(self) -> str:
        return f"<Toolbox {', '.join(self._tools) or 'empty'}>"


def _exclude(tools: Iterable[AnyTool], names: set[str]) -> Iterator[AnyTool]:
    return (each for each in tools if each.name not in names)
