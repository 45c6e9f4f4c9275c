"""The Tool: a function, its schema for the model, and the options for running its calls; and the toolbox.

``@tool`` creates one; calling it calls the function. A tool is an immutable value: to change an option (a
timeout, a limit) create another with ``dataclasses.replace``.

A toolbox has tools by name. The tools of a program are fixed. Those of a ``ToolSource``, such as an MCP server, may
change at any time, so a toolbox reads them when it is used. Names must be unambiguous: a tool of the program always
retains its name, and a tool of a source whose name is used twice is prefixed with the name of its source. All tools
with that name are prefixed, not only the later ones: otherwise a source could add a tool and receive the
calls that are intended for another source.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import msgspec

from kedge._internal.argument_types import check_fields, check_members, checked
from kedge.errors import InvalidTool, UnknownSetting, UnknownTool
from kedge.tools.definitions import list_tools, to_definition
from kedge.tools.schema import (
    ArgumentReader,
    build_explicit_schema,
    build_free_form,
    build_function_schema,
)
from kedge.tools.signature import get_function_name, is_async, parse_signature
from kedge.turns.frozen_json import FrozenMap, thaw

P = ParamSpec("P")
R = TypeVar("R")

MAX_NAME_CHARS = 64
NAME_PATTERN = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")


class Grammar(msgspec.Struct, frozen=True):
    """The grammar of a custom tool's text.

    Args:
        syntax: ``lark`` or ``regex``.
        definition: The grammar or the regular expression.
    """

    syntax: Literal["lark", "regex"]
    definition: str

    def __post_init__(self) -> None:
        check_fields(self)


class ExecutionOptions(TypedDict, total=False):
    """Options for running the calls of a tool."""

    timeout: float | None
    """Maximum seconds of one attempt, not counting the wait for the concurrency limit."""
    retries: int
    """Maximum number of retries after a failed attempt."""
    retry_on: tuple[type[Exception], ...]
    """Exceptions that are retried; a timeout is a TimeoutError."""
    retry_wait: float
    """Seconds before the first retry, doubled for each further one."""
    concurrency: int | None
    """Maximum number of concurrent calls in one event loop."""
    approval: bool | None
    """True: requires approval. False: never requires approval. None: if an approver is configured."""


class ToolOptions(ExecutionOptions, total=False):
    """Options of ``tool``."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """An explicit JSON schema; the function receives JSON values of which only the names are checked."""
    strict: bool
    custom: bool
    grammar: Grammar


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False, kw_only=True)
class Tool(Generic[P, R]):
    """A function that a model may call, created by ``tool``.

    The options are described at ``ToolOptions`` and ``ExecutionOptions``.

    Raises:
        InvalidTool: An option is out of range.
    """

    name: str
    description: str
    function: Callable[P, R]
    reader: ArgumentReader
    strict: bool = False
    custom: bool = False
    grammar: Grammar | None = None
    timeout: float | None = None
    retries: int = 0
    retry_on: tuple[type[Exception], ...] = (Exception,)
    retry_wait: float = 0.5
    concurrency: int | None = None
    approval: bool | None = None
    parameters: FrozenMap = field(init=False)
    frozen_definition: FrozenMap = field(init=False)
    """The definition that requests contain."""
    is_async: bool = field(init=False)
    """Whether calling the function returns a coroutine; otherwise it runs in a thread."""

    def __post_init__(self) -> None:
        for name, is_valid, expected in FIELD_CHECKS:
            if not is_valid(getattr(self, name)):
                raise InvalidTool(self.name, f"its {name} must be {expected}")
        object.__setattr__(self, "parameters", self.reader.json_schema)
        object.__setattr__(self, "frozen_definition", to_definition(self._build_definition()))
        object.__setattr__(self, "is_async", is_async(self.function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, without timeout, retries or approval."""
        return self.function(*args, **kwargs)

    def definition(self) -> dict[str, Any]:
        """Return the tool in the form of the Responses API."""
        return thaw(self.frozen_definition)

    def _build_definition(self) -> dict[str, Any]:
        definition: dict[str, Any] = {"type": "function", "name": self.name}
        if self.description:
            definition["description"] = self.description
        if self.custom:
            definition["type"] = "custom"
            if self.grammar is not None:
                definition["format"] = {"type": "grammar", **msgspec.structs.asdict(self.grammar)}
        else:
            definition["parameters"] = self.parameters
            # Sent even when false: the API treats a missing value as true.
            definition["strict"] = self.strict
        return definition

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


AnyTool = Tool[..., Any]
"""A tool with any parameters and any result."""


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


FieldCheck = tuple[str, Callable[[Any], bool], str]
FIELD_CHECKS: tuple[FieldCheck, ...] = (
    (
        "name",
        lambda v: bool(NAME_PATTERN.fullmatch(v)),
        "1 to 64 letters, digits, _ or -; set name=",
    ),
    ("timeout", lambda v: v is None or (_is_duration(v) and v > 0), "a positive number of seconds"),
    ("retries", lambda v: _is_count(v) and v >= 0, "0 or more"),
    ("retry_wait", lambda v: _is_duration(v) and v >= 0, "0 or more seconds"),
    ("concurrency", lambda v: v is None or (_is_count(v) and v > 0), "at least 1"),
)


@overload
def tool(function: Callable[P, R], /, **options: Unpack[ToolOptions]) -> Tool[P, R]: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Create a tool from a typed function.

    Use it as ``@tool``, ``@tool(timeout=5)`` or ``tool(function, name="other")``. The schema is generated from
    the annotations, the description from the docstring.

    Args:
        function: The function; omitted when used as a decorator with options.
        **options: ``name``, ``description``, ``parameters`` (an explicit JSON schema), ``strict``,
            ``custom``, ``grammar``, and the execution options ``timeout``, ``retries``, ``retry_on``,
            ``retry_wait``, ``concurrency`` and ``approval``.

    Returns:
        The tool, or a decorator that creates it.

    Raises:
        InvalidTool: A model could not call the function, or an option is out of range.
    """
    if function is None:
        return partial(_make_tool, options)
    return _make_tool(options, function)


def _make_tool(options: ToolOptions, function: Callable[P, R]) -> Tool[P, R]:
    if isinstance(function, Tool):
        raise InvalidTool(
            function.name, "it is already a tool; change its options with dataclasses.replace"
        )
    check_members(options, ToolOptions)
    for unknown in options.keys() - ToolOptions.__optional_keys__:
        raise UnknownSetting(unknown, ToolOptions.__optional_keys__, "a tool")
    fields: Any = dict(options)
    parameters = fields.pop("parameters", None)
    name = fields.pop("name", "") or get_function_name(function)
    if fields.get("grammar"):
        fields["custom"] = True
    if parameters is None:
        signature = parse_signature(function)
        fields.setdefault("description", signature.description)
        if fields.get("custom"):
            reader = build_free_form(name, signature)
        else:
            reader = build_function_schema(name, signature, strict=fields.get("strict", False))
    elif fields.get("custom"):
        raise InvalidTool(name, "a custom tool receives free text and has no parameters")
    else:
        fields.setdefault("description", "")
        reader = build_explicit_schema(name, parameters)
    return Tool(name=name, function=function, reader=reader, **fields)


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
        self.source = source
        self.excluded = excluded
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
            case Tool():
                self._add_tool(entry)
            case _:
                self._add_tool(_make_tool({}, entry))

    def _add_tool(self, added: AnyTool) -> None:
        if added.name in self.functions:
            problem = "this toolbox already has a tool of that name; set another name="
            raise InvalidTool(added.name, problem)
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
                name = each.name
                if names[name] > 1:
                    name = f"{source.name}_{name}"
                name = _find_free_name(name, merged)
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

    @checked
    def definitions(self, edit: TextEdit | None = None) -> list[dict[str, Any]]:
        """Return the tools in the form of the Responses API's ``tools`` parameter.

        Args:
            edit: A function that is applied to the descriptions of tools from sources, which are external text.
        """
        return [thaw(each) for each in self.frozen_definitions(edit)]

    def frozen_definitions(self, edit: TextEdit | None = None) -> tuple[FrozenMap, ...]:
        """Return the definitions as parts of a request, which cannot be changed; see ``definitions``."""
        definitions: list[FrozenMap] = []
        for each in self._tools.values():
            if edit is None or each.name in self.functions:
                definitions.append(each.frozen_definition)
            else:
                definitions.append(to_definition(edit_descriptions(each.definition(), edit)))
        return (*definitions, *map(to_definition, self.offered))

    def with_tools(self, *tools: "Entry") -> "Toolbox":
        """Return a toolbox with these tools added."""
        return Toolbox(self, *tools)

    @checked
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


Toolset = Entry | Iterable[Entry]
"""A toolbox, functions, tools, sources and definitions that are only offered, or one of these."""


def build_toolbox(tools: Toolset) -> Toolbox:
    """Return the toolbox for a toolbox, a list of tools or one tool.

    Raises:
        InvalidSetting: It is none of them.
        InvalidTool: A function cannot be a tool, or two tools have the same name.
    """
    if isinstance(tools, Toolbox):
        return tools
    if isinstance(tools, ToolSource):
        return Toolbox(tools)
    return Toolbox(*list_tools(tools))


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
            edited: dict[str, Any] = {}
            for name, member in cast("dict[str, Any]", value).items():
                if name in ("description", "title") and isinstance(member, str):
                    edited[name] = edit(member)
                else:
                    edited[name] = edit_descriptions(member, edit)
            return edited
        case list():
            return [edit_descriptions(each, edit) for each in cast("list[Any]", value)]
        case _:
            return value


def _find_free_name(name: str, used: Mapping[str, object]) -> str:
    """Return the name, within its maximum length, or the first numbered form that is free."""
    short_name = name[:MAX_NAME_CHARS]
    if short_name not in used:
        return short_name
    numbered = (f"{name[: MAX_NAME_CHARS - 4]}_{number}" for number in count(2))
    return next(each for each in numbered if each not in used)
