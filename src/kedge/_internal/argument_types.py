"""Check the types of arguments against the annotations of public functions.

``@checked`` is for functions that programs call: an argument of a wrong type raises ``InvalidType``, an
``InvalidSetting`` that names it, before the function does anything. Without it, a wrong type would be an error of
Python somewhere inside, or would be accepted and stored.

Types are checked as far as the annotation determines them: classes, unions, the elements of lists and the keys of
mappings. A ``bool`` is not a number, and a text is not a list. For a ``Literal`` only the type is checked: the
function knows the valid values. Protocols, annotations in quotes and those that accept anything are not checked. A
value in place of a Turn or block raises ``InvalidTurn``.
"""

import collections.abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from inspect import Parameter, iscoroutinefunction, signature
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from typing_extensions import is_protocol

from kedge.errors import InvalidTurn, InvalidType, describe_type

F = TypeVar("F", bound=Callable[..., Any])


class _Kind(NamedTuple):
    """A kind of values that an annotation accepts."""

    label: str
    accepts: Callable[[object], bool]
    is_turn: bool = False
    """Whether the values are Turns or blocks, which have an error of their own."""


_CALLABLE: Any = collections.abc.Callable
_Kinds = tuple[_Kind, ...]
"""The kinds that an annotation accepts; any value if there are none."""


def checked(function: F) -> F:
    """Return a function that raises an error for arguments of another type than their annotations.

    Args:
        function: A function or method, sync or async.

    Returns:
        The function, which raises ``InvalidType``, or ``InvalidTurn`` for a value in place of a Turn or block.
    """
    return checked_except()(function)


def checked_except(*names: str) -> Callable[[F], F]:
    """Return a decorator like ``checked``, for a function that checks some of its arguments itself.

    Args:
        *names: The parameters of which the function's own errors say more than their types.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            _check_call(_read_parameters(function, names), args, kwargs)
            return function(*args, **kwargs)

        @wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            _check_call(_read_parameters(function, names), args, kwargs)
            return await function(*args, **kwargs)

        return cast("F", run_async if iscoroutinefunction(function) else run)

    return decorate


def _check_call(
    parameters: "_Parameters", args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise an error for the first argument of a call that has a wrong type.

    A call with too many or too few arguments raises its own error later. ``Signature.bind`` would take as long as the
    rest of a small call.
    """
    kinds = parameters.kinds
    for name, value in zip(parameters.positional, args, strict=False):
        check_kind(name, value, kinds.get(name, ()))
    if parameters.variadic:
        for value in args[len(parameters.positional) :]:
            check_kind(parameters.variadic, value, kinds.get(parameters.variadic, ()))
    for name, value in kwargs.items():
        check_kind(name, value, kinds.get(name, ()))


class _Parameters(NamedTuple):
    """The parameters of a function, and what they accept."""

    positional: tuple[str, ...]
    """The names of the parameters for single positional arguments, in their order."""
    kinds: Mapping[str, _Kinds]
    """The kinds of values of each parameter that is checked."""
    variadic: str
    """The parameter for any number of positional arguments; empty if there is none."""


@cache
def _read_parameters(function: Callable[..., Any], unchecked: tuple[str, ...]) -> _Parameters:
    """Return the parameters of a function; only its first call reads them: most functions are never called."""
    parameters = signature(function).parameters.values()
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in positional)
    kinds: dict[str, _Kinds] = {}
    variadic = ""
    for parameter in parameters:
        is_options = parameter.kind is Parameter.VAR_KEYWORD  # which ``check_members`` checks
        if is_options or parameter.name in unchecked:
            continue
        kinds[parameter.name] = list_kinds(parameter.annotation)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            variadic = parameter.name
    return _Parameters(names, kinds, variadic)


def check_members(values: Mapping[str, object], form: type) -> None:
    """Check keyword arguments against a ``TypedDict``; unknown names are not checked.

    Raises:
        InvalidType: A value has another type than its annotation.
    """
    annotations: Mapping[str, Any] = form.__annotations__
    for name, value in values.items():
        check_kind(name, value, list_kinds(annotations.get(name, Any)))


def check_fields(instance: object) -> None:
    """Check the fields of a dataclass or struct, in its ``__post_init__``.

    Raises:
        InvalidType: A field has another type than its annotation.
    """
    for base in reversed(type(instance).__mro__):
        annotations: Mapping[str, Any] = vars(base).get("__annotations__", {})
        for name in annotations.keys() & dir(instance):
            check_kind(name, getattr(instance, name), list_kinds(annotations[name]))


def check_kind(name: str, value: object, kinds: _Kinds) -> None:
    """Raise an error if a value is of none of these kinds."""
    if not kinds or any(kind.accepts(value) for kind in kinds):
        return
    expected = " or ".join(dict.fromkeys(kind.label for kind in kinds))
    problem = f"{name} must be {expected}, not {_describe(value)}"
    is_turn = all(kind.is_turn or kind.label in ("str", "None") for kind in kinds)
    if not is_turn or not any(kind.is_turn for kind in kinds):
        raise InvalidType(problem)
    if any(isinstance(each, Mapping) for each in (value, *_list_elements(value))):
        problem += "; blocks_from_messages converts messages and items"
    raise InvalidTurn(problem)


def _describe(value: object) -> str:
    """Return the type of a value, and those of the elements of a list or of the keys of a mapping."""
    name = type(value).__name__
    elements = _list_elements(value)
    if elements:
        return f"a {name} of {_list_types(elements)}"
    if isinstance(value, Mapping):
        keys = list(cast("Mapping[object, object]", value))
        if keys:
            return f"a {name} with keys of {_list_types(keys)}"
    return describe_type(cast("object", value))


def _list_types(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(describe_type, values)))


def _list_elements(value: object) -> list[object]:
    """Return the elements of a list; none of an iterator, which can be read only once."""
    if not isinstance(value, list | tuple | set | frozenset):
        return []
    return list(cast("Iterable[object]", value))


@cache
def list_kinds(annotation: Any) -> _Kinds:
    """Return the kinds of values that an annotation accepts; none if it is not checked."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Union or origin is UnionType:
        alternatives = [list_kinds(alternative) for alternative in arguments]
        if not all(alternatives):
            return ()
        return tuple(chain.from_iterable(alternatives))
    if origin is Annotated:
        return list_kinds(arguments[0])
    if origin is Literal:
        types: set[type] = {type(each) for each in arguments}
        return tuple(chain.from_iterable(map(list_kinds, types)))
    kind = NoneType if annotation is None else origin or annotation
    is_class = isinstance(kind, type) and not is_protocol(kind)
    if not is_class or kind in (Any, object, Parameter.empty):
        return ()
    if kind.__module__ in ("collections.abc", "builtins"):
        return (_make_builtin_kind(kind, arguments),)
    if hasattr(kind, "__optional_keys__"):  # a TypedDict, which has no instances
        return list_kinds(Mapping)
    is_turn = kind.__module__.startswith("kedge.turns")
    label = "block" if is_turn and kind.__name__.endswith("Block") else kind.__name__
    return (_Kind(label, partial(_is_instance, kind), is_turn),)


def _make_builtin_kind(kind: type, arguments: tuple[Any, ...]) -> _Kind:
    """Return the kind of a class of Python, or of a collection of ``arguments``."""
    if kind is NoneType:
        return _Kind("None", partial(_is_instance, NoneType))
    if kind is _CALLABLE:
        return _Kind("a function", callable)
    member_kinds = list_kinds(arguments[0]) if arguments else ()
    if kind is collections.abc.Mapping:
        return _Kind("a mapping", partial(_is_mapping, member_kinds))
    if kind is int:
        return _Kind("int", partial(_is_number, int))
    if kind is float:
        return _Kind("float", partial(_is_number, (int, float)))
    if issubclass(kind, str | bytes | bytearray | dict) or not issubclass(kind, Iterable):
        return _Kind(kind.__name__, partial(_is_instance, kind))
    labels = dict.fromkeys(member.label for member in member_kinds)
    label = "a list"
    if labels:
        label = f"a list of {' or '.join(labels)}"
    is_turn = any(member.is_turn for member in member_kinds)
    accepts = partial(_is_list, cast("type[object]", kind), member_kinds)
    return _Kind(label, accepts, is_turn)


def _is_instance(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _is_number(kinds: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_mapping(keys: _Kinds, value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(
        not keys or any(kind.accepts(key) for kind in keys)
        for key in cast("Mapping[object, object]", value)
    )


def _is_list(kind: type, elements: _Kinds, value: object) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, kind):
        return False
    return not elements or all(
        any(kind.accepts(element) for kind in elements) for element in _list_elements(value)
    )
