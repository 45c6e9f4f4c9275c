"""Answer requests with the practice model.

Calls that ``tool_choice`` forces have precedence, then the results of tools, then the rules in the order
of ``RULES``; the first one with an answer is used. A sentence that no rule matches is echoed, with the
number of visible messages, so that any sentence shows how much context is stored.
"""

from typing import Any

from msgspec.structs import replace

from kedge.server.practice_model import text_rules, tool_rules
from kedge.server.practice_model.items import (
    is_model_item,
    items_after_last_user,
    message_count,
    tool_results,
)
from kedge.server.practice_model.request import OutputPart, PracticeOutput, PracticeRequest
from kedge.server.practice_model.rules import PhraseRule, RuleList, TextResult, first_match
from kedge.server.practice_model.schema_sample import sample_value
from kedge.server.practice_model.sentence_values import SentenceValues
from kedge.server.practice_model.text import encode_json, format_count, quote_text
from kedge.server.practice_model.utterance import Utterance, parse_utterance


def format_result(utterance: Utterance, result: TextResult) -> str:
    """Format a text answer as the request's ``text.format`` requires."""
    text_format = utterance.request.text_format or {}
    kind = text_format.get("type")
    if kind not in ("json_schema", "json_object"):
        return result.text
    if utterance.wants_invalid:
        return f"Not JSON: {result.text}"
    if kind == "json_schema":
        return encode_json(_fill_schema(utterance, result, text_format.get("schema")))
    if result.value is None:
        return encode_json({"answer": result.text})
    return encode_json({"answer": result.value})


def _fill_schema(utterance: Utterance, result: TextResult, schema: object) -> Any:
    """Fill the schema with the fact of the answer, tool results, the sentence, then the text."""
    result_members: dict[str, Any] = {}
    for _, output in tool_results(items_after_last_user(utterance.request.items)):
        value = tool_rules.parse_output(output)
        if isinstance(value, dict):
            result_members |= value
    facts: list[Any] = []
    if result.value is not None:
        facts.append(result.value)
    values = SentenceValues(utterance.sentence, result_members, facts)
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
SELF_RULES = RuleList()


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


RULES: tuple[PhraseRule, ...] = (
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
    utterance = parse_utterance(request)
    result, topic = respond(utterance)
    parts: list[OutputPart] = []
    effort = (request.reasoning or {}).get("effort")
    if utterance.think or effort not in NON_REASONING_EFFORTS:
        newest = quote_text(utterance.message, MAX_QUOTE_LENGTH)
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
    request = utterance.request
    if tool_rules.must_call(request):
        forced_calls = tool_rules.make_forced_calls(utterance)
        if forced_calls:
            return forced_calls, "call a tool, as I must"

    report = tool_rules.report_results(utterance)
    if report is not None:
        next_calls = tool_rules.make_named_calls(utterance)
        if next_calls:
            return next_calls, "make the next call"
        return report, "use the results"

    if request.items and is_model_item(request.items[-1]):
        text = f"You have said nothing new. {_describe_visible(request)}"
        return TextResult(text), "wait for something new"
    return first_match(RULES, utterance) or (_echo_message(utterance), "say it back")


def _echo_message(utterance: Utterance) -> TextResult:
    visible = _describe_visible(utterance.request)
    if not utterance.message:
        return TextResult(f"You have said nothing. {visible}")
    quoted = quote_text(utterance.message, MAX_QUOTE_LENGTH)
    return TextResult(f"You said: {quoted} ({visible})")


def _describe_visible(request: PracticeRequest) -> str:
    return f"I can see {format_count(message_count(request.items), 'message')}."


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which no encoding can represent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
