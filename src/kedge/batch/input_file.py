"""Lines of a batch file: one conversation each, as JSON.

{"id": "a", "prompt": "Hello"}
{"id": "b", "prompts": ["My ship is the Argo.", "What is my ship?"], "system": "Be brief."}
{"id": "c", "prompt": "…", "model": "openai:gpt-5.1", "params": {"temperature": 0}}
{"id": "d", "prompt": "…", "schema": {"type": "object", "properties": …}}
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kedge.engines import to_output_schema
from kedge.errors import InvalidBatch, InvalidJSON, InvalidSetting
from kedge.turns.frozen_json import EMPTY, FrozenMap, freeze_map, thaw

LINE_KEYS = ("id", "prompt", "prompts", "system", "model", "params", "schema")
RESERVED_OPTIONS = ("self", "key", "at", "keep", "tap", "candidates", "before_send", "output")
"""Options of a conversation that are not request parameters, so that a line cannot set them."""
_OPTION_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, type(None)), "a text"),
    "tools": ((list, dict), "a list of tool definitions"),
    "ephemeral": ((str, list), "a text or a list of texts"),
    "text": ((dict, type(None)), "an object"),
}
"""Options that Kedge reads itself, so their types are not checked by a server."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One conversation of a batch: its prompts, model and parameters."""

    id: str
    prompts: tuple[str, ...]
    system: str = ""
    model: str = ""
    """A model string, if it differs from the batch's."""
    params: Mapping[str, Any] = EMPTY
    schema: Mapping[str, Any] | None = None
    """The JSON schema of each answer, if it has one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", FrozenMap(self.params))
        if self.schema is not None:
            object.__setattr__(self, "schema", FrozenMap(self.schema))

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        line = {name: thaw(getattr(self, name)) for name in self.__slots__}
        return {name: value for name, value in line.items() if value is not None}

    @classmethod
    def from_dict(cls, data: object, location: str = "line", *, number: int = 0) -> "BatchLine":
        """Create a line from parsed JSON.

        Args:
            data: The parsed JSON.
            number: The line number, which is the id of a line without one.
            location: The prefix of error messages.

        Raises:
            InvalidBatch: The line is malformed.
        """
        if not isinstance(data, dict):
            raise InvalidBatch(f"{location} must be a JSON object with a prompt")
        table = cast("dict[str, Any]", data)
        for key in table:
            if key not in LINE_KEYS:
                raise InvalidBatch(
                    f"{location} has the unknown member {key!r}; it may have {', '.join(LINE_KEYS)}"
                )
        if ("prompt" in table) == ("prompts" in table):
            raise InvalidBatch(f"{location} needs either a prompt or prompts")
        prompts = table["prompts"] if "prompts" in table else [table["prompt"]]
        texts = cast("list[object]", prompts) if isinstance(prompts, list) else []
        if not texts or not all(isinstance(each, str) and each for each in texts):
            raise InvalidBatch(
                f"{location}: prompts must be a list of one or more texts that are not empty"
            )
        return cls(
            id=_check_id(table.get("id", number or None), location),
            prompts=tuple(cast("list[str]", texts)),
            system=_check_text(table.get("system"), f"{location}: system"),
            model=_check_text(table.get("model"), f"{location}: model"),
            params=check_line_params(table.get("params") or {}, f"{location}: params"),
            schema=_check_schema(table.get("schema"), f"{location}: schema"),
        )


def check_line_params(params: object, location: str) -> dict[str, Any]:
    """Check the request parameters; options of Kedge are rejected."""
    if not isinstance(params, dict):
        raise InvalidBatch(f"{location} must be an object")
    checked = cast("dict[str, Any]", params)
    for name in RESERVED_OPTIONS:
        if name in checked:
            raise InvalidBatch(
                f"{location} has {name!r}, which is not a request parameter; remove it"
            )
    for name, (types, expected) in _OPTION_TYPES.items():
        if name in checked and not isinstance(checked[name], types):
            raise InvalidBatch(f"{location}.{name} must be {expected}")
    try:
        freeze_map(checked, location)
    except InvalidJSON as error:
        raise InvalidBatch(str(error)) from error
    return checked


def _check_schema(schema: object, location: str) -> dict[str, Any] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise InvalidBatch(f"{location} must be an object: a JSON schema")
    checked = cast("dict[str, Any]", schema)
    try:
        to_output_schema(checked, "answer")
    except InvalidSetting as error:
        raise InvalidBatch(f"{location}: {error}") from error
    return checked


def read_lines(path: str | Path) -> list[BatchLine]:
    """Read the lines of a batch file.

    Args:
        path: A JSONL file.

    Returns:
        The lines, in order.

    Raises:
        InvalidBatch: The file cannot be read, or a line is malformed; the message has its number.
    """
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, data in _iter_objects(Path(path)):
        location = f"line {number} of {Path(path).name}"
        line = BatchLine.from_dict(data, location, number=number)
        if line.id in seen:
            raise InvalidBatch(
                f"{location} has the same id {line.id!r} as line {seen[line.id]}; ids must be unique"
            )
        seen[line.id] = number
        lines.append(line)
    return lines


def _iter_objects(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _parse_json(text, f"line {number} of {path.name}")
    except OSError as error:
        raise InvalidBatch(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidBatch(f"{path} is not UTF-8: {error}") from error


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidBatch(f"{location} is not valid JSON: {error}") from error


def _check_id(value: object, location: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidBatch(f"{location}: id must be a text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidBatch(f"{location}: id contains a lone surrogate, which UTF-8 cannot encode")
    return value


def _check_text(value: object, location: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidBatch(f"{location} must be a text")
    return value
