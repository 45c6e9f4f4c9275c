"""The Tool: a function, its schema for the model, and the options for running its calls.

``@tool`` creates one; calling it calls the function. A tool is an immutable value: to change an option (a
timeout, a limit) create another with ``dataclasses.replace``.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

from kedge.engines.request_options import to_definition
from kedge.errors import InvalidTool
from kedge.tools.schema import (
    ArgumentReader,
    build_explicit_schema,
    build_free_form,
    build_function_schema,
)
from kedge.tools.signature import get_function_name, parse_signature
from kedge.turns.frozen_json import FrozenMap, thaw

P = ParamSpec("P")
R = TypeVar("R")

MAX_NAME_CHARS = 64
NAME_PATTERN = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of a custom tool's text.

    Args:
        syntax: ``lark`` or ``regex``.
        definition: The grammar or the regular expression.
    """

    syntax: Literal["lark", "regex"]
    definition: str


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

    def __post_init__(self) -> None:
        for name, is_valid, expected in FIELD_CHECKS:
            if not is_valid(getattr(self, name)):
                raise InvalidTool(self.name, f"its {name} must be {expected}")
        object.__setattr__(self, "parameters", self.reader.json_schema)
        object.__setattr__(self, "frozen_definition", to_definition(self.definition()))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, without timeout, retries or approval."""
        return self.function(*args, **kwargs)

    def definition(self) -> dict[str, Any]:
        """Return the tool in the form of the Responses API."""
        described: dict[str, Any] = {"description": self.description} if self.description else {}
        if self.custom:
            if self.grammar is not None:
                described["format"] = {"type": "grammar", **asdict(self.grammar)}
            return {"type": "custom", "name": self.name, **described}
        return {
            "type": "function",
            "name": self.name,
            **described,
            "parameters": thaw(self.parameters),
            # Sent even when false: the API treats a missing value as true.
            "strict": self.strict,
        }

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


AnyTool = Tool[..., Any]
"""A tool with any parameters and any result."""


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


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
    return partial(_make_tool, options) if function is None else _make_tool(options, function)


def _make_tool(options: ToolOptions, function: Callable[P, R]) -> Tool[P, R]:
    if isinstance(function, Tool):
        raise InvalidTool(
            function.name, "it is already a tool; change its options with dataclasses.replace"
        )
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
