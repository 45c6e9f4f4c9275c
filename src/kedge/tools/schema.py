"""The JSON schema of a tool's arguments, and parsing of arguments by it.

Both are done by a pydantic model created for the signature. Its fields are numbered and have the parameter
names as aliases, because some parameter names (``schema``, ``_x``, ``model_config``) are not allowed as fields.
Only arguments that the model passed are passed to the function, so its defaults apply. Pydantic is imported
when the first tool is created.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from kedge.engines.annotations import replace_iterables, schema_generator
from kedge.engines.strict_schema import (
    JSONSchema,
    drop_unserializable_defaults,
    to_strict_schema,
)
from kedge.errors import InvalidArguments, InvalidTool
from kedge.tools.arguments import check_argument_names, describe_errors
from kedge.tools.signature import REQUIRED, ToolArgument, ToolSignature, strip_annotated
from kedge.turns import FrozenMap, ToolCallBlock
from kedge.turns.frozen_json import EMPTY

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.json_schema import GenerateJsonSchema

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FunctionSchema:
    """A schema generated from a function's signature; arguments become typed values."""

    json_schema: FrozenMap
    model: "type[BaseModel]"
    signature: ToolSignature
    null_is_default: frozenset[str] = frozenset()

    def parse_arguments(self, call: ToolCallBlock) -> Arguments:
        """Return the arguments of a call as typed values.

        Raises:
            InvalidArguments: They are not JSON or do not match the schema.
        """
        from pydantic import ValidationError

        # Some models send an empty string for a call without arguments.
        text = call.arguments if call.arguments.strip() else "{}"
        try:
            parsed = self.model.model_validate_json(self._drop_nulls(text))
        except ValidationError as error:
            raise InvalidArguments(
                call.name, describe_errors(error, text, self.json_schema)
            ) from error
        return self._collect_arguments(parsed) | _call_argument(self.signature, call)

    def _collect_arguments(self, parsed: "BaseModel") -> Arguments:
        arguments: Arguments = {}
        for number, argument in _number_arguments(self.signature):
            if number in parsed.model_fields_set or not _has_own_default(argument):
                arguments[argument.name] = getattr(parsed, number)
        return arguments

    def _drop_nulls(self, text: str) -> str:
        if not self.null_is_default or "null" not in text:
            return text
        from pydantic_core import from_json, to_json

        try:
            value: Any = from_json(text)
            members = {
                k: v for k, v in value.items() if v is not None or k not in self.null_is_default
            }
        except (ValueError, AttributeError):
            return text  # not a JSON object: validation reports it
        return to_json(members).decode()


@dataclass(frozen=True, slots=True)
class ExplicitSchema:
    """A schema passed by the caller: arguments are JSON values, and only their names are checked."""

    json_schema: FrozenMap

    def parse_arguments(self, call: ToolCallBlock) -> Arguments:
        """Return the arguments of a call as JSON values.

        Raises:
            InvalidArguments: They are not a JSON object, or a name is missing or unknown.
        """
        try:
            value = json.loads(call.arguments if call.arguments.strip() else "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArguments(
                call.name, [f"the arguments are not valid JSON ({error})"]
            ) from error
        if not isinstance(value, dict):
            raise InvalidArguments(call.name, ["the arguments must be one JSON object"])
        arguments = cast("Arguments", value)
        if found := check_argument_names(arguments, self.json_schema):
            raise InvalidArguments(call.name, found)
        return arguments


@dataclass(frozen=True, slots=True)
class FreeForm:
    """The reader of a custom tool: its text is passed as the function's single argument."""

    json_schema: ClassVar[FrozenMap] = EMPTY
    signature: ToolSignature

    def parse_arguments(self, call: ToolCallBlock) -> Arguments:
        """Return the text of a call under the name of the argument."""
        text = {self.signature.arguments[0].name: call.arguments}
        return text | _call_argument(self.signature, call)


ArgumentReader = FunctionSchema | ExplicitSchema | FreeForm


def build_function_schema(
    tool: str, signature: ToolSignature, *, strict: bool = False
) -> FunctionSchema:
    """Generate the schema for a signature.

    Raises:
        InvalidTool: A type has no JSON schema, or none in strict mode.
    """
    model = _build_model(signature)
    plain = _generate_schema(model)
    properties: JSONSchema = plain.get("properties", {})
    optional = properties.keys() - set(plain.get("required", ()))
    nullable = frozenset(name for name in optional if not _allows_null(properties[name]))
    if not strict:
        # A model that reads "default": null may pass null, also for a parameter like `x: int = None`.
        nullable = frozenset(name for name in nullable if _defaults_to_null(properties[name]))
        for name in nullable:
            properties[name] = {**_make_nullable(properties[name]), "default": None}
        return FunctionSchema(FrozenMap(plain), model, signature, nullable)
    # In strict mode every argument is required, so null means "use the default".
    properties |= {name: _make_nullable(properties[name]) for name in nullable}
    plain = to_strict_schema(plain, lambda path, problem: InvalidTool(tool, f"{path}: {problem}"))
    return FunctionSchema(FrozenMap(plain), model, signature, nullable)


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


def _call_argument(signature: ToolSignature, call: ToolCallBlock) -> Arguments:
    return {signature.call_parameter: call} if signature.call_parameter else {}


def _number_arguments(signature: ToolSignature) -> list[tuple[str, ToolArgument]]:
    return [(f"a{i}", argument) for i, argument in enumerate(signature.arguments)]


def _is_field_info(default: object) -> bool:
    from pydantic.fields import FieldInfo

    return isinstance(default, FieldInfo)


def _has_own_default(argument: ToolArgument) -> bool:
    """Return whether Python applies the default when the argument is not passed."""
    return argument.default is not REQUIRED and not _is_field_info(argument.default)


def _build_model(signature: ToolSignature) -> "type[BaseModel]":
    from pydantic import ConfigDict, PydanticUserError, create_model

    fields: dict[str, Any] = {
        n: _build_field(argument) for n, argument in _number_arguments(signature)
    }
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        _generate_schema(model)
    except (PydanticUserError, TypeError, NameError) as error:
        raise InvalidTool(signature.function_name, _find_unsupported(signature, error)) from error
    for number, argument in _number_arguments(signature):
        if number not in model.model_fields:  # such as ClassVar
            problem = f"parameter {argument.name} has no JSON schema: {argument.annotation}"
            raise InvalidTool(signature.function_name, problem)
    return model


def _build_field(argument: ToolArgument) -> tuple[Any, Any]:
    from pydantic import Field

    annotation = replace_iterables(argument.annotation)
    if _is_field_info(argument.default):
        annotation = Annotated[annotation, argument.default]
    options: dict[str, Any] = {"alias": argument.name}
    if argument.description and not _has_description(annotation):
        options["description"] = argument.description
    if _has_own_default(argument):
        options["default"] = argument.default
    return annotation, Field(**options)


def _has_description(annotation: Any) -> bool:
    extras = getattr(annotation, "__metadata__", ())
    return any(_is_field_info(extra) and extra.description for extra in extras)


def _find_unsupported(signature: ToolSignature, error: Exception) -> str:
    """Find the argument without a schema; pydantic's error names only the type."""
    from pydantic import PydanticUserError, TypeAdapter

    for argument in signature.arguments:
        try:
            TypeAdapter(argument.annotation).json_schema(schema_generator=schema_generator())
        except (PydanticUserError, TypeError, NameError) as found:
            return f"parameter {argument.name} has no JSON schema: {_first_line(found)}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _generate_schema(model: "type[BaseModel]") -> JSONSchema:
    schema = model.model_json_schema(schema_generator=_quiet_generator())
    for untitled in (schema, *schema.get("$defs", {}).values()):
        untitled.pop("title", None)  # class names mean nothing to a model
    drop_unserializable_defaults(schema)
    return schema


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
    described = {"description": schema["description"]} if "description" in schema else {}
    plain = {k: v for k, v in schema.items() if k not in ("default", "description")}
    return {"anyOf": [plain, {"type": "null"}], **described}
