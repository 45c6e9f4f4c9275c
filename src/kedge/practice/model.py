"""The practice model itself: from what was asked to an answer.

Results of tools come first, then what ``tool_choice`` forces, then the rules in the order of
``RULES``: the first that has an answer gives it. What no rule knows is said back, with the number
of messages in sight, so that even small talk shows what is remembered.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from kedge.practice import arithmetic, echo_rules, recall_rules, tool_rules
from kedge.practice.context import (
    is_model_item,
    items_after_last_user,
    last_user_text,
    message_count,
    tool_results,
)
from kedge.practice.rule import (
    PhraseRule,
    TextResult,
    Utterance,
    first_match,
    parse_modifiers,
    pluralize,
    prefix_rule,
    quote_text,
)
from kedge.practice.schema_sample import sample_value
from kedge.practice.sentence_values import SentenceValues
from kedge.practice.values import (
    MessageOutput,
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    ReasoningOutput,
    RefusalOutput,
    ToolCallOutput,
)


def format_result(utterance: Utterance, result: TextResult) -> str:
    """Put what is said into the form that the request wants."""
    wanted = utterance.request.text_format or {}
    match wanted.get("type"):
        case "json_schema":
            return _encode_json(_fill_schema(utterance, result, wanted.get("schema")))
        case "json_object":
            return _encode_json({"answer": result.text if result.value is None else result.value})
        case _:
            return result.text


def _fill_schema(utterance: Utterance, result: TextResult, schema: object) -> Any:
    """Fill the schema: the fact of the answer first, tool results, the sentence, then the text."""
    extra: dict[str, Any] = {}
    for _, output in tool_results(items_after_last_user(utterance.request.items)):
        extra |= _parse_object(output)
    return sample_value(
        schema, SentenceValues(utterance.sentence, extra=extra), lambda _: result.text, result.value
    )


def _parse_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


MAX_QUOTE_LENGTH = 200
NON_REASONING_EFFORTS = (None, "none", "minimal")
HELP_TEXT = (
    'Try: "What did I say first?", "How many messages can you see?", "What is 2 + 3 * 4?", '
    '"Say hello 3 times", "Think about 6 * 7", "Write 100 words", "Count to 10, slowly", '
    '"Refuse to sing", or ask for one of your tools by its name.'
)

RULES: tuple[PhraseRule, ...] = (
    *echo_rules.LITERAL_RULES,
    *tool_rules.RULES,
    *recall_rules.RULES,
    *arithmetic.RULES,
    *echo_rules.LOOSE_RULES,
    prefix_rule(
        "give help",
        ("help", "what can"),
        r"(?:help|what can you do)\b",
        lambda _, __: TextResult(HELP_TEXT),
    ),
    *tool_rules.IMPLIED_RULES,
)


def answer(request: PracticeRequest) -> PracticeOutput:
    """Answer one request: pure, deterministic, instant."""
    heard = parse_utterance(request)
    said, why = respond(heard)
    parts: list[OutputPart] = (
        [ReasoningOutput(_reasoning_text(heard, why))] if _has_reasoning(heard) else []
    )
    if isinstance(said, TextResult):
        text = format_result(heard, said) if not said.is_refusal else said.text
        parts.append(
            RefusalOutput(_replace_surrogates(text))
            if said.is_refusal
            else MessageOutput(_replace_surrogates(text))
        )
    else:
        parts += [
            ToolCallOutput(each.name, _replace_surrogates(each.arguments), each.custom)
            for each in said
        ]
    return PracticeOutput(tuple(parts), heard.pace)


def parse_utterance(request: PracticeRequest) -> Utterance:
    """Read the newest user message and the manner in which it wants its answer."""
    message = last_user_text(request.items)
    manner = parse_modifiers(message)
    return Utterance(request, message, manner.sentence, manner.pace, manner.think)


def respond(utterance: Utterance) -> tuple[TextResult | tuple[ToolCallOutput, ...], str]:
    """Find what to say or to call, and what that is about."""
    if tool_rules.must_call(utterance.request) and (due := tool_rules.make_forced_calls(utterance)):
        return due, "call a tool, as I must"
    if (told := tool_rules.report_results(utterance)) is not None:
        due = tool_rules.make_named_calls(utterance)
        return (due, "make the next call") if due else (told, "use the results")
    if utterance.request.items and is_model_item(utterance.request.items[-1]):
        return _report_nothing_new(utterance.request), "wait for something new"
    return first_match(RULES, utterance) or (_echo_message(utterance), "say it back")


def _echo_message(utterance: Utterance) -> TextResult:
    if not utterance.message:
        return TextResult(f"You have said nothing. {_describe_visible(utterance.request)}")
    return TextResult(
        f"You said: {quote_text(utterance.message, MAX_QUOTE_LENGTH)} ({_describe_visible(utterance.request)})"
    )


def _report_nothing_new(request: PracticeRequest) -> TextResult:
    return TextResult(f"You have said nothing new. {_describe_visible(request)}")


def _describe_visible(request: PracticeRequest) -> str:
    return f"I can see {pluralize(message_count(request.items), 'message')}."


def _has_reasoning(utterance: Utterance) -> bool:
    effort = (utterance.request.reasoning or {}).get("effort")
    return utterance.think or effort not in NON_REASONING_EFFORTS


def _reasoning_text(utterance: Utterance, about: str) -> str:
    newest = quote_text(utterance.message, MAX_QUOTE_LENGTH)
    return f"{_describe_visible(utterance.request)} The newest from the user is {newest}. So I {about}."


def _replace_surrogates(text: str) -> str:
    """Replace what no encoding can write: surrogates without their other half."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
