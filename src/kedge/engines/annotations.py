"""JSON schemas of annotations: of tool parameters and of typed answers. Pydantic is imported when one is needed."""

from collections.abc import Callable, Generator, Iterable
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema


@cache
def schema_generator() -> "type[GenerateJsonSchema]":
    """Return a generator of JSON schemas that rejects ``type[…]``, for which pydantic's accepts any value."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def is_subclass_schema(self, schema: Any) -> dict[str, Any]:
            return self.handle_invalid_for_json_schema(schema, f"type[{schema['cls'].__name__}]")

    return Generator


def replace_iterables(annotation: Any, aliases: tuple[Any, ...] = ()) -> Any:
    """Return the annotation with ``list`` for ``Iterable`` and ``Generator``, also behind an alias or a ``NewType``.

    Pydantic reads an ``Iterable`` as an iterator that can be used once and validates its elements only then.
    ``aliases`` are those that contain the annotation: a recursive one is replaced once.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if any(lazy in (annotation, origin) for lazy in (Iterable, Generator)):
        return list[replace_iterables(args[0], aliases)] if args else list
    if origin is Annotated:
        return Annotated[replace_iterables(args[0], aliases), *annotation.__metadata__]
    if origin in (Literal, Callable) or (alias := origin or annotation) in aliases:
        return annotation
    if (named := _get_named_type(annotation)) is not annotation:
        replaced = replace_iterables(named, (*aliases, alias))
        return annotation if replaced == named else replaced
    replaced = tuple(replace_iterables(arg, aliases) for arg in args)
    if replaced == args:
        return annotation
    if origin in (UnionType, Union):
        return Union[replaced]  # noqa: UP007 - of a variable number of types
    return origin[replaced]


def _get_named_type(annotation: Any) -> Any:
    """Return the type that a ``NewType`` or a type alias names, or the annotation itself."""
    if isinstance(annotation, NewType):
        return annotation.__supertype__
    alias = get_origin(annotation) or annotation
    if type(alias).__name__ != "TypeAliasType":  # that of typing or of typing_extensions
        return annotation
    values = dict(zip(alias.__type_params__, get_args(annotation), strict=False))
    parameters = getattr(alias.__value__, "__parameters__", ()) if values else ()
    return alias.__value__[*map(values.get, parameters)] if parameters else alias.__value__
