"""JSON schemas of annotations: of tool parameters and of typed answers. Pydantic is imported when one is needed."""

from collections.abc import Callable, Iterable
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

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


def replace_iterables(annotation: Any) -> Any:
    """Return the annotation with ``list`` for ``Iterable``.

    Pydantic reads an ``Iterable`` as an iterator that can be used once and validates its elements only then.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if Iterable in (annotation, origin):
        return list[replace_iterables(args[0])] if args else list
    if origin is Annotated:
        return Annotated[replace_iterables(args[0]), *annotation.__metadata__]
    if not args or origin in (Literal, Callable):
        return annotation
    replaced = tuple(map(replace_iterables, args))
    if replaced == args:
        return annotation
    if origin in (UnionType, Union):
        return Union[replaced]  # noqa: UP007 - of a variable number of types
    return origin[replaced]
