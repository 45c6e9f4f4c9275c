"""Answer requests with the practice model, or with the fixed answers of a script, for tests and demos.

Calls that ``tool_choice`` forces have precedence, then the results of tools, then the rules in the order
of ``RULES``; the first one with an answer is used. A sentence that no rule matches is echoed, with the
number of visible messages, so that any sentence shows how much context is stored.

A script is JSON or TOML with one list, ``answers``. Each answer may have conditions (``when``: the newest user
message contains this text; ``sees``: any message does; ``after``: the result of this tool follows
that message; ``turn``: it is the n-th answer of the conversation) and has parts (``think``, ``say``,
``refuse``, ``call``, in that order, and ``pace``). The first answer whose conditions are all met is
used; if there is none, the practice model answers. Like those of the model, answers of a script depend
on the context only.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec.structs import replace

from kedge._internal.files import read_regular_file
from kedge.errors import InvalidScript
from kedge.server.practice_model import context, text_rules, tool_rules
from kedge.server.practice_model.context import (
    ItemKind,
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    TextResult,
    Utterance,
)
from kedge.server.practice_model.schema_sample import sample_value
from kedge.server.practice_model.sentence_values import SentenceValues


def format_result(utterance: Utterance, result: TextResult) -> str:
    """Format a text answer as the request's ``text.format`` requires."""
    text_format = utterance.request.text_format or {}
    match text_format.get("type"):
        case "json_schema" | "json_object" if utterance.wants_invalid:
            return f"Not JSON: {result.text}"
        case "json_schema":
            value = _fill_schema(utterance, result, text_format.get("schema"))
        case "json_object":
            value = {"answer": result.text if result.value is None else result.value}
        case _:
            return result.text
    return tool_rules.encode_json(value)


def _fill_schema(utterance: Utterance, result: TextResult, schema: object) -> Any:
    """Fill the schema with the fact of the answer, tool results, the sentence, then the text."""
    extra: dict[str, Any] = {}
    for _, output in context.tool_results(context.items_after_last_user(utterance.request.items)):
        value = tool_rules.parse_output(output)
        extra |= value if isinstance(value, dict) else {}
    facts = [] if result.value is None else [result.value]
    values = SentenceValues(utterance.sentence, extra, facts)
    return sample_value(schema, values, lambda _: result.text, utterance.budget)


MAX_QUOTE_LENGTH = 200
NON_REASONING_EFFORTS = (None, "none", "minimal")
HELP_TEXT = (
    'Try: "What did I say first?", "How many messages can you see?", "What is 2 + 3 * 4?", '
    '"Say hello 3 times", "Think about 6 * 7", "Write 100 words", "Count to 10, slowly", '
    '"Refuse to sing", or ask for one of your tools by its name.'
)

INTRODUCTION = (
    "I am the practice model of Kedge: a toy for trying Kedge, which needs no key and no network. "
    'Say "help" for what I understand. For a real model: kedge chat --model openai:gpt-5.1'
)
_GREETING = r"(?:(?:hello|hi|hey)\b[\s,.!]*)?"
SELF_RULES = context.RuleList()


@SELF_RULES.prefix("give help", r"(?:help|what can you do)\b")
def give_help(_: Utterance, __: object) -> TextResult:
    """List some phrases."""
    return TextResult(HELP_TEXT)


@SELF_RULES.prefix(
    "introduce itself", _GREETING + r"(?:who|what|which model|what model) are you\W*\Z"
)
def introduce_itself(_: Utterance, __: object) -> TextResult:
    """Say that this model is a toy."""
    return TextResult(INTRODUCTION)


RULES: tuple[context.PhraseRule, ...] = (
    *text_rules.LITERAL_RULES,
    *tool_rules.RULES,
    *text_rules.OTHER_RULES,
    *SELF_RULES,
    *tool_rules.IMPLIED_RULES,
)


def answer(request: PracticeRequest) -> PracticeOutput:
    """Answer one request. The answer depends on the request only.

    Args:
        request: The effective context and the settings of the request.

    Returns:
        The parts of the answer, and the pace at which to stream them.

    Raises:
        SchemaTooComplex: A schema of the request requires too much work, or too large a value.

    Example:
        >>> answer(PracticeRequest([{"role": "user", "content": "What is 6 * 7?"}])).parts
        (OutputPart(kind='text', text='6 * 7 = 42.', name=''),)
    """
    utterance = context.parse_utterance(request)
    result, topic = respond(utterance)
    parts: list[OutputPart] = []
    effort = (request.reasoning or {}).get("effort")
    if utterance.think or effort not in NON_REASONING_EFFORTS:
        newest = context.quote_text(utterance.message, MAX_QUOTE_LENGTH)
        text = f"{_describe_visible(request)} The newest from the user is {newest}. So I {topic}."
        parts.append(OutputPart("reasoning", text))
    if not isinstance(result, TextResult):
        parts.extend(result)
    elif result.is_refusal:
        parts.append(OutputPart("refusal", result.text))
    else:
        parts.append(OutputPart("text", format_result(utterance, result)))
    storable = [replace(part, text=_replace_surrogates(part.text)) for part in parts]
    return PracticeOutput(tuple(storable), utterance.pace)


def respond(utterance: Utterance) -> tuple[TextResult | tuple[OutputPart, ...], str]:
    """Find the text or the calls of the answer, and their topic."""
    if tool_rules.must_call(utterance.request) and (
        calls := tool_rules.make_forced_calls(utterance)
    ):
        return calls, "call a tool, as I must"
    if (report := tool_rules.report_results(utterance)) is not None:
        calls = tool_rules.make_named_calls(utterance)
        return (calls, "make the next call") if calls else (report, "use the results")
    if utterance.request.items and context.is_model_item(utterance.request.items[-1]):
        text = f"You have said nothing new. {_describe_visible(utterance.request)}"
        return TextResult(text), "wait for something new"
    return context.first_match(RULES, utterance) or (_echo_message(utterance), "say it back")


def _echo_message(utterance: Utterance) -> TextResult:
    visible = _describe_visible(utterance.request)
    if not utterance.message:
        return TextResult(f"You have said nothing. {visible}")
    quoted = context.quote_text(utterance.message, MAX_QUOTE_LENGTH)
    return TextResult(f"You said: {quoted} ({visible})")


def _describe_visible(request: PracticeRequest) -> str:
    return f"I can see {context.format_count(context.message_count(request.items), 'message')}."


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which no encoding can represent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
        text = self.arguments
        text = text if isinstance(text, str) else json.dumps(text or {})
        return OutputPart("function_call", text, self.name)


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
        texts = context.message_texts(items)
        results = dict(context.tool_results(context.items_after_last_user(items)))
        return (
            (self.when is None or _contains(context.last_user_text(items), self.when))
            and (self.sees is None or any(_contains(text, self.sees) for text in texts))
            and (self.after is None or self.after in results)
            and (self.turn is None or context.count_answers(items) + 1 == self.turn)
        )

    def build_output(self) -> PracticeOutput:
        """Return the answer."""
        texts: Mapping[ItemKind, str | None] = {
            "reasoning": self.think,
            "text": self.say,
            "refusal": self.refuse,
        }
        parts = [OutputPart(kind, text) for kind, text in texts.items() if text is not None]
        calls = self.call if isinstance(self.call, list) else [self.call]
        return PracticeOutput((*parts, *(call.build_part() for call in calls)), self.pace)


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
