"""Scripts: fixed answers for tests and demos.

A script is JSON or TOML with one list, ``answers``. Each answer may have conditions (``when``: the newest user
message contains this text; ``sees``: any message does; ``after``: the result of this tool follows
that message; ``turn``: it is the n-th answer of the conversation) and has parts (``think``, ``say``,
``refuse``, ``call``, in that order, and ``pace``). The first answer whose conditions are all met is
used; if there is none, the practice model answers. Like the answers of the model, the answers of a script
depend on the context only.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from kedge._internal.files import read_regular_file
from kedge.errors import InvalidScript
from kedge.server.practice_model.items import (
    count_answers,
    items_after_last_user,
    last_user_text,
    message_texts,
    tool_results,
)
from kedge.server.practice_model.model import answer
from kedge.server.practice_model.request import (
    ItemKind,
    OutputPart,
    PracticeOutput,
    PracticeRequest,
)

MAX_PACE = 60.0
MAX_SCRIPT_BYTES = 16 << 20
"""The maximum size of a file with a script."""


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call: ``arguments`` for a function, ``input`` for a custom tool."""

    name: str
    arguments: Mapping[str, Any] | str | None = None
    input: str | None = None

    def __post_init__(self) -> None:
        if self.arguments is not None and self.input is not None:
            raise ValueError("arguments (a function) or input (a custom tool), not both")

    def build_part(self) -> OutputPart:
        """Return the part of an answer."""
        if self.input is not None:
            return OutputPart("custom_tool_call", self.input, self.name)
        if isinstance(self.arguments, str):
            return OutputPart("function_call", self.arguments, self.name)
        return OutputPart("function_call", json.dumps(self.arguments or {}), self.name)


class ScriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer of a script, with its conditions."""

    when: str | None = None
    sees: str | None = None
    after: str | None = None
    turn: int | None = None
    think: str | None = None
    say: str | None = None
    refuse: str | None = None
    call: ScriptedCall | list[ScriptedCall] = []
    pace: Annotated[float, msgspec.Meta(ge=0, le=MAX_PACE)] = 0.0

    def __post_init__(self) -> None:
        if not self.build_output().parts:
            raise ValueError("no answer; add think, say, refuse or call")

    def matches(self, request: PracticeRequest) -> bool:
        """Return whether every condition is met."""
        items = request.items
        if self.when is not None and not _contains(last_user_text(items), self.when):
            return False
        if self.sees is not None:
            texts = message_texts(items)
            if not any(_contains(text, self.sees) for text in texts):
                return False
        if self.after is not None:
            results = dict(tool_results(items_after_last_user(items)))
            if self.after not in results:
                return False
        return self.turn is None or count_answers(items) + 1 == self.turn

    def build_output(self) -> PracticeOutput:
        """Return the answer."""
        texts: Mapping[ItemKind, str | None] = {
            "reasoning": self.think,
            "text": self.say,
            "refusal": self.refuse,
        }
        parts = [OutputPart(kind, text) for kind, text in texts.items() if text is not None]
        if isinstance(self.call, list):
            parts += [call.build_part() for call in self.call]
        else:
            parts.append(self.call.build_part())
        return PracticeOutput(tuple(parts), self.pace)


class _ScriptFile(msgspec.Struct, forbid_unknown_fields=True):
    answers: list[ScriptEntry]


def _contains(text: str, wanted: str) -> bool:
    return wanted.casefold() in text.casefold()


class Script(msgspec.Struct, frozen=True):
    """Fixed answers, tried in order; the practice model answers if none applies.

    Example:
        >>> script = Script.from_data({"answers": [{"when": "weather", "say": "Sunny."}]})
        >>> script.answer(PracticeRequest([{"role": "user", "content": "The weather?"}])).parts
        (OutputPart(kind='text', text='Sunny.', name=''),)
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
            text = read_regular_file(path, MAX_SCRIPT_BYTES).decode("utf-8")
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
        try:
            return cls(tuple(msgspec.convert(data, _ScriptFile).answers))
        except msgspec.ValidationError as error:
            raise InvalidScript(location, f"is not valid: {error}") from None

    def answer(self, request: PracticeRequest) -> PracticeOutput:
        """Return the first answer that applies, or the answer of the practice model.

        Args:
            request: The request to answer.

        Returns:
            The answer.
        """
        for entry in self.entries:
            if entry.matches(request):
                return entry.build_output()
        return answer(request)
