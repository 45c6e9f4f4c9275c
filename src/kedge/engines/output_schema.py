"""The schema of a typed answer: the request parameter for it, and validation of the answer.

Any type that pydantic supports has a schema: a model, dataclass, TypedDict, enum, union or plain type. A JSON
schema is accepted as well. The schema is sent to the server; the answer is validated here too, because not
every server enforces it and none enforces all of it.

Servers require an object at the top, so a type whose schema is something else (a number, a list, a union) is
wrapped in an object with the single member ``value``, and its answer is unwrapped. A type is sent in strict
form where it has one: every object closed and every member required, also those with a default, so that the
model decides about each of them. A JSON schema is sent in strict form only if that form accepts the same values.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast, get_origin

import msgspec
from typing_extensions import TypeVar

from kedge._internal import json_schema
from kedge._internal.arguments import describe_value
from kedge._internal.json_schema import DEFINITIONS_PATH, format_path
from kedge.errors import InvalidSetting
from kedge.turns import UserBlock, user
from kedge.turns.frozen_json import FrozenMap, thaw

if TYPE_CHECKING:
    from pydantic import TypeAdapter

OutputT_co = TypeVar("OutputT_co", covariant=True, default=Any)

MAX_PROBLEMS = 8
WRAPPER_MEMBER = "value"
WHOLE = "the answer"
_TYPE_KEYWORDS = {"type", "anyOf", "oneOf", "enum", "const"}
_DOCUMENT_KEYWORDS = {"$defs", "$id", "$schema"}
"""Keywords of a schema document that are not part of a subschema."""
CORRECTION_ORIGIN = "output"
"""The ``origin`` of a message that requests another answer."""
CORRECTION_PROMPT = """\
That does not have the form asked for:
{problems}

Write the whole answer again, in that form."""
"""The message that requests another answer; stored workflows depend on its text."""


class SchemaMismatch(Exception):
    """An answer does not match its schema; the message lists the problems for the model.

    Attributes:
        problems: The problems, one line each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        lines = [f"- {problem}" for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"- and {len(problems) - MAX_PROBLEMS} more")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)


class OutputSchema(msgspec.Struct, Generic[OutputT_co], frozen=True):
    """The schema of an answer. Create one with ``to_output_schema``.

    Attributes:
        name: The name of the schema in the request.
        schema: The JSON schema of the answer; an object at the top.
        adapter: The validator of a type; None for a JSON schema.
        wrapped: Whether the value is the member ``value`` of the answer.
    """

    name: str
    schema: FrozenMap
    adapter: "TypeAdapter[OutputT_co] | None" = None
    wrapped: bool = False

    def request_options(self) -> dict[str, Any]:
        """Return the request parameter for this schema, as the Responses API names it."""
        text_format: dict[str, Any] = {"type": "json_schema", "name": self.name}
        strict_schema = self._build_strict()
        if strict_schema:
            text_format["schema"] = strict_schema
            text_format["strict"] = True
        else:
            text_format["schema"] = thaw(self.schema)
        return {"text": {"format": text_format}}

    def parse(self, text: str) -> OutputT_co:
        """Return the value of an answer.

        Args:
            text: The text of the answer, which may be in a code fence.

        Raises:
            SchemaMismatch: The text is not JSON, or does not match the schema.
        """
        text = _strip_fence(text)
        if self.adapter is not None:
            return self._validate_type(text, self.adapter)
        return self._validate_schema(text)

    def parse_partial(self, text: str) -> Any:
        """Return the JSON values of an answer that is not complete yet; None before the first one.

        They are not validated: members may be missing, and the last text may be cut.
        """
        from pydantic_core import from_json

        if text.lstrip().startswith("```"):
            text = text.partition("\n")[2]
        try:
            value = from_json(text.strip().rstrip("`"), allow_partial="trailing-strings")
        except ValueError:
            return None
        return self._unwrap(value, None)

    def build_correction(self, mismatch: SchemaMismatch) -> UserBlock:
        """Return the message that requests another answer.

        It repeats the schema, for servers that do not pass it to the model.

        Args:
            mismatch: The problems of the last answer.
        """
        message = CORRECTION_PROMPT.format(problems=mismatch)
        schema = json.dumps(thaw(self.schema), ensure_ascii=False)
        text = f"{message} It is JSON that matches this schema:\n{schema}"
        return user(text, origin=CORRECTION_ORIGIN)

    def build_instructions(self) -> str:
        """Return system text that requests the answer, for servers without a parameter for it."""
        schema = json.dumps(thaw(self.schema), ensure_ascii=False)
        return f"Answer only with JSON that matches this schema, without other text:\n{schema}"

    def to_json(self, value: Any) -> Any:
        """Return a value as JSON values."""
        if self.adapter is None:
            return value
        return self.adapter.dump_python(value, mode="json")

    def _build_strict(self) -> dict[str, Any] | None:
        """Return the strict form, or None if there is none."""
        schema = thaw(self.schema)
        if not self.adapter and not _is_closed(schema):
            return None
        try:
            return json_schema.to_strict_schema(schema, _NotStrict)
        except _NotStrict:
            return None

    def _unwrap(self, value: Any, default: Any) -> Any:
        """Return the value inside the wrapper; ``default`` if it has none yet."""
        if not self.wrapped or not isinstance(value, dict):
            return value
        members = cast("dict[str, Any]", value)
        if members.keys() <= {WRAPPER_MEMBER}:
            return members.get(WRAPPER_MEMBER, default)
        return members  # a server that ignores the schema may still send a valid value

    def _validate_type(self, text: str, adapter: "TypeAdapter[OutputT_co]") -> OutputT_co:
        from pydantic import ValidationError
        from pydantic_core import from_json, to_json

        try:
            if self.wrapped:
                text = to_json(self._unwrap(from_json(text), {})).decode()
            return adapter.validate_json(text)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            problems = [f"{format_path(each['loc'], WHOLE)}: {each['msg']}" for each in details]
            raise SchemaMismatch(problems) from error
        except ValueError as error:
            raise SchemaMismatch([f"the answer is not valid JSON ({error})"]) from error

    def _validate_schema(self, text: str) -> Any:
        from jsonschema import Draft202012Validator
        from referencing import Registry
        from referencing.exceptions import Unresolvable

        try:
            value = json.loads(text)
            # Python also reads NaN, numbers beyond its floats, and escapes of half a character.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise SchemaMismatch([f"the answer is not valid JSON ({error})"]) from error
        checked: Any = value
        if self.wrapped and not isinstance(value, dict):
            checked = {WRAPPER_MEMBER: value}
        # By default, the validator downloads the target of a `$ref`.
        validator = Draft202012Validator(thaw(self.schema), registry=Registry[Any]())
        try:
            errors = list(validator.iter_errors(checked))  # pyright: ignore[reportUnknownMemberType]
        except Unresolvable as error:
            raise InvalidSetting(
                f"the schema of {self.name} refers to {error.ref!r}, which it does not contain; "
                "add the definition to $defs"
            ) from error
        errors.sort(key=lambda error: [str(step) for step in error.absolute_path])
        if errors:
            problems = [f"{format_path(e.absolute_path, WHOLE)}: {e.message}" for e in errors]
            raise SchemaMismatch(problems)
        return self._unwrap(checked, None)


class _NotStrict(Exception):
    """A schema has no strict form."""


def to_output_schema(output: Any, name: str = "answer") -> OutputSchema[Any]:
    """Return the schema of a type, or of a JSON schema.

    Args:
        output: A pydantic model, dataclass, TypedDict, enum, union, plain type or JSON schema.
        name: The name of a schema that has none.

    Raises:
        InvalidSetting: It is neither a type with a JSON schema nor a valid JSON schema.
    """
    if isinstance(output, OutputSchema):
        return cast("OutputSchema[Any]", output)
    if isinstance(output, Mapping):
        schema = dict(cast("Mapping[str, Any]", output))
        _check_schema(schema, name)
        if "definitions" in schema:  # the name of $defs in older drafts
            schema["$defs"] = {**schema.pop("definitions"), **schema.get("$defs", {})}
            schema = _move_references(schema, "#/definitions/", DEFINITIONS_PATH)
        return _build_schema(str(schema.get("title") or name), schema, None)
    try:
        adapter, schema = json_schema.adapt_type(json_schema.replace_iterables(output))
    except TypeError as error:
        raise InvalidSetting(
            f"the schema of {name} must be a type with a JSON schema, such as a pydantic model or a "
            f"dataclass, or a JSON schema, not {describe_value(output)}: {error}"
        ) from error
    if get_origin(output) is None:
        name = getattr(output, "__name__", "") or name
    return _build_schema(name, schema, adapter)


def _build_schema(
    name: str, schema: dict[str, Any], adapter: "TypeAdapter[Any] | None"
) -> OutputSchema[Any]:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64] or "answer"
    definitions: dict[str, Any] = schema.get("$defs", {})
    reference = str(schema.get("$ref", "")).removeprefix(DEFINITIONS_PATH)
    definition: dict[str, Any] | bool | None = definitions.get(reference)
    if isinstance(definition, dict):  # a recursive model; servers require an object
        schema = {**definition, "$defs": definitions}
    if schema.get("type") == "object" or not (adapter or schema.keys() & _TYPE_KEYWORDS):
        return OutputSchema(name, FrozenMap(schema), adapter)
    schema = _move_references(schema, "#", f"#/properties/{WRAPPER_MEMBER}")
    inner = {key: value for key, value in schema.items() if key not in _DOCUMENT_KEYWORDS}
    wrapper: dict[str, Any] = {
        "type": "object",
        "properties": {WRAPPER_MEMBER: inner},
        "required": [WRAPPER_MEMBER],
        "additionalProperties": False,
    }
    if "$defs" in schema:
        wrapper["$defs"] = schema["$defs"]
    return OutputSchema(name, FrozenMap(wrapper), adapter, wrapped=True)


def _move_references(schema: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the schema with ``new`` for ``old`` at the start of references, except for those to ``$defs``."""
    moved = json_schema.map_subschemas(schema, lambda each: _move_references(each, old, new))
    reference = str(schema.get("$ref", ""))
    if reference.startswith(old) and not reference.startswith(DEFINITIONS_PATH):
        moved["$ref"] = new + reference.removeprefix(old)
    return moved


def _check_schema(schema: Mapping[str, Any], name: str) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)  # pyright: ignore[reportUnknownMemberType]
    except SchemaError as error:
        problem = f"the schema of {name} is not a valid JSON schema: {error.message}"
        raise InvalidSetting(problem) from error


def _is_closed(schema: dict[str, Any]) -> bool:
    """Return whether every member is required at all levels: then the strict form accepts the same values."""
    requires_all = set(schema.get("properties", {})) <= set(schema.get("required", ()))
    return requires_all and all(map(_is_closed, json_schema.list_subschemas(schema)))


def _strip_fence(text: str) -> str:
    head, line_break, rest = text.strip().partition("\n")
    is_fenced = head.strip().lower() in ("```", "```json") and rest.endswith("```")
    if not line_break or not is_fenced:
        return text
    return rest.removesuffix("```")
