"""The toolbox: tools that a model may call, by name.

The tools of a program are fixed. Those of a ``ToolSource``, such as an MCP server, may change at any time,
so a toolbox reads them when it is used. Names must be unambiguous: a tool of the program always retains its
name, and a tool of a source whose name is used twice is prefixed with the name of its source. All tools
with that name are prefixed, not only the later ones: otherwise a source could add a tool and receive the
calls that are intended for another source.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, cast

from kedge.engines.request_options import to_definition
from kedge.errors import InvalidTool, UnknownTool
from kedge.tools.tool import MAX_NAME_CHARS, AnyTool, Tool, tool
from kedge.turns import FrozenMap

TextEdit = Callable[[str], str]


class ToolSource:
    """An external source of tools, which may change while they are used.

    Attributes:
        name: The prefix of its tools whose names are used twice.
        tools: The current tools; replaced, never changed in place.
    """

    name: str = ""
    tools: tuple[AnyTool, ...] = ()


class _RestrictedSource(ToolSource):
    """A source without some of its tools, also after it changes."""

    def __init__(self, source: ToolSource, excluded: frozenset[str]) -> None:
        self.source, self.excluded = source, excluded
        self.name = source.name

    @property
    def tools(self) -> tuple[AnyTool, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(each for each in self.source.tools if each.name not in self.excluded)


class _Merged(NamedTuple):
    """The tools of a toolbox at one moment; ``origins`` has the source of a tool and its name there."""

    current: tuple[tuple[AnyTool, ...], ...] = ()
    tools: Mapping[str, AnyTool] = {}
    origins: Mapping[str, tuple[ToolSource, str]] = {}


class Toolbox(Mapping[str, AnyTool]):
    """A mapping of names to tools, in the order of the arguments; tools of sources come last.

    Args:
        *tools: Tools, plain functions, which become tools with default options, other toolboxes,
            sources of tools, or definitions that are only offered, such as ``{"type": "web_search"}``.

    Raises:
        InvalidTool: Two tools have the same name, or a function cannot be a tool.
    """

    __slots__ = ("_merged", "functions", "offered", "sources")

    def __init__(self, *tools: "Entry") -> None:
        self.functions: dict[str, AnyTool] = {}
        """The tools of the program."""
        self.sources: tuple[ToolSource, ...] = ()
        """The sources whose current tools belong to this toolbox."""
        self.offered: tuple[Mapping[str, Any], ...] = ()
        """Definitions that a model may use and this toolbox does not run: those of the provider or the caller."""
        self._merged = _Merged()
        for entry in tools:
            self._add(entry)

    def _add(self, entry: "Entry") -> None:
        match entry:
            case Toolbox():
                self.sources += entry.sources
                self.offered += entry.offered
                for each in entry.functions.values():
                    self._add(each)
            case ToolSource():
                self.sources += (entry,)
            case Mapping():
                self.offered += (_check_definition(entry),)
            case _:
                added = cast("AnyTool", entry if isinstance(entry, Tool) else tool(entry))
                if added.name in self.functions:
                    raise InvalidTool(
                        added.name,
                        "this toolbox already has a tool of that name; set another name=",
                    )
                self.functions[added.name] = added

    @property
    def _tools(self) -> Mapping[str, AnyTool]:
        """The tools at this moment; computed again only after a source has changed."""
        if not self.sources:
            return self.functions
        current = tuple(source.tools for source in self.sources)
        if self._merged.current != current:
            self._merged = self._merge_sources(current)
        return self._merged.tools

    def _merge_sources(self, current: tuple[tuple[AnyTool, ...], ...]) -> _Merged:
        names = Counter([*self.functions, *(each.name for tools in current for each in tools)])
        merged = dict(self.functions)
        origins: dict[str, tuple[ToolSource, str]] = {}
        for source, tools in zip(self.sources, current, strict=True):
            for each in tools:
                prefix = f"{source.name}_" if names[each.name] > 1 else ""
                name = _find_free_name(f"{prefix}{each.name}", merged)
                merged[name] = each if name == each.name else replace(each, name=name)
                origins[name] = (source, each.name)
        return _Merged(current, merged, origins)

    def __getitem__(self, name: str) -> AnyTool:
        """Return the tool of this name.

        Raises:
            UnknownTool: There is none; the message suggests similar names.
        """
        tools = self._tools
        try:
            return tools[name]
        except KeyError:
            raise UnknownTool(name, list(tools)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def definitions(self, edit: TextEdit | None = None) -> list[dict[str, Any]]:
        """Return the tools in the form of the Responses API's ``tools`` parameter.

        Args:
            edit: A function that is applied to the descriptions of tools from sources, which are external text.
        """
        tools = [
            each.definition()
            if edit is None or each.name in self.functions
            else edit_descriptions(each.definition(), edit)
            for each in self._tools.values()
        ]
        return [*tools, *map(dict[str, Any], self.offered)]

    def frozen_definitions(self, edit: TextEdit | None = None) -> tuple[FrozenMap, ...]:
        """Return the definitions as parts of a request, which cannot be changed; see ``definitions``."""
        tools = self._tools.values()
        if edit is None or not self.sources:
            return (*(each.frozen_definition for each in tools), *map(to_definition, self.offered))
        return tuple(map(to_definition, self.definitions(edit)))

    def with_tools(self, *tools: "Entry") -> "Toolbox":
        """Return a toolbox with these tools added."""
        return Toolbox(self, *tools)

    def without(self, *names: str) -> "Toolbox":
        """Return a toolbox without the named tools.

        Raises:
            UnknownTool: One of the names is not in this toolbox.
        """
        removed = {self[name].name for name in names}
        excluded = [self._merged.origins[name] for name in removed - set(self.functions)]
        sources = (
            _RestrictedSource(
                source, frozenset(name for owner, name in excluded if owner is source)
            )
            for source in self.sources
        )
        remaining = (each for each in self.functions.values() if each.name not in removed)
        return Toolbox(*remaining, *sources, *self.offered)

    def __repr__(self) -> str:
        return f"<Toolbox {', '.join(self._tools) or 'empty'}>"


Entry = AnyTool | Callable[..., Any] | Toolbox | ToolSource | Mapping[str, Any]
"""What a toolbox accepts."""


def _check_definition(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a definition of the Responses API, or raise ``InvalidTool``."""
    if not isinstance(definition.get("type"), str):
        name = str(definition.get("name") or "a definition")
        problem = "it has no type; write {'type': 'function', 'name': …, 'parameters': …}"
        raise InvalidTool(name, problem)
    return definition


def edit_descriptions(value: Any, edit: TextEdit) -> Any:
    """Return a definition or a JSON schema with its descriptions and titles edited."""
    match value:
        case dict():
            return {
                name: edit(member)
                if name in ("description", "title") and isinstance(member, str)
                else edit_descriptions(member, edit)
                for name, member in cast("dict[str, Any]", value).items()
            }
        case list():
            return [edit_descriptions(each, edit) for each in cast("list[Any]", value)]
        case _:
            return value


def _find_free_name(name: str, used: Mapping[str, object]) -> str:
    """Return the name, within its maximum length, or the first numbered form that is free."""
    if (short := name[:MAX_NAME_CHARS]) not in used:
        return short
    numbered = (f"{name[: MAX_NAME_CHARS - 4]}_{number}" for number in count(2))
    return next(each for each in numbered if each not in used)
