"""A tool: a plain function, with what a model must know to call it and how a call is run.

``@tool`` makes one; calling it calls the function, as before. A tool is a value: for other terms (a
timeout, a limit) make another with ``dataclasses.replace``.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

from kedge.errors import InvalidTool
from kedge.tools.concurrency import ConcurrencyLimit
from kedge.tools.schema import (
    ArgumentReader,
    build_explicit_schema,
    build_free_form,
    build_function_schema,
    freeze_schema,
)
from kedge.tools.signature import ToolSignature, get_function_name, parse_signature
from kedge.turns import FrozenMap
from kedge.turns.frozen_json import thaw

P = ParamSpec("P")
R = TypeVar("R")

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a custom tool's text must look like: a Lark grammar or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class ExecutionOptions(TypedDict, total=False):
    """How the calls of a tool are run."""

    timeout: float | None
    """Seconds that one attempt may take; waiting for a place does not count."""
    retries: int
    """How often a failed attempt is made again."""
    retry_on: tuple[type[Exception], ...]
    """The exceptions after which an attempt is made again; running out of time is a TimeoutError."""
    retry_wait: float
    """Seconds before the second attempt; each further wait is twice as long."""
    concurrency: int | None
    """How many calls may run at once, in one event loop."""
    approval: bool | None
    """True: never runs unless approved. False: is never asked about. None: if there is who to ask."""


class ToolOptions(ExecutionOptions, total=False):
    """Everything that can be said about a tool besides its function."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """A JSON schema written by hand; the function gets the JSON values, unchecked but for names."""
    strict: bool
    custom: bool
    grammar: Grammar


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Tool(Generic[P, R]):
    """A function that a model may call; made by ``tool``."""

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
    limit: ConcurrencyLimit | None = field(init=False)

    def __post_init__(self) -> None:
        for name, fits, wanted in FIELD_CHECKS:
            if not fits(getattr(self, name)):
                raise InvalidTool(self.name, f"its {name} must be {wanted}")
        object.__setattr__(self, "parameters", freeze_schema(self.reader))
        object.__setattr__(
            self, "limit", ConcurrencyLimit(self.concurrency) if self.concurrency else None
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, with none of the terms."""
        return self.function(*args, **kwargs)

    def definition(self) -> dict[str, Any]:
        """The tool as the Responses API wants it."""
        described = {"description": self.description} if self.description else {}
        if self.custom:
            return {
                "type": "custom",
                "name": self.name,
                **described,
                **_grammar_format(self.grammar),
            }
        return {
            "type": "function",
            "name": self.name,
            **described,
            "parameters": thaw(self.parameters),
            # Said even when false: the API takes an absent one for true.
            "strict": self.strict,
        }

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


FieldCheck = tuple[str, Callable[[Any], bool], str]
FIELD_CHECKS: tuple[FieldCheck, ...] = (
    (
        "name",
        lambda v: bool(NAME_PATTERN.fullmatch(v)),
        "1 to 64 letters, digits, _ or -; give it a name=",
    ),
    ("timeout", lambda v: v is None or (_is_duration(v) and v > 0), "a positive number of seconds"),
    ("retries", lambda v: _is_count(v) and v >= 0, "0 or more"),
    ("retry_wait", lambda v: _is_duration(v) and v >= 0, "0 or more seconds"),
    ("concurrency", lambda v: v is None or (_is_count(v) and v > 0), "at least 1"),
)


def _grammar_format(grammar: Grammar | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    described = {"syntax": grammar.syntax, "definition": grammar.definition}
    return {"format": {"type": "grammar", **described}}


@overload
def tool(function: Callable[P, R], /, **options: Unpack[ToolOptions]) -> Tool[P, R]: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Make a tool of a typed function: ``@tool``, ``@tool(timeout=5)`` or ``tool(f, name="g")``."""
    return partial(_make_tool, options) if function is None else _make_tool(options, function)


def _make_tool(options: ToolOptions, function: Callable[P, R]) -> Tool[P, R]:
    if isinstance(function, Tool):
        raise InvalidTool(function.name, "it is one already; dataclasses.replace changes its terms")
    terms: Any = dict(options)
    by_hand = terms.pop("parameters", None)
    name = terms.pop("name", "") or get_function_name(function)
    if terms.get("grammar"):
        terms["custom"] = True
    if by_hand is not None:
        if terms.get("custom"):
            raise InvalidTool(name, "a custom tool takes free text and has no parameters")
        terms.setdefault("description", "")
        return Tool(
            name=name, function=function, reader=build_explicit_schema(name, by_hand), **terms
        )
    signature = parse_signature(function)
    terms.setdefault("description", signature.description)
    reader = _build_reader(name, signature, options)
    return Tool(name=name, function=function, reader=reader, **terms)


def _build_reader(name: str, signature: ToolSignature, options: ToolOptions) -> ArgumentReader:
    if options.get("custom") or options.get("grammar"):
        return build_free_form(name, signature)
    return build_function_schema(name, signature, strict=options.get("strict", False))
