"""Convert the signature of a function into the arguments of a tool.

A model calls a tool with named arguments, so each parameter needs a type and must be passable by name;
other functions raise ``InvalidTool``. A parameter annotated ``ToolCallBlock`` receives the call itself and is
not an argument. Arguments bound by a ``functools.partial`` are never shown to the model.

Descriptions are from the docstring, which ``docstring_parser`` reads in Google, NumPy and Sphinx style. Exceptions
are omitted, because a model cannot catch them. The parser is imported when the first tool is created.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, Self, cast, get_args, get_origin, get_type_hints

import msgspec

from kedge.errors import InvalidTool
from kedge.turns import ToolCallBlock
from kedge.turns.frozen_json import EMPTY

if TYPE_CHECKING:
    import docstring_parser


OMITTED_SECTIONS = {"param", "raises", "returns", "rtype", "todo", "type", "warns"}
_SECTION_HEADER = re.compile(r"\w[\w ]*:")


class Docstring(msgspec.Struct, frozen=True):
    """The description of a function and of its parameters, by name."""

    description: str = ""
    parameters: Mapping[str, str] = EMPTY


def parse_docstring(text: str | None) -> Docstring:
    """Parse a docstring in any of the three styles; unknown sections become part of the description."""
    from docstring_parser import ParseError, parse

    source = cleandoc(text or "")
    try:
        parsed = parse(source)
    except (ParseError, IndexError):  # it raises IndexError for a field without a name
        return Docstring(source)
    prose = [
        parsed.description or "",
        *_iter_sections(parsed),
        _find_trailing_prose(source, parsed),
    ]
    if parsed.returns:
        result = parsed.returns.description or parsed.returns.type_name
        if result:
            prose.append(f"Returns: {_join_lines(result)}")
    parameters = {
        name.strip(" *"): _join_lines(parameter.description or "")
        for parameter in parsed.params
        for name in parameter.arg_name.split(",")
    }
    return Docstring("\n\n".join(text.strip("\n") for text in prose if text), parameters)


def _iter_sections(parsed: "docstring_parser.Docstring") -> Iterator[str]:
    """Yield the other sections, such as examples, with their titles."""
    for section in parsed.meta:
        if section.args[0] not in OMITTED_SECTIONS and section.description:
            yield f"{' '.join(section.args).capitalize()}: {section.description}"


def _find_trailing_prose(source: str, parsed: "docstring_parser.Docstring") -> str:
    """Return unindented text after a Google section, which ``docstring_parser`` drops."""
    from docstring_parser import DocstringStyle

    if parsed.style is not DocstringStyle.GOOGLE or not parsed.meta:
        return ""
    description = parsed.description or ""
    _, _, after = source.removeprefix(description).partition(":\n")
    lines = [line for line in after.splitlines() if line[:1].strip() and line not in description]
    return "\n".join(line for line in lines if not _SECTION_HEADER.fullmatch(line))


def _join_lines(text: str) -> str:
    return " ".join(text.split())


Function = Callable[..., Any]

UNSUPPORTED_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only; models pass arguments by name",
    inspect.Parameter.VAR_POSITIONAL: "accepts any number of values; use a list instead",
    inspect.Parameter.VAR_KEYWORD: "accepts any names; declare each argument, or use a dict",
}
REQUIRED: Any = inspect.Parameter.empty


class ToolArgument(msgspec.Struct, frozen=True):
    """One argument that a model may pass."""

    name: str
    annotation: Any
    default: Any = REQUIRED
    description: str = ""


class ToolSignature(msgspec.Struct, frozen=True):
    """The name, description and arguments of a function, and the parameter that receives the call."""

    function_name: str
    description: str
    arguments: tuple[ToolArgument, ...]
    call_parameter: str = ""


def parse_signature(function: Function) -> ToolSignature:
    """Return the signature of a function.

    Raises:
        InvalidTool: A model could not call the function.
    """
    name = get_function_name(function)
    _check_callable(function, name)
    hints = _resolve_hints(function, name)
    documented = parse_docstring(_get_docstring(function))
    arguments: list[ToolArgument] = []
    receives_call = ""
    for parameter in _list_parameters(function, name):
        if strip_annotated(hints.get(parameter.name)) is ToolCallBlock:
            receives_call = parameter.name
            continue
        annotation = _get_annotation(parameter, hints, name)
        text = _find_description(annotation) or documented.parameters.get(parameter.name, "")
        arguments.append(ToolArgument(parameter.name, annotation, parameter.default, text))
    return ToolSignature(name, documented.description, tuple(arguments), receives_call)


def get_function_name(function: Function) -> str:
    """Return the name of the function inside a ``partial``, or the class of a callable object."""
    function = _unwrap_partial(function)
    return getattr(function, "__name__", type(function).__name__)


def unwrap_callable(function: Function) -> Function:
    """Return the plain function or method behind a callable."""
    function = _unwrap_partial(function)
    if inspect.isroutine(function):
        return function
    return function.__call__  # pyright: ignore[reportFunctionMemberAccess]


def is_async(function: Function) -> bool:
    """Return whether calling the function returns a coroutine."""
    return inspect.iscoroutinefunction(unwrap_callable(function))


def _unwrap_partial(function: Function) -> Function:
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return function


def strip_annotated(annotation: Any) -> Any:
    """Return the type in ``Annotated[type, …]``."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def _check_callable(function: object, name: str) -> None:
    if inspect.isclass(function):
        raise InvalidTool(name, "it is a class; pass a function")
    if not callable(function):
        raise InvalidTool(name, f"it is of type {type(function).__name__}; pass a function")
    code = unwrap_callable(function)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise InvalidTool(name, "it is a generator; a tool must return its result once")


def _list_parameters(function: Function, name: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidTool(name, "its signature is not available; wrap it in a def") from error
    if isinstance(function, partial):
        bound_names = cast("partial[Any]", function).keywords
        parameters = [each for each in parameters if each.name not in bound_names]
    for parameter in parameters:
        problem = UNSUPPORTED_KINDS.get(parameter.kind)
        if problem:
            raise InvalidTool(name, f"parameter {parameter.name} {problem}")
    return parameters


def _resolve_hints(function: Function, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(unwrap_callable(function), include_extras=True)
    except NameError as error:
        raise InvalidTool(
            name,
            f"the annotation {error.name!r} cannot be resolved; define it at the top of the module, "
            "outside `if TYPE_CHECKING`",
        ) from error
    except Exception as error:  # an annotation in quotes may be any expression
        detail = f"{type(error).__name__}: {error}"
        raise InvalidTool(name, f"its annotations cannot be evaluated: {detail}") from error


def _get_annotation(parameter: inspect.Parameter, hints: dict[str, Any], name: str) -> Any:
    if parameter.name in hints:
        annotation = hints[parameter.name]
        if _contains_self(annotation):
            problem = f"parameter {parameter.name} is annotated with Self; name its class instead"
            raise InvalidTool(name, problem)
        return annotation
    if parameter.name == "self":
        raise InvalidTool(name, "it is an unbound method; pass object.method")
    raise InvalidTool(
        name, f"parameter {parameter.name} has no type; annotate it (Any accepts every value)"
    )


def _contains_self(annotation: Any) -> bool:
    """Return whether an annotation is or contains ``Self``, which is unknown outside of the method's class."""
    return annotation is Self or any(map(_contains_self, get_args(annotation)))


def _find_description(annotation: Any) -> str:
    """Return the text of ``Annotated[int, "text"]`` or of a ``Doc``."""
    if get_origin(annotation) is not Annotated:
        return ""
    texts = (getattr(extra, "documentation", extra) for extra in get_args(annotation)[1:])
    return next((text for text in texts if isinstance(text, str)), "")


def _get_docstring(function: Function) -> str | None:
    """Return the docstring of the user's function, not that of ``partial`` or ``object``."""
    function = _unwrap_partial(function)
    if inspect.isroutine(function):
        return inspect.getdoc(function)
    return unwrap_callable(function).__doc__ or type(function).__doc__
