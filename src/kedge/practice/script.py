"""Scripts: files with fixed answers, for tests and demos.

JSON or TOML with one list, ``answers``. Each answer may have conditions (``when``: the newest user
message contains this text; ``sees``: any message does; ``after``: the result of this tool follows
that message; ``turn``: it is the n-th answer of the conversation) and has parts (``think``, ``say``,
``refuse``, ``call``, in that order, and ``pace``). The first answer whose conditions are all met is
used; if there is none, the practice model answers. Like those of the model, answers of a script depend
on the context only.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from kedge.errors import InvalidScript
from kedge.practice.context import (
    MessageOutput,
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    ReasoningOutput,
    RefusalOutput,
    ToolCallOutput,
    count_answers,
    items_after_last_user,
    last_user_text,
    message_texts,
    tool_results,
)
from kedge.practice.model import answer

ScriptCondition = Callable[[PracticeRequest, Any], bool]


def _contains(text: str, wanted: str) -> bool:
    return wanted.casefold() in text.casefold()


def _matches_last_message(request: PracticeRequest, wanted: str) -> bool:
    return _contains(last_user_text(request.items), wanted)


def _matches_any_message(request: PracticeRequest, wanted: str) -> bool:
    return any(_contains(text, wanted) for text in message_texts(request.items))


def _follows_tool_result(request: PracticeRequest, tool: str) -> bool:
    return any(name == tool for name, _ in tool_results(items_after_last_user(request.items)))


def _is_answer_number(request: PracticeRequest, number: int) -> bool:
    return count_answers(request.items) + 1 == number


CONDITIONS: Mapping[str, tuple[type, ScriptCondition]] = {
    "when": (str, _matches_last_message),
    "sees": (str, _matches_any_message),
    "after": (str, _follows_tool_result),
    "turn": (int, _is_answer_number),
}
TEXT_PARTS: Mapping[str, Callable[[str], OutputPart]] = {
    "think": ReasoningOutput,
    "say": MessageOutput,
    "refuse": RefusalOutput,
}
ENTRY_KEYS = (*CONDITIONS, *TEXT_PARTS, "call", "pace")


@dataclass(frozen=True, slots=True)
class ScriptEntry:
    """One answer of a script, with its conditions."""

    conditions: tuple[tuple[ScriptCondition, Any], ...]
    output: PracticeOutput

    def matches(self, request: PracticeRequest) -> bool:
        """Return whether every condition is met."""
        return all(condition(request, wanted) for condition, wanted in self.conditions)


@dataclass(frozen=True, slots=True)
class Script:
    """Fixed answers, tried in order; the practice model answers if none applies.

    Example:
        >>> script = Script.from_data({"answers": [{"when": "weather", "say": "Sunny."}]})
        >>> script.answer(PracticeRequest([{"role": "user", "content": "The weather?"}])).parts
        (MessageOutput(text='Sunny.'),)
    """

    entries: tuple[ScriptEntry, ...]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a script file.

        Args:
            path: A JSON file or, by its suffix ``.toml``, a TOML file.

        Returns:
            The script.

        Raises:
            InvalidScript: If the file cannot be read or is not a script.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except OSError as error:
            raise InvalidScript(str(path), f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise InvalidScript(str(path), f"is not valid: {error}") from error
        return cls.from_data(data, path.name)

    @classmethod
    def from_data(cls, data: object, location: str = "script") -> Self:
        """Return a script for the parsed content of a file.

        Args:
            data: A table with the list ``answers``.
            location: The start of error messages, such as the name of the file.

        Returns:
            The script.

        Raises:
            InvalidScript: If the data is not a script.
        """
        table = _check_table(data, location, ("answers",))
        answers = _check_type(table.get("answers"), list, f"{location}: answers")
        return cls(
            tuple(
                _parse_entry(entry, f"{location}: answers[{i}]") for i, entry in enumerate(answers)
            )
        )

    def answer(self, request: PracticeRequest) -> PracticeOutput:
        """Return the first answer that applies, or the answer of the practice model.

        Args:
            request: The request to answer.

        Returns:
            The answer.
        """
        for entry in self.entries:
            if entry.matches(request):
                return entry.output
        return answer(request)


TYPE_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a table",
}


def _check_type(value: Any, kind: type, location: str) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool):
        raise InvalidScript(location, f"must be {TYPE_NAMES[kind]}")
    return value


def _check_table(value: object, location: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidScript(location, f"must be a table with some of the keys {', '.join(keys)}")
    table = cast("dict[str, Any]", value)
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise InvalidScript(
            location, f"has an unknown key {unknown[0]!r}; known keys: {', '.join(keys)}"
        )
    return table


def _parse_entry(entry: object, location: str) -> ScriptEntry:
    table = _check_table(entry, location, ENTRY_KEYS)
    conditions = tuple(
        (condition, _check_type(table[key], kind, f"{location}.{key}"))
        for key, (kind, condition) in CONDITIONS.items()
        if key in table
    )
    return ScriptEntry(conditions, _parse_output(table, location))


def _parse_output(table: Mapping[str, Any], location: str) -> PracticeOutput:
    parts: list[OutputPart] = [
        make(_check_type(table[key], str, f"{location}.{key}"))
        for key, make in TEXT_PARTS.items()
        if key in table
    ]
    calls = table.get("call", [])
    for i, entry in enumerate(cast("list[object]", calls if isinstance(calls, list) else [calls])):
        parts.append(
            _parse_call(entry, f"{location}.call" + (f"[{i}]" if isinstance(calls, list) else ""))
        )
    if not parts:
        raise InvalidScript(location, "has no answer; add think, say, refuse or call")
    pace = float(_check_type(table.get("pace", 0.0), float, f"{location}.pace"))
    if not 0 <= pace <= MAX_PACE:
        raise InvalidScript(f"{location}.pace", f"must be between 0 and {MAX_PACE:g} seconds")
    return PracticeOutput(tuple(parts), pace)


MAX_PACE = 60.0


def _parse_call(entry: object, location: str) -> ToolCallOutput:
    table = _check_table(entry, location, ("name", "arguments", "input"))
    name = _check_type(table.get("name"), str, f"{location}.name")
    if "input" in table:
        if "arguments" in table:
            raise InvalidScript(
                location, "must have arguments (a function) or input (a custom tool), not both"
            )
        return ToolCallOutput(
            name, _check_type(table["input"], str, f"{location}.input"), custom=True
        )
    arguments = table.get("arguments", {})
    if isinstance(arguments, str):
        return ToolCallOutput(name, arguments)
    return ToolCallOutput(name, json.dumps(_check_type(arguments, dict, f"{location}.arguments")))
