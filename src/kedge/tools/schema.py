"""The JSON schema of a tool's arguments, and parsing of arguments by it.

Both are done by pydantic, for a ``TypedDict`` created from the signature: its members may have any name, unlike the
fields of a model (``schema``, ``_x``, ``model_config``). Only arguments that the model passed are passed to the
function, so its defaults apply. Pydantic is imported when the first tool is created.

Each problem of invalid arguments names the argument, the error and the expected schema, so that a model can correct
it. Values are never repeated, because the model knows what it sent, and the text is also logged. Pydantic adds the
labels of union branches to the locations of its errors; a path here contains only steps that exist in the arguments.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import msgspec
from typing_extensions import TypedDict

from kedge._internal.json_schema import (
    JSONSchema,
    adapt_type,
    format_path,
    replace_iterables,
    schema_generator,
    to_strict_schema,
)
from kedge.errors import InvalidArguments, InvalidTool, find_similar
from kedge.tools.signature import REQUIRED, ToolArgument, ToolSignature, strip_annotated
from kedge.turns import FrozenMap, ToolCallBlock
from kedge.turns.frozen_json import EMPTY, thaw
from kedge.turns.json_codec import name_type

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import ErrorDetails, ValidationError

Arguments = dict[str, Any]


class FunctionSchema(msgspec.Struct, frozen=True):
    """A schema generated from a function's signature; arguments become typed values."""

    json_schema: FrozenMap
    adapter: "TypeAdapter[Any]"
    signature: ToolSignature
    defaults: frozenset[str]
    """The arguments for which Python applies a default when they are not passed."""
    null_is_default: frozenset[str] = frozenset()

    def parse_arguments(self, call: ToolCallBlock) -> Arguments:
        """Return the arguments of a call as typed values.

        Raises:
            InvalidArguments: They are not JSON or do not match the schema.
        """
        from pydantic import ValidationError
        from pydantic_core import from_json

        text = _read_text(call)
        if self.null_is_default and "null" in text:
            text = self._drop_nulls(text)
        try:
            parsed: Arguments = self.adapter.validate_json(text)
        except ValidationError as error:
            raise InvalidArguments(
                call.name, describe_errors(error, text, self.json_schema)
            ) from error
        if self.defaults:
            for name in self.defaults - from_json(text).keys():
                parsed.pop(name, None)
        if self.signature.call_parameter:
            parsed[self.signature.call_parameter] = call
        return parsed

    def _drop_nulls(self, text: str) -> str:
        from pydantic_core import from_json, to_json

        try:
            value: Any = from_json(text)
            members = {
                k: v for k, v in value.items() if v is not None or k not in self.null_is_default
            }
        except (ValueError, AttributeError):
            return text  # not a JSON object: validation reports it
        return to_json(members).decode()


class ExplicitSchema(msgspec.Struct, frozen=True):
    """A schema passed by the caller: arguments are JSON values, and only their names are checked."""

    json_schema: FrozenMap

    def parse_arguments(self, call: ToolCallBlock) -> Arguments:
        """Return the arguments of a call as JSON values.

        Raises:
            InvalidArguments: They are not a JSON object, or a name is missing or unknown.
        """
        try:
            value = json.loads(_read_text(call))
        except (ValueError, RecursionError) as error:
            raise InvalidArguments(
                call.name, [f"the arguments are not valid JSON ({error})"]
            ) from error
        if not isinstance(value, dict):
            raise InvalidArguments(call.name, ["the arguments must be one JSON object"])
        arguments = cast("Arguments", value)
        problems = check_argument_names(arguments, self.json_schema)
        if problems:
            raise InvalidArguments(call.name, problems)
        return arguments


class FreeForm(msgspec.Struct, frozen=True):
    """The reader of a custom tool: its text is passed as the function's single argument."""

    json_schema: ClassVar[FrozenMap] = EMPTY
    signature: ToolSignature

    def parse_arguments(self, call: ToolCallBlock) -> Arguments:
        """Return the text of a call under the name of the argument."""
        arguments: Arguments = {self.signature.arguments[0].name: call.arguments}
        if self.signature.call_parameter:
            arguments[self.signature.call_parameter] = call
        return arguments


ArgumentReader = FunctionSchema | ExplicitSchema | FreeForm


def _read_text(call: ToolCallBlock) -> str:
    """Return the arguments of a call as JSON; some models send an empty string for a call without arguments."""
    if not call.arguments.strip():
        return "{}"
    return call.arguments


def build_function_schema(
    tool: str, signature: ToolSignature, *, strict: bool = False
) -> FunctionSchema:
    """Generate the schema for a signature.

    Raises:
        InvalidTool: A type has no JSON schema, or none in strict mode.
    """
    adapter, plain = _adapt_signature(signature)
    properties: JSONSchema = plain.get("properties", {})
    optional = properties.keys() - set(plain.get("required", ()))
    nullable = frozenset(name for name in optional if not _allows_null(properties[name]))
    if not strict:  # in strict mode every argument is required, so null means "use the default"
        # A model that reads "default": null may pass null, also for a parameter like `x: int = None`.
        nullable = frozenset(name for name in nullable if _defaults_to_null(properties[name]))
    for name in nullable:
        properties[name] = {**_make_nullable(properties[name]), "default": None}
    if strict:
        plain = to_strict_schema(plain, lambda path, text: InvalidTool(tool, f"{path}: {text}"))
    defaults = frozenset(each.name for each in signature.arguments if _has_own_default(each))
    return FunctionSchema(FrozenMap(plain), adapter, signature, defaults, nullable)


def build_explicit_schema(tool: str, schema: Mapping[str, Any]) -> ExplicitSchema:
    """Check and copy a schema passed by the caller, such as that of a remote tool."""
    if schema.get("type") != "object":
        raise InvalidTool(tool, 'its parameters must be a JSON schema of "type": "object"')
    return ExplicitSchema(FrozenMap(schema))


def build_free_form(tool: str, signature: ToolSignature) -> FreeForm:
    """Check that the function has a single argument of type ``str``."""
    if [strip_annotated(argument.annotation) for argument in signature.arguments] != [str]:
        raise InvalidTool(
            tool, "a custom tool receives free text; declare one argument of type str"
        )
    return FreeForm(signature)


def _is_field_info(default: object) -> bool:
    from pydantic.fields import FieldInfo

    return isinstance(default, FieldInfo)


def _has_own_default(argument: ToolArgument) -> bool:
    """Return whether Python applies the default when the argument is not passed."""
    return argument.default is not REQUIRED and not _is_field_info(argument.default)


def _adapt_signature(signature: ToolSignature) -> "tuple[TypeAdapter[Any], JSONSchema]":
    """Return the validator of the arguments, and their schema."""
    from pydantic import ConfigDict

    members: dict[str, Any] = {each.name: _annotate(each) for each in signature.arguments}
    arguments = cast("Any", TypedDict)("Arguments", members)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter, schema = adapt_type(arguments, _quiet_generator())
    except TypeError as error:
        raise InvalidTool(signature.function_name, _find_unsupported(signature, error)) from error
    for untitled in (schema, *schema.get("$defs", {}).values()):
        untitled.pop("title", None)  # class names mean nothing to a model
    return adapter, schema


def _annotate(argument: ToolArgument) -> Any:
    from pydantic import Field

    annotation = replace_iterables(argument.annotation)
    if _is_field_info(argument.default):
        annotation = Annotated[annotation, argument.default]
    options: dict[str, Any] = {}
    if argument.description and not _has_description(annotation):
        options["description"] = argument.description
    if _has_own_default(argument):
        options["default"] = argument.default
    return Annotated[annotation, Field(**options)]


def _has_description(annotation: Any) -> bool:
    extras = getattr(annotation, "__metadata__", ())
    return any(_is_field_info(extra) and extra.description for extra in extras)


def _find_unsupported(signature: ToolSignature, error: Exception) -> str:
    """Find the argument without a schema; pydantic's error names only the type."""
    for argument in signature.arguments:
        try:
            adapt_type(argument.annotation)
        except TypeError as found:
            return f"parameter {argument.name} has no JSON schema: {found}"
    return str(error)


@cache
def _quiet_generator() -> "type[GenerateJsonSchema]":
    class Quiet(schema_generator()):
        """Generates no titles, and no warnings about defaults that are not JSON."""

        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - declared like this in its parent

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    return Quiet


def _allows_null(schema: JSONSchema) -> bool:
    return any(choice.get("type") == "null" for choice in (schema, *schema.get("anyOf", ())))


def _defaults_to_null(schema: JSONSchema) -> bool:
    """Return whether the default is null, and the schema has a type, which null would not match."""
    is_null = "default" in schema and schema["default"] is None
    return is_null and bool(schema.keys() - {"default", "description"})


def _make_nullable(schema: JSONSchema) -> JSONSchema:
    """Return a schema that also accepts null, with the description at the top."""
    plain = {k: v for k, v in schema.items() if k not in ("default", "description")}
    nullable: JSONSchema = {"anyOf": [plain, {"type": "null"}]}
    if "description" in schema:
        nullable["description"] = schema["description"]
    return nullable


PathStep = str | int
ArgumentPath = tuple[PathStep, ...]

WHOLE = "the arguments"
MAX_EXPECTED_CHARS = 400
MAX_PROBLEMS = 12


def describe_errors(error: "ValidationError", text: str, schema: Mapping[str, Any]) -> list[str]:
    """Return one line for each invalid argument."""
    from pydantic_core import from_json

    details = error.errors(include_url=False, include_context=False)
    if details[0]["type"] in ("json_invalid", "string_unicode"):
        return [
            f"the arguments are not valid JSON ({_error_reason(details[0])}); write one JSON object"
        ]
    value: object = from_json(text)
    kind = name_type(value)
    if kind != "an object":
        return [f"the arguments are {kind}; write one JSON object"]
    details_by_path: dict[ArgumentPath, list[ErrorDetails]] = {}
    for detail in details:
        details_by_path.setdefault(_argument_path(detail, value), []).append(detail)
    lines = [
        _describe_problem(path, path_details, schema)
        for path, path_details in details_by_path.items()
    ]
    return _limit_lines(lines, len(lines))


def check_argument_names(value: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return one line for each argument that is missing or unknown in an explicit schema."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    is_closed = schema.get("additionalProperties") is False
    missing = [name for name in schema.get("required") or () if name not in value]
    unknown: list[str] = []
    if is_closed:
        unknown = [name for name in value if name not in properties]
    # Only the lines that are shown: a similar name takes time to find, and a model may write any number of names.
    lines = [_describe_missing((name,), schema) for name in missing[:MAX_PROBLEMS]]
    room = MAX_PROBLEMS - len(lines)
    lines += [_describe_unknown((name,), properties) for name in unknown[:room]]
    return _limit_lines(lines, len(missing) + len(unknown))


def _limit_lines(lines: list[str], total: int) -> list[str]:
    """Return the first lines, and how many of the total are missing."""
    if total <= MAX_PROBLEMS:
        return lines
    return [*lines[:MAX_PROBLEMS], f"and {total - MAX_PROBLEMS} more"]


def _argument_path(detail: "ErrorDetails", value: Any) -> ArgumentPath:
    """Return the steps that exist in the arguments, and the missing one."""
    path: list[PathStep] = []
    for i, step in enumerate(detail["loc"]):
        absent = detail["type"] == "missing" and i == len(detail["loc"]) - 1
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            if not absent:
                continue
        path.append(step)
    return tuple(path)


def _describe_problem(
    path: ArgumentPath, details: Sequence["ErrorDetails"], schema: Mapping[str, Any]
) -> str:
    kinds = {detail["type"] for detail in details}
    if kinds == {"missing"}:
        return _describe_missing(path, schema)
    if kinds == {"extra_forbidden"}:
        return _describe_unknown(path, _find_schema(path[:-1], schema).get("properties", {}))
    reasons = "; or: ".join(dict.fromkeys(_error_reason(detail) for detail in details))
    return f"{format_path(path, WHOLE)}: {reasons}{_format_expected(path, schema)}"


def _describe_missing(path: ArgumentPath, schema: Mapping[str, Any]) -> str:
    return f"{format_path(path, WHOLE)}: it is required and missing{_format_expected(path, schema)}"


def _describe_unknown(path: ArgumentPath, known: Iterable[str]) -> str:
    names = list(known)
    hint = f"the arguments are: {', '.join(names) or 'none'}"
    similar = find_similar(str(path[-1]), names)
    if similar:
        hint = f"did you mean {similar}?"
    return f"{format_path(path, WHOLE)}: unknown argument; {hint}"


def _error_reason(detail: "ErrorDetails") -> str:
    message = detail["msg"].removeprefix("Invalid JSON: ").removeprefix("Value error, ")
    return message.replace("Input should", "it should", 1)


def _format_expected(path: ArgumentPath, schema: Mapping[str, Any]) -> str:
    expected = _find_schema(path, schema)
    keywords = {
        name: thaw(value) for name, value in expected.items() if name not in ("default", "$defs")
    }
    text = json.dumps(keywords, ensure_ascii=False)
    if not keywords or len(text) > MAX_EXPECTED_CHARS:
        return ""
    return f"; expected {text}"


def _find_schema(path: ArgumentPath, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema at a path, or an empty one inside a union."""
    current = root
    for step in path:
        current = _strip_null(current, root)
        inner: object = None
        if isinstance(step, int):
            inner = current.get("items")
        elif step in current.get("properties", {}):
            inner = current["properties"][step]
        elif "properties" not in current:
            inner = current.get("additionalProperties")
        if not isinstance(inner, Mapping):
            return {}
        current = _resolve_ref(cast("Mapping[str, Any]", inner), root)
    return current


def _strip_null(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an optional value without null."""
    choices = [c for c in schema.get("anyOf", ()) if c.get("type") != "null"]
    if len(choices) != 1:
        return schema
    return _resolve_ref(choices[0], root)


def _resolve_ref(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    siblings = {key: value for key, value in schema.items() if key != "$ref"}
    return {**root.get("$defs", {}).get(reference.rpartition("/")[2], {}), **siblings}
