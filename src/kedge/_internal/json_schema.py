"""JSON schemas of tools and answers: their strict form, and the name of a tool call that came without one.

A strict schema is in the subset of JSON schema that a server can enforce while a model writes.

In strict mode every object is closed and every property is required, so an optional argument is nullable.
The tables below are the rules. A keyword that strict mode does not support is dropped (Kedge validates the
arguments itself) or, where dropping it would allow other values, rejected.

The SDK's ``to_strict_json_schema`` is not used: it is private, importing it loads the complete SDK, and it
accepts types that the API then rejects (free-form objects, tuples, ``Any``). Pydantic generates the schemas of
annotations, and is imported when one is needed.

Some servers lose the name of a call. If the arguments fit exactly one of the offered tools, that tool is used.
The schemas may come from an untrusted MCP server, so they are not given to a general validator: a `pattern`
can take exponential time, a `$ref` can name an address, and references to references multiply. Only the
keywords that distinguish tools are evaluated, with a bound on the number of steps for all tools together.
Other keywords are ignored: the tool validates its arguments anyway.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema


JSONSchema = dict[str, Any]

DROPPED_KEYWORDS = (
    "default", "discriminator", "examples", "maxLength", "minLength", "uniqueItems",
)  # fmt: skip
SUPPORTED_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid",
)  # fmt: skip
UNSUPPORTED_KEYWORDS = {
    "allOf": "an intersection of types",
    "contains": "an array that must contain an element",
    "if": "a condition",
    "not": "a negated type",
    "patternProperties": "property names by pattern",
    "prefixItems": "a tuple of different types; use a dataclass",
}
_SINGLE_SCHEMA_KEYS = ("items", "additionalProperties", "not", "contains", "propertyNames")
_LIST_SCHEMA_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_SCHEMA_KEYS = ("properties", "$defs", "patternProperties")
DEFINITIONS_PATH = "#/$defs/"
"""The start of a reference to a definition."""

MAX_CONVERTED_SCHEMAS = 10_000
"""The schemas that a strict form may have: a reference with other members is replaced by a copy of its definition."""

ErrorFactory = Callable[[str, str], Exception]
References = tuple[str, ...]
Function = Mapping[str, Any]


def list_subschemas(schema: JSONSchema) -> list[JSONSchema]:
    """Return the direct subschemas of a schema, except for ``true`` and ``false``."""
    subschemas: list[JSONSchema] = []

    def collect(subschema: JSONSchema) -> JSONSchema:
        subschemas.append(subschema)
        return subschema

    map_subschemas(schema, collect)
    return subschemas


def map_subschemas(schema: JSONSchema, transform: Callable[[JSONSchema], JSONSchema]) -> JSONSchema:
    """Return the schema with its direct subschemas transformed, except for ``true`` and ``false``."""

    def map_one(subschema: JSONSchema | bool) -> JSONSchema | bool:
        if isinstance(subschema, dict):
            return transform(subschema)
        return subschema

    mapped = dict(schema)
    for key, value in schema.items():
        if key in _SINGLE_SCHEMA_KEYS:
            mapped[key] = map_one(value)
        elif key in _LIST_SCHEMA_KEYS:
            mapped[key] = [map_one(each) for each in value]
        elif key in _MAP_SCHEMA_KEYS:
            mapped[key] = {name: map_one(each) for name, each in value.items()}
    return mapped


def adapt_type(
    annotation: Any, generator: "type[GenerateJsonSchema] | None" = None
) -> "tuple[TypeAdapter[Any], JSONSchema]":
    """Return the validator of a type, and its schema.

    Raises:
        TypeError: It has no JSON schema; the message is one line.
    """
    from pydantic import PydanticUserError, TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        schema = adapter.json_schema(schema_generator=generator or schema_generator())
    except (
        PydanticUserError,
        TypeError,
        NameError,
        AttributeError,
        IndexError,
        ValueError,
    ) as error:
        raise TypeError(str(error).partition("\n")[0]) from error
    _drop_unserializable_defaults(schema)
    return adapter, schema


def _drop_unserializable_defaults(schema: JSONSchema) -> None:
    """Remove defaults that JSON cannot express, such as infinity."""
    try:
        json.dumps(schema.get("default"), allow_nan=False)
    except ValueError:
        del schema["default"]
    for inner in list_subschemas(schema):
        _drop_unserializable_defaults(inner)


def format_path(steps: Iterable[str | int], whole: str) -> str:
    """Return a path in a JSON value as text; ``whole`` names the value itself."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".") or whole


def has_type(schema: JSONSchema, name: str) -> bool:
    """Return whether values of this type match a schema."""
    return name in _to_list(schema.get("type") or ())


def is_open_ended(schema: JSONSchema) -> bool:
    """Return whether the schema of an object is made for arbitrary member names."""
    if "properties" not in schema and "additionalProperties" not in schema:
        return True
    return schema.get("additionalProperties", False) is not False


def to_strict_schema(schema: JSONSchema, make_error: ErrorFactory) -> JSONSchema:
    """Return the schema in strict form; raise ``make_error(path, problem)`` if it has none."""
    return _StrictConverter(schema.get("$defs", {}), make_error).convert(schema, "arguments", ())


class _StrictConverter:
    def __init__(self, definitions: JSONSchema, make_error: ErrorFactory) -> None:
        self.definitions = definitions
        self.fail = make_error
        self.converted = 0
        """The number of schemas that were converted, which is limited."""

    def convert(self, schema: JSONSchema | bool, path: str, seen: References) -> JSONSchema:
        self.converted += 1
        if self.converted > MAX_CONVERTED_SCHEMAS:
            raise self.fail(path, f"its strict form has over {MAX_CONVERTED_SCHEMAS:,} schemas")
        if isinstance(schema, bool):
            raise self.fail(path, f"strict mode requires a type here, not {schema}")
        if "$ref" in schema:
            return self._convert_reference(schema, path, seen)
        for keyword, description in UNSUPPORTED_KEYWORDS.items():
            if keyword in schema:
                raise self.fail(path, f"strict mode does not support {description}")
        if not schema.keys() & {"type", "anyOf", "oneOf", "enum", "const"}:
            raise self.fail(path, "strict mode requires a type here, not Any")
        strict = {key: value for key, value in schema.items() if key not in DROPPED_KEYWORDS}
        if strict.get("format") not in SUPPORTED_FORMATS:
            strict.pop("format", None)
        if "oneOf" in strict:
            strict["anyOf"] = strict.pop("oneOf")
        return self._convert_children(strict, path, seen)

    def _convert_children(self, schema: JSONSchema, path: str, seen: References) -> JSONSchema:
        if has_type(schema, "object"):
            self._close_object(schema, path)
        if has_type(schema, "array") and "items" not in schema:
            raise self.fail(path, "strict mode requires a type for the items of an array")
        if isinstance(schema.get("items"), dict):
            schema["items"] = self.convert(schema["items"], f"{path}[]", seen)
        if "anyOf" in schema:
            choices = cast("list[JSONSchema]", schema["anyOf"])
            schema["anyOf"] = [self.convert(choice, path, seen) for choice in choices]
        for key, prefix in (("properties", f"{path}."), ("$defs", "")):
            if key in schema:
                members = cast("JSONSchema", schema[key]).items()
                converted = ((n, self.convert(each, prefix + n, seen)) for n, each in members)
                schema[key] = dict(converted)
        return schema

    def _close_object(self, schema: JSONSchema, path: str) -> None:
        if is_open_ended(schema):
            problem = "strict mode does not support objects with arbitrary keys; use a dataclass"
            raise self.fail(path, problem)
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
        schema["required"] = list(schema["properties"])

    def _convert_reference(self, schema: JSONSchema, path: str, seen: References) -> JSONSchema:
        """Replace a reference that has other members by its definition, because strict mode allows none."""
        reference: str = schema["$ref"]
        beside = {k: v for k, v in schema.items() if k != "$ref" and k not in DROPPED_KEYWORDS}
        if not beside or reference in seen:
            return {"$ref": reference}
        name = reference.removeprefix(DEFINITIONS_PATH)
        definition: JSONSchema | bool | None = self.definitions.get(name)
        if not isinstance(definition, dict):
            raise self.fail(path, f"strict mode requires {reference} in $defs")
        return self.convert({**definition, **beside}, path, (*seen, reference))


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
    origin = get_origin(annotation)
    args = get_args(annotation)
    alias = origin or annotation
    if alias in (Iterable, Generator):
        if not args:
            return list
        return list[replace_iterables(args[0], aliases)]
    if origin is Annotated:
        return Annotated[replace_iterables(args[0], aliases), *annotation.__metadata__]
    if origin in (Literal, Callable) or alias in aliases:
        return annotation
    named_type = _get_named_type(annotation)
    if named_type is not annotation:
        replaced_type = replace_iterables(named_type, (*aliases, alias))
        return annotation if replaced_type == named_type else replaced_type
    replaced_args = tuple(replace_iterables(arg, aliases) for arg in args)
    if replaced_args == args:
        return annotation
    if origin in (UnionType, Union):
        return Union[replaced_args]  # noqa: UP007 - of a variable number of types
    return origin[replaced_args]


def _get_named_type(annotation: Any) -> Any:
    """Return the type that a ``NewType`` or a type alias names, or the annotation itself."""
    if hasattr(annotation, "__supertype__"):
        return annotation.__supertype__
    alias = get_origin(annotation) or annotation
    if type(alias).__name__ != "TypeAliasType":  # that of typing or of typing_extensions
        return annotation
    values = dict(zip(alias.__type_params__, get_args(annotation), strict=False))
    parameters = getattr(alias.__value__, "__parameters__", ())
    if not values or not parameters:
        return alias.__value__
    return alias.__value__[*map(values.get, parameters)]


MAX_ARGUMENT_CHARS = 100_000
"""Longer arguments are not parsed."""
MAX_STEPS = 20_000
"""The maximum number of values that are compared with a schema, for all tools together."""

_TYPES: Mapping[type, tuple[str, ...]] = {
    dict: ("object",),
    list: ("array",),
    str: ("string",),
    bool: ("boolean",),
    type(None): ("null",),
    int: ("integer", "number"),
    float: ("number",),
}
"""The types of JSON schema that each type of a parsed value has."""


def infer_tool_name(tools: Sequence[Mapping[str, Any]], arguments: str, custom: bool) -> str:
    """Return the name of the only offered tool that these arguments fit.

    Args:
        tools: The tools that the request offers.
        arguments: The arguments of a call that came without a name.
        custom: Whether the call has free-form input instead of JSON arguments.

    Returns:
        The name; an empty string if no tool fits, or more than one, or if that takes too long to decide.
    """
    kind = "custom" if custom else "function"
    fitting: Sequence[Function] = [
        cast("Function", tool.get(kind) or tool)
        for tool in tools
        if tool.get("type", "function") == kind
    ]
    if not custom:
        fitting = _find_fitting(fitting, arguments)
    if len(fitting) != 1:
        return ""
    return str(fitting[0].get("name") or "")


def _find_fitting(functions: Sequence[Function], arguments: str) -> Sequence[Function]:
    """Return the functions whose schema the arguments match without undeclared names."""
    try:
        value = json.loads(arguments[: MAX_ARGUMENT_CHARS + 1] or "{}")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(value, dict) or len(arguments) > MAX_ARGUMENT_CHARS:
        return ()
    budget = _StepBudget()
    try:
        return [function for function in functions if _fits(function, value, budget)]
    except _TooManySteps:
        return ()


class _TooManySteps(Exception):
    pass


def _to_list(types: str | Sequence[str]) -> Sequence[str]:
    return [types] if isinstance(types, str) else types


class _StepBudget:
    """The number of steps that remain for all tools together."""

    def __init__(self) -> None:
        self.steps_left = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        """Take steps, or raise ``_TooManySteps`` if too few remain."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise _TooManySteps


def _fits(function: Function, arguments: Any, budget: _StepBudget) -> bool:
    """Return whether arguments match the schema of a function; False if that is not a valid schema."""
    schema: Any = function.get("parameters") or function.get("input_schema") or {}
    try:
        root = {"additionalProperties": False, **schema}
        return _Matcher(root, budget).matches(root, arguments)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
        return False


class _Matcher:
    """Compare values with a schema, by the keywords that distinguish tools.

    Args:
        root: The schema, in which references are resolved.
        budget: The number of steps that remain.
    """

    def __init__(self, root: Mapping[str, Any], budget: _StepBudget) -> None:
        self.root = root
        self.budget = budget

    def matches(self, schema: Any, value: Any) -> bool:
        """Return whether a value matches a schema or a part of it."""
        self.budget.spend()
        if isinstance(schema, bool):
            return schema
        types: str | Sequence[str] = schema.get("type", ())
        if types and not any(name in _list_types(value) for name in _to_list(types)):
            return False
        allowed: Sequence[Any] = schema.get("enum", ())
        self.budget.spend(len(allowed))
        if ("enum" in schema and value not in allowed) or schema.get("const", value) != value:
            return False
        if not all(self.matches(part, member) for part, member in self._iter_parts(schema, value)):
            return False
        choices = (schema[key] for key in ("anyOf", "oneOf") if key in schema)
        return all(any(self.matches(option, value) for option in options) for options in choices)

    def _iter_parts(self, schema: Mapping[str, Any], value: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the subschemas that must match, each with the value that it is for."""
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            properties: Mapping[str, Any] = schema.get("properties", {})
            others = schema.get("additionalProperties", True)
            yield from ((name in members, members) for name in schema.get("required", ()))
            yield from ((properties.get(name, others), member) for name, member in members.items())
        elif isinstance(value, list) and "items" in schema:
            yield from ((schema["items"], element) for element in cast("list[Any]", value))
        if "$ref" in schema:
            yield self._resolve(schema["$ref"]), value
        yield from ((part, value) for part in schema.get("allOf", ()))

    def _resolve(self, reference: str) -> Any:
        """Return a definition of the same schema."""
        definition: Any = self.root
        for step in reference.removeprefix("#/").split("/"):
            definition = definition[step]
        return definition


def _list_types(value: Any) -> tuple[str, ...]:
    """Return the types of JSON schema that a value has."""
    if isinstance(value, float) and value.is_integer():
        return _TYPES[int]
    return _TYPES[type(value)]
