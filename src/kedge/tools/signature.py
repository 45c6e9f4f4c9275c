"""The signature of a function, read as the parameters of a tool.

A model calls a tool with named arguments, so each parameter needs a name to be called by and a type.
What has none, or cannot be named, is refused here with the reason. A parameter annotated
``ToolCallBlock`` is no argument: it receives the call itself. What a ``functools.partial`` has bound
is no argument either, and never reaches the model.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from kedge.errors import InvalidTool
from kedge.tools.docstrings import parse_docstring
from kedge.turns import ToolCallBlock

Function = Callable[..., Any]

UNSUPPORTED_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only; a model names its arguments",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values; take a list instead",
    inspect.Parameter.VAR_KEYWORD: "takes any names; write each argument out, or take a dict",
}
REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class ToolArgument:
    """One argument that a model may give."""

    name: str
    annotation: Any
    default: Any = REQUIRED
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """A function as a tool: its arguments, what it does, and who receives the call."""

    function_name: str
    description: str
    arguments: tuple[ToolArgument, ...]
    call_parameter: str = ""


def parse_signature(function: Function) -> ToolSignature:
    """Read a function; raise ``InvalidTool`` for what no model could call."""
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
    """What the function is called, seen through ``partial``; an object goes by its class."""
    function = _unwrap_partial(function)
    return getattr(function, "__name__", type(function).__name__)


def unwrap_callable(function: Function) -> Function:
    """The plain function or method that a callable runs in the end."""
    function = _unwrap_partial(function)
    return function if inspect.isroutine(function) else function.__call__  # pyright: ignore[reportFunctionMemberAccess]


def is_async(function: Function) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(unwrap_callable(function))


def _unwrap_partial(function: Function) -> Function:
    return (
        _unwrap_partial(cast("partial[Any]", function).func)
        if isinstance(function, partial)
        else function
    )


def strip_annotated(annotation: Any) -> Any:
    """The type in ``Annotated[type, …]``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _check_callable(function: object, name: str) -> None:
    if not callable(function) or inspect.isclass(function):
        kind = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        raise InvalidTool(name, f"it is {kind}; give a function")
    code = unwrap_callable(function)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise InvalidTool(name, "it yields; a tool returns its result once, so collect it first")


def _list_parameters(function: Function, name: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidTool(name, "Python does not tell its parameters; wrap it in a def") from error
    bound: dict[str, Any] = function.keywords if isinstance(function, partial) else {}
    kept = [parameter for parameter in parameters if parameter.name not in bound]
    for parameter in kept:
        if problem := UNSUPPORTED_KINDS.get(parameter.kind):
            raise InvalidTool(name, f"parameter {parameter.name} {problem}")
    return kept


def _resolve_hints(function: Function, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(unwrap_callable(function), include_extras=True)
    except NameError as error:
        raise InvalidTool(
            name,
            f"the annotation {error.name!r} cannot be resolved; define it at the top of the module, "
            "outside `if TYPE_CHECKING`",
        ) from error
    except (TypeError, AttributeError, SyntaxError) as error:
        raise InvalidTool(name, f"its annotations cannot be read: {error}") from error


def _get_annotation(parameter: inspect.Parameter, hints: dict[str, Any], name: str) -> Any:
    if parameter.name in hints:
        return hints[parameter.name]
    if parameter.name == "self":
        raise InvalidTool(name, "it is a method without its object; make the tool of object.method")
    raise InvalidTool(
        name, f"parameter {parameter.name} has no type; annotate it (Any says anything goes)"
    )


def _find_description(annotation: Any) -> str:
    """The text of ``Annotated[int, "text"]``, or of a ``Doc``."""
    if get_origin(annotation) is not Annotated:
        return ""
    texts = (getattr(extra, "documentation", extra) for extra in get_args(annotation)[1:])
    return next((text for text in texts if isinstance(text, str)), "")


def _get_docstring(function: Function) -> str | None:
    """The docstring of what the user wrote, not the one of ``partial`` or of ``object``."""
    function = _unwrap_partial(function)
    if inspect.isroutine(function):
        return inspect.getdoc(function)
    return unwrap_callable(function).__doc__ or type(function).__doc__
