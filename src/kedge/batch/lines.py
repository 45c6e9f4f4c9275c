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

KEYS = ("id", "prompt", "prompts", "system", "model", "params")
OURS = ("key", "at", "tap", "candidates")
"""Options of a conversation that are no parameters of a request: a line cannot give them."""


@dataclass(frozen=True, slots=True)
class Line:
    """One conversation to be had: its turns, and with whom."""

    id: str
    prompts: tuple[str, ...]
    system: str = ""
    model: str = ""
    """A model string, where it is not the batch's."""
    params: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def plain(self) -> dict[str, Any]:
        """The line as JSON can say it."""
        return {
            "id": self.id,
            "prompts": list(self.prompts),
            "system": self.system,
            "model": self.model,
            "params": self.params,
        }

    @classmethod
    def of(cls, data: object, place: str = "line", *, number: int = 0) -> "Line":
        """Read a line from what JSON said; ``place`` leads the messages of errors.

        A line without an id goes by its number.
        """
        if not isinstance(data, dict):
            raise InvalidBatch(f"{place} must be a JSON object with a prompt")
        table = cast("dict[str, Any]", data)
        for key in table:
            if key not in KEYS:
                raise InvalidBatch(f"{place} has no place for {key!r}; it takes {', '.join(KEYS)}")
        if ("prompt" in table) == ("prompts" in table):
            raise InvalidBatch(f"{place} needs either a prompt or prompts")
        prompts = table["prompts"] if "prompts" in table else [table["prompt"]]
        texts = cast("list[object]", prompts) if isinstance(prompts, list) else []
        if not texts or not all(isinstance(each, str) and each for each in texts):
            raise InvalidBatch(f"{place}: prompts are texts, at least one, and none is empty")
        return cls(
            id=_id(table.get("id", number or None), place),
            prompts=tuple(cast("list[str]", texts)),
            system=_text(table.get("system"), f"{place}.system"),
            model=_text(table.get("model"), f"{place}.model"),
            params=checked_params(table.get("params") or {}, f"{place}.params"),
        )


def checked_params(params: object, place: str) -> dict[str, Any]:
    """Parameters of requests; one that would be an option of ours is refused."""
    if not isinstance(params, dict):
        raise InvalidBatch(f"{place} must be an object")
    given = cast("dict[str, Any]", params)
    for name in OURS:
        if name in given:
            raise InvalidBatch(f"{place} has {name!r}, which no request takes; leave it out")
    return given


def read_lines(path: str | Path) -> list[Line]:
    """The lines of a file; a mistake is told with its number, before anything is sent."""
    lines: list[Line] = []
    seen: dict[str, int] = {}
    for number, data in _objects(Path(path)):
        place = f"line {number} of {Path(path).name}"
        line = Line.of(data, place, number=number)
        if line.id in seen:
            raise InvalidBatch(
                f"{place} has the id {line.id!r} of line {seen[line.id]}; ids must differ"
            )
        seen[line.id] = number
        lines.append(line)
    return lines


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _parsed(text, f"line {number} of {path.name}")
    except OSError as error:
        raise InvalidBatch(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidBatch(f"{path} is not UTF-8: {error}") from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidBatch(f"{place} is not valid JSON: {error}") from error


def _id(value: object, place: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidBatch(f"{place}.id must be a text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidBatch(f"{place}.id holds half a character, which no file can")
    return value


def _text(value: object, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidBatch(f"{place} must be a text")
    return value
