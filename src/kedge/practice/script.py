"""A script: a file that fixes the answers, for tests and demos.

JSON or TOML with one list, ``answers``. Each answer may name when it holds (``when``: the newest
user message contains this text; ``sees``: any message does; ``after``: the result of
this tool has come since then; ``turn``: it is the n-th answer of the conversation) and what it is
(``think``, ``say``, ``refuse``, ``call``, in that order, and ``pace``). The first answer whose
conditions all hold is given; where none does, the practice model answers by itself. A script,
like the model, sees the context and nothing else: same context in, same answer out.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from kedge.errors import InvalidScript
from kedge.practice.context import answers_so_far, last_said, messages, results, since_last_said
from kedge.practice.model import answer
from kedge.practice.values import Ask, Call, Part, Refuse, Reply, Say, Think

Condition = Callable[[Ask, Any], bool]


def _contains(text: str, wanted: str) -> bool:
    return wanted.casefold() in text.casefold()


def _when(ask: Ask, wanted: str) -> bool:
    return _contains(last_said(ask.items), wanted)


def _sees(ask: Ask, wanted: str) -> bool:
    return any(_contains(text, wanted) for text in messages(ask.items))


def _after(ask: Ask, tool: str) -> bool:
    return any(name == tool for name, _ in results(since_last_said(ask.items)))


def _turn(ask: Ask, number: int) -> bool:
    return answers_so_far(ask.items) + 1 == number


CONDITIONS: Mapping[str, tuple[type, Condition]] = {
    "when": (str, _when),
    "sees": (str, _sees),
    "after": (str, _after),
    "turn": (int, _turn),
}
TEXTS: Mapping[str, Callable[[str], Part]] = {"think": Think, "say": Say, "refuse": Refuse}
KEYS = (*CONDITIONS, *TEXTS, "call", "pace")


@dataclass(frozen=True, slots=True)
class Line:
    """One answer of a script, with the conditions under which it is given."""

    conditions: tuple[tuple[Condition, Any], ...]
    reply: Reply

    def holds(self, ask: Ask) -> bool:
        """Whether every condition holds."""
        return all(condition(ask, wanted) for condition, wanted in self.conditions)


@dataclass(frozen=True, slots=True)
class Script:
    """Fixed answers, tried in order; the practice model speaks where none applies."""

    lines: tuple[Line, ...]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a script file, JSON or (by its ``.toml`` ending) TOML."""
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
    def from_data(cls, data: object, place: str = "script") -> Self:
        """Make a script of what a file holds; ``place`` leads the messages of errors."""
        table = _table(data, place, ("answers",))
        answers = _typed(table.get("answers"), list, f"{place}: answers")
        return cls(tuple(_line(entry, f"{place}: answers[{i}]") for i, entry in enumerate(answers)))

    def answer(self, ask: Ask) -> Reply:
        """Give the first answer that applies, or the practice model's own."""
        for line in self.lines:
            if line.holds(ask):
                return line.reply
        return answer(ask)


NAMES = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "a table"}


def _typed(value: Any, kind: type, place: str) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool):
        raise InvalidScript(place, f"must be {NAMES[kind]}")
    return value


def _table(value: object, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
    table = cast("dict[str, Any]", _typed(value, dict, place))
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise InvalidScript(place, f"has no place for {unknown[0]!r}; it takes {', '.join(keys)}")
    return table


def _line(entry: object, place: str) -> Line:
    table = _table(entry, place, KEYS)
    conditions = tuple(
        (condition, _typed(table[key], kind, f"{place}.{key}"))
        for key, (kind, condition) in CONDITIONS.items()
        if key in table
    )
    return Line(conditions, _reply(table, place))


def _reply(table: Mapping[str, Any], place: str) -> Reply:
    parts: list[Part] = [
        make(_typed(table[key], str, f"{place}.{key}"))
        for key, make in TEXTS.items()
        if key in table
    ]
    calls = table.get("call", [])
    for i, entry in enumerate(cast("list[object]", calls if isinstance(calls, list) else [calls])):
        parts.append(_call(entry, f"{place}.call" + (f"[{i}]" if isinstance(calls, list) else "")))
    if not parts:
        raise InvalidScript(place, "answers nothing; give it one of think, say, refuse, call")
    pace = float(_typed(table.get("pace", 0.0), float, f"{place}.pace"))
    if not 0 <= pace <= MOST_PACE:
        raise InvalidScript(f"{place}.pace", f"must be between 0 and {MOST_PACE:g} seconds")
    return Reply(tuple(parts), pace)


MOST_PACE = 60.0


def _call(entry: object, place: str) -> Call:
    table = _table(entry, place, ("name", "arguments", "input"))
    name = _typed(table.get("name"), str, f"{place}.name")
    if "input" in table:
        if "arguments" in table:
            raise InvalidScript(place, "takes arguments (a function) or input (custom), not both")
        return Call(name, _typed(table["input"], str, f"{place}.input"), custom=True)
    arguments = table.get("arguments", {})
    if isinstance(arguments, str):
        return Call(name, arguments)
    return Call(name, json.dumps(_typed(arguments, dict, f"{place}.arguments")))
