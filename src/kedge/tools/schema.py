"""The JSON schema of a tool's arguments, and the reading of arguments by it.

Pydantic does the work, on a model made for the signature. Its fields are numbered and known by alias,
because a parameter may be called anything (``schema``, ``_x``, ``model_config``) and a field may not.
Only arguments that were given are passed on, so a function's own defaults stay its own.
Pydantic is imported when the first tool is made, not before.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, cast

from kedge.errors import InvalidArguments, InvalidTool
from kedge.tools.arguments import missing_or_unknown, problems
from kedge.tools.signature import REQUIRED, Argument, Signature, bare
from kedge.tools.strict import JSONSchema, strict_schema, subschemas
from kedge.turns import FrozenMap, ToolCallBlock
from kedge.turns.frozen import thaw

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.json_schema import GenerateJsonSchema

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a function's arguments, and its reader."""

    plain: JSONSchema
    model: "type[BaseModel]"
    signature: Signature
    null_is_default: frozenset[str] = frozenset()

    def read(self, call: ToolCallBlock) -> Arguments:
        """The arguments of a call as typed values, or ``InvalidArguments``."""
        from pydantic import ValidationError

        # Some models write nothing at all where there is nothing to say.
        written = call.arguments if call.arguments.strip() else "{}"
        try:
            read = self.model.model_validate_json(self._without_nulls(written))
        except ValidationError as error:
            raise InvalidArguments(call.name, problems(error, written, self.plain)) from error
        return self._given(read) | _the_call(self.signature, call)

    def _given(self, read: "BaseModel") -> Arguments:
        given: Arguments = {}
        for number, argument in _numbered(self.signature):
            if number in read.model_fields_set or not _has_own_default(argument):
                given[argument.name] = getattr(read, number)
        return given

    def _without_nulls(self, written: str) -> str:
        if not self.null_is_default or "null" not in written:
            return written
        from pydantic_core import from_json, to_json

        try:
            value: Any = from_json(written)
            kept = {
                k: v for k, v in value.items() if v is not None or k not in self.null_is_default
            }
        except (ValueError, AttributeError):
            return written  # not JSON, or no object: validation says so
        return to_json(kept).decode()


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """A schema written by hand: arguments are passed on as JSON values, their names checked."""

    plain: JSONSchema

    def read(self, call: ToolCallBlock) -> Arguments:
        """The arguments of a call as JSON values, or ``InvalidArguments``."""
        try:
            value = json.loads(call.arguments if call.arguments.strip() else "{}")
        except ValueError as error:
            raise InvalidArguments(
                call.name, [f"the arguments are not valid JSON ({error})"]
            ) from error
        if not isinstance(value, dict):
            raise InvalidArguments(call.name, ["the arguments must be one JSON object"])
        arguments = cast("Arguments", value)
        if found := missing_or_unknown(arguments, self.plain):
            raise InvalidArguments(call.name, found)
        return arguments


@dataclass(frozen=True, slots=True)
class FreeForm:
    """No schema: the one text that a custom tool takes goes to the function's one argument."""

    signature: Signature

    def read(self, call: ToolCallBlock) -> Arguments:
        """The text of a call, under the name of the argument."""
        text = {self.signature.arguments[0].name: call.arguments}
        return text | _the_call(self.signature, call)


Reader = Schema | WrittenSchema | FreeForm


def function_schema(tool: str, signature: Signature, *, strict: bool = False) -> Schema:
    """Make the schema for a signature; raise ``InvalidTool`` for a type that has none."""
    model = _model(signature)
    plain = _plain(model)
    if not strict:
        return Schema(plain, model, signature)
    # In strict mode nothing may be left out, so null stands for "take the default".
    properties: JSONSchema = plain["properties"]
    optional = properties.keys() - set(plain.get("required", ()))
    nullable = frozenset(name for name in optional if not _takes_null(properties[name]))
    properties |= {name: _or_null(properties[name]) for name in nullable}
    plain = strict_schema(plain, lambda path, why: InvalidTool(tool, f"{path}: {why}"))
    return Schema(plain, model, signature, nullable)


def written_schema(tool: str, schema: Mapping[str, Any]) -> WrittenSchema:
    """Take a schema that somebody else wrote, of a remote tool for example."""
    if schema.get("type") != "object":
        raise InvalidTool(tool, 'its parameters must be a JSON schema of "type": "object"')
    return WrittenSchema(thaw(FrozenMap(schema)))


def free_form(tool: str, signature: Signature) -> FreeForm:
    """Check that the function takes one text."""
    if [bare(argument.annotation) for argument in signature.arguments] != [str]:
        raise InvalidTool(tool, "a custom tool takes free text; give it one argument, of type str")
    return FreeForm(signature)


def _the_call(signature: Signature, call: ToolCallBlock) -> Arguments:
    return {signature.receives_call: call} if signature.receives_call else {}


def _numbered(signature: Signature) -> list[tuple[str, Argument]]:
    return [(f"a{i}", argument) for i, argument in enumerate(signature.arguments)]


def _is_field(default: object) -> bool:
    from pydantic.fields import FieldInfo

    return isinstance(default, FieldInfo)


def _has_own_default(argument: Argument) -> bool:
    """Whether Python fills in the default by itself, when the argument is not passed."""
    return argument.default is not REQUIRED and not _is_field(argument.default)


def _model(signature: Signature) -> "type[BaseModel]":
    from pydantic import ConfigDict, PydanticUserError, create_model

    fields: dict[str, Any] = {n: _field(argument) for n, argument in _numbered(signature)}
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        _plain(model)
    except (PydanticUserError, TypeError, NameError) as error:
        raise InvalidTool(signature.function, _blame(signature, error)) from error
    return model


def _field(argument: Argument) -> tuple[Any, Any]:
    from pydantic import Field

    annotation: Any = argument.annotation
    if _is_field(argument.default):
        annotation = Annotated[annotation, argument.default]
    options: dict[str, Any] = {"alias": argument.name}
    if argument.description and not _described(annotation):
        options["description"] = argument.description
    if _has_own_default(argument):
        options["default"] = argument.default
    return annotation, Field(**options)


def _described(annotation: Any) -> bool:
    extras = getattr(annotation, "__metadata__", ())
    return any(_is_field(extra) and extra.description for extra in extras)


def _blame(signature: Signature, error: Exception) -> str:
    """Find the argument that has no schema, for pydantic tells only the type."""
    from pydantic import PydanticUserError, TypeAdapter

    for argument in signature.arguments:
        try:
            TypeAdapter(argument.annotation).json_schema()
        except (PydanticUserError, TypeError, NameError) as found:
            return f"parameter {argument.name} has no JSON schema: {_first_line(found)}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _plain(model: "type[BaseModel]") -> JSONSchema:
    schema = model.model_json_schema(schema_generator=_generator())
    for untitled in (schema, *schema.get("$defs", {}).values()):
        untitled.pop("title", None)  # the names of classes mean nothing to a model
    _drop_strange_defaults(schema)
    return schema


def _drop_strange_defaults(schema: JSONSchema) -> None:
    """Leave defaults unsaid that JSON cannot say, such as infinity."""
    try:
        json.dumps(schema.get("default"), allow_nan=False)
    except ValueError:
        del schema["default"]
    for inner in subschemas(schema):
        _drop_strange_defaults(inner)


@cache
def _generator() -> "type[GenerateJsonSchema]":
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        """Gives no titles made of names, and is silent about defaults that are not JSON."""

        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as its parent says it

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    return Quiet


def _takes_null(schema: JSONSchema) -> bool:
    return any(choice.get("type") == "null" for choice in (schema, *schema.get("anyOf", ())))


def _or_null(schema: JSONSchema) -> JSONSchema:
    """This or null, with the description where both see it."""
    described = {"description": schema["description"]} if "description" in schema else {}
    plain = {k: v for k, v in schema.items() if k not in ("default", "description")}
    return {"anyOf": [plain, {"type": "null"}], **described}


def frozen(reader: Reader) -> FrozenMap:
    """The schema as a value that cannot change; empty for a custom tool."""
    return FrozenMap() if isinstance(reader, FreeForm) else FrozenMap(reader.plain)
