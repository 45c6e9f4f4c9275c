"""Lines of a batch: one conversation each, as JSON.

{"id": "a", "prompt": "Hello"}
{"id": "b", "prompts": ["My ship is the Argo.", "What is my ship?"], "system": "Be brief."}
{"id": "c", "prompt": "…", "model": "openai:gpt-5.1", "params": {"temperature": 0}}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kedge.errors import InvalidBatch

LINE_KEYS = ("id", "prompt", "prompts", "system", "model", "params")
RESERVED_OPTIONS = ("key", "at", "tap", "candidates")
"""Options of a conversation that are no parameters of a request: a line cannot give them."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One conversation to be had: its turns, and with whom."""

    id: str
    prompts: tuple[str, ...]
    system: str = ""
    model: str = ""
    """A model string, where it is not the batch's."""
    params: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON can say it."""
        return {
            "id": self.id,
            "prompts": list(self.prompts),
            "system": self.system,
            "model": self.model,
            "params": self.params,
        }

    @classmethod
    def from_dict(cls, data: object, location: str = "line", *, number: int = 0) -> "BatchLine":
        """Read a line from what JSON said; ``place`` leads the messages of errors.

        A line without an id goes by its number.
        """
        if not isinstance(data, dict):
            raise InvalidBatch(f"{location} must be a JSON object with a prompt")
        table = cast("dict[str, Any]", data)
        for key in table:
            if key not in LINE_KEYS:
                raise InvalidBatch(
                    f"{location} has no place for {key!r}; it takes {', '.join(LINE_KEYS)}"
                )
        if ("prompt" in table) == ("prompts" in table):
            raise InvalidBatch(f"{location} needs either a prompt or prompts")
        prompts = table["prompts"] if "prompts" in table else [table["prompt"]]
        texts = cast("list[object]", prompts) if isinstance(prompts, list) else []
        if not texts or not all(isinstance(each, str) and each for each in texts):
            raise InvalidBatch(f"{location}: prompts are texts, at least one, and none is empty")
        return cls(
            id=_check_id(table.get("id", number or None), location),
            prompts=tuple(cast("list[str]", texts)),
            system=_check_text(table.get("system"), f"{location}.system"),
            model=_check_text(table.get("model"), f"{location}.model"),
            params=check_params(table.get("params") or {}, f"{location}.params"),
        )


def check_params(params: object, location: str) -> dict[str, Any]:
    """Parameters of requests; one that would be an option of ours is refused."""
    if not isinstance(params, dict):
        raise InvalidBatch(f"{location} must be an object")
    given = cast("dict[str, Any]", params)
    for name in RESERVED_OPTIONS:
        if name in given:
            raise InvalidBatch(f"{location} has {name!r}, which no request takes; leave it out")
    return given


def read_lines(path: str | Path) -> list[BatchLine]:
    """The lines of a file; a mistake is told with its number, before anything is sent."""
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, data in _iter_objects(Path(path)):
        place = f"line {number} of {Path(path).name}"
        line = BatchLine.from_dict(data, place, number=number)
        if line.id in seen:
            raise InvalidBatch(
                f"{place} has the id {line.id!r} of line {seen[line.id]}; ids must differ"
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
    except ValueError as error:
        raise InvalidBatch(f"{location} is not valid JSON: {error}") from error


def _check_id(value: object, location: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidBatch(f"{location}.id must be a text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidBatch(f"{location}.id holds half a character, which no file can")
    return value


def _check_text(value: object, location: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidBatch(f"{location} must be a text")
    return value
