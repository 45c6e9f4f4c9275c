"""Structured output: the request parameter for a schema, and validation of the answer.

A schema is a pydantic model or a JSON schema. It is sent to the server; the answer is validated here as well,
because not every server enforces it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kedge.errors import InvalidWorkflow
from kedge.tools.strict_schema import iter_subschemas, to_strict_schema

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_PROBLEMS = 8
_FENCED_JSON = re.compile(
    r"\s*```(?:json)?\s*\n(?P<inside>.*?)\n?```\s*", re.DOTALL | re.IGNORECASE
)


class SchemaMismatch(Exception):
    """An answer does not match its schema; the message is sent to the model."""


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """The schema of an answer."""

    name: str
    schema: dict[str, Any]
    model: "type[BaseModel] | None" = None

    def request_options(self) -> dict[str, Any]:
        """Return the request parameter for this schema."""
        written: dict[str, Any] = {"type": "json_schema", "name": self.name, "schema": self.schema}
        strict = _to_strict(self.schema)
        if strict is not None:
            written |= {"schema": strict, "strict": True}
        return {"text": {"format": written}}

    def parse(self, text: str) -> Any:
        """Return the value of an answer, or raise if it does not match."""
        fenced = _FENCED_JSON.fullmatch(text)
        inside = fenced["inside"] if fenced else text
        return self._parse_with_model(inside) if self.model else self._parse_with_schema(inside)

    def to_json(self, value: Any) -> Any:
        """Return a value as JSON values."""
        return value.model_dump(mode="json") if self.model else value

    def from_json(self, value: Any) -> Any:
        """Return a value from JSON values."""
        return self.model.model_validate(value) if self.model else value

    def _parse_with_model(self, text: str) -> Any:
        from pydantic import ValidationError

        assert self.model is not None  # noqa: S101 - checked by the caller
        try:
            return self.model.model_validate_json(text)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            lines = [f"{_format_path(each['loc'])}: {each['msg']}" for each in details]
            raise SchemaMismatch(_format_problems(lines)) from error

    def _parse_with_schema(self, text: str) -> Any:
        from jsonschema import Draft202012Validator

        try:
            value = json.loads(text)
        except ValueError as error:
            raise SchemaMismatch(f"- the answer is not valid JSON ({error})") from error
        found = Draft202012Validator(self.schema).iter_errors(value)  # pyright: ignore[reportUnknownMemberType]
        problems = sorted(found, key=lambda each: [str(step) for step in each.absolute_path])
        if problems:
            raise SchemaMismatch(
                _format_problems(
                    [f"{_format_path(e.absolute_path)}: {e.message}" for e in problems]
                )
            )
        return value


def to_output_schema(given: Any, name: str = "answer") -> OutputSchema:
    """Return the schema of a pydantic model or a JSON schema."""
    if isinstance(given, OutputSchema):
        return given
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        model = cast("type[BaseModel]", given)
        return OutputSchema(_sanitize_name(model.__name__), model.model_json_schema(), model)
    if not isinstance(given, Mapping):
        raise InvalidWorkflow(
            f"the schema of {name} must be a pydantic model or a JSON schema, not a {type(given).__name__}"
        )
    from jsonschema import Draft202012Validator, SchemaError

    schema = dict(cast("Mapping[str, Any]", given))
    try:
        Draft202012Validator.check_schema(schema)  # pyright: ignore[reportUnknownMemberType]
    except SchemaError as error:
        raise InvalidWorkflow(
            f"the schema of {name} is not a valid JSON schema: {error.message}"
        ) from error
    return OutputSchema(_sanitize_name(str(schema.get("title") or name)), schema)


def _to_strict(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the strict form of the schema, if it accepts the same values."""
    if schema.get("type") != "object" or not _is_closed(schema):
        return None
    try:
        return to_strict_schema(schema, lambda path, problem: InvalidWorkflow(f"{path}: {problem}"))
    except InvalidWorkflow:
        return None


def _is_closed(schema: dict[str, Any]) -> bool:
    """Whether every member is required, at all levels, so that the strict form accepts the same values."""
    here = set(schema.get("properties", {})) <= set(schema.get("required", ()))
    return here and all(map(_is_closed, iter_subschemas(schema)))


def _sanitize_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64] or "answer"


def _format_path(steps: Any) -> str:
    shown = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return shown.removeprefix(".") or "the answer"


def _format_problems(lines: list[str]) -> str:
    more = len(lines) - MAX_PROBLEMS
    shown = [f"- {line}" for line in lines[:MAX_PROBLEMS]]
    return "\n".join([*shown, f"- and {more} more"] if more > 0 else shown)


def to_json_value(value: Any) -> Any:
    """Return a value of any type as JSON values."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
