"""Answer requests with the practice model.

Calls that ``tool_choice`` forces have precedence, then the results of tools, then the rules in the order
of ``RULES``; the first one with an answer is used. A sentence that no rule matches is echoed, with the
number of visible messages, so that any sentence shows how much context is stored.
"""

from typing import Any

from kedge.practice import text_rules, tool_rules
from kedge.practice.context import (
    MessageOutput,
    OutputPart,
    PhraseRule,
    PracticeOutput,
    PracticeRequest,
    ReasoningOutput,
    RefusalOutput,
    TextResult,
    ToolCallOutput,
    Utterance,
    first_match,
    format_count,
    is_model_item,
    items_after_last_user,
    message_count,
    parse_utterance,
    prefix_rule,
    quote_text,
    tool_results,
)
from kedge.practice.schema_sample import sample_value
from kedge.practice.sentence_values import SentenceValues


def format_result(utterance: Utterance, result: TextResult) -> str:
    """Format a text answer as the request's ``text.format`` requires."""
    text_format = utterance.request.text_format or {}
    match text_format.get("type"):
        case "json_schema" | "json_object" if utterance.wants_invalid:
            return f"Not JSON: {result.text}"
        case "json_schema":
            return tool_rules.encode_json(
                _fill_schema(utterance, result, text_format.get("schema"))
            )
        case "json_object":
            return tool_rules.encode_json(
                {"answer": result.text if result.value is None else result.value}
            )
        case _:
            return result.text


def _fill_schema(utterance: Utterance, result: TextResult, schema: object) -> Any:
    """Fill the schema with the fact of the answer, tool results, the sentence, then the text."""
    extra: dict[str, Any] = {}
    for _, output in tool_results(items_after_last_user(utterance.request.items)):
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

RULES: tuple[PhraseRule, ...] = (
    *text_rules.LITERAL_RULES,
    *tool_rules.RULES,
    *text_rules.RECALL_RULES,
    *text_rules.SUM_RULES,
    *text_rules.LOOSE_RULES,
    prefix_rule("give help", r"(?:help|what can you do)\b", lambda _, __: TextResult(HELP_TEXT)),
    prefix_rule(
        "introduce itself",
        _GREETING + r"(?:who|what|which model|what model) are you\W*\Z",
        lambda _, __: TextResult(INTRODUCTION),
    ),
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
        (MessageOutput(text='6 * 7 = 42.'),)
    """
    utterance = parse_utterance(request)
    result, topic = respond(utterance)
    parts: list[OutputPart] = []
    effort = (request.reasoning or {}).get("effort")
    if utterance.think or effort not in NON_REASONING_EFFORTS:
        newest = quote_text(utterance.message, MAX_QUOTE_LENGTH)
        text = f"{_describe_visible(request)} The newest from the user is {newest}. So I {topic}."
        parts.append(ReasoningOutput(text))
    if not isinstance(result, TextResult):
        for call in result:
            arguments = _replace_surrogates(call.arguments)
            parts.append(ToolCallOutput(call.name, arguments, call.custom))
    elif result.is_refusal:
        parts.append(RefusalOutput(_replace_surrogates(result.text)))
    else:
        parts.append(MessageOutput(_replace_surrogates(format_result(utterance, result))))
    return PracticeOutput(tuple(parts), utterance.pace)


def respond(utterance: Utterance) -> tuple[TextResult | tuple[ToolCallOutput, ...], str]:
    """Find the text or the calls of the answer, and their topic."""
    if tool_rules.must_call(utterance.request) and (
        calls := tool_rules.make_forced_calls(utterance)
    ):
        return calls, "call a tool, as I must"
    if (report := tool_rules.report_results(utterance)) is not None:
        calls = tool_rules.make_named_calls(utterance)
        return (calls, "make the next call") if calls else (report, "use the results")
    if utterance.request.items and is_model_item(utterance.request.items[-1]):
        text = f"You have said nothing new. {_describe_visible(utterance.request)}"
        return TextResult(text), "wait for something new"
    return first_match(RULES, utterance) or (_echo_message(utterance), "say it back")


def _echo_message(utterance: Utterance) -> TextResult:
    if not utterance.message:
        return TextResult(f"You have said nothing. {_describe_visible(utterance.request)}")
    return TextResult(
        f"You said: {quote_text(utterance.message, MAX_QUOTE_LENGTH)} ({_describe_visible(utterance.request)})"
    )


def _describe_visible(request: PracticeRequest) -> str:
    return f"I can see {format_count(message_count(request.items), 'message')}."


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which no encoding can represent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
