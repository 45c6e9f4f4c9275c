"""Tests of the practice model, a pure function of the context that accepts any items."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.practice import (
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    answer,
)

Item = dict[str, Any]


def user_item(text: Any) -> Item:
    return {"type": "message", "role": "user", "content": text}


def answer_parts(*items: Item | str, **settings: Any) -> Sequence[OutputPart]:
    requested = [user_item(item) if isinstance(item, str) else item for item in items]
    return answer(PracticeRequest(requested, **settings)).parts


def answer_text(*items: Item | str, **settings: Any) -> str:
    (part,) = answer_parts(*items, **settings)
    assert part.kind == "text"
    return part.text


ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
SHOUT = {"type": "custom", "name": "shout"}
PING = {"type": "function", "name": "ping", "parameters": None}


def call_item(name: str, call_id: str = "c1") -> Item:
    return {"type": "function_call", "name": name, "call_id": call_id, "arguments": "{}"}


def output_item(text: Any, call_id: str = "c1") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


FIRST = "What did I say first?"
TEXT = {"type": "input_text", "text": "One"}
FILES = [{"type": "input_image"}, {"type": "input_file", "filename": "a.pdf"}, {"type": "x"}]
ENCRYPTED = {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"}
PAST_END = "I cannot see it: there is only 1 message of yours before this one."
ANSWERS: list[tuple[list[Item | str], str]] = [
    # A dotless i, a capital I with a dot and a long s are read as i and s.
    (["One", "What d\u0131d I say f\u0131rst?"], 'You said first: "One"'),
    (["One", "What d\u0130d \u0130 say f\u0130rst?"], 'You said first: "One"'),
    (["Say hi \u017flowly"], "hi"),
    # The content of a message may be a string, one part or a list of parts.
    ([{"role": "user", "content": "One"}, FIRST], 'You said first: "One"'),
    ([user_item([TEXT]), FIRST], 'You said first: "One"'),
    ([user_item(TEXT), FIRST], 'You said first: "One"'),
    ([user_item(FILES)], 'You said: "[image] [file a.pdf]" (I can see 1 message.)'),
    # A context may be empty, or have no message of a user.
    ([], "You have said nothing. I can see 0 messages."),
    ([user_item("Be kind.") | {"role": "system"}], "You have said nothing. I can see 1 message."),
    (["Say: a\ud800b"], "a\ufffdb"),
    (["One", "x " * 5_000 + FIRST], 'You said first: "One"'),
    (["My name is Ada.", "No, my name is Grace!", "What is my name?"], "Your name is Grace."),
    (["Hi", ENCRYPTED, "What did you think?"], "My last thought is sealed."),
    (["What did you think?"], "I can see no thought of mine."),
    (["One", "What did I say 9th?"], PAST_END),
    # Results in a history that the model did not write are used like its own.
    (["Hi", call_item("f"), output_item("done!")], "f says: done!"),
    (["Hi", output_item([{"type": "input_text", "text": "x"}])], "the tool says: x."),
]


@for_each(("items", "text"), ANSWERS)
def test_a_context_is_answered(items: list[Item | str], text: str) -> None:
    """The answer depends on the items of the context, in each of their forms."""
    assert answer_text(*items) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
types = ["message", "function_call", "function_call_output", "reasoning", "compaction", "odd"]
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(types) | json_values,
        "role": st.sampled_from(["user", "assistant", "system"]) | json_values,
        "content": st.text() | json_values,
        "output": json_values,
        "summary": json_values,
        "call_id": json_values,
        "name": json_values,
    },
)
requests = st.builds(
    PracticeRequest,
    st.lists(items, max_size=6),
    tools=st.lists(st.sampled_from([ADD, SHOUT, PING]), unique_by=lambda tool: tool["name"]),
    tool_choice=st.sampled_from(["auto", "none", "required", {"type": "function", "name": "ping"}]),
    text_format=st.none() | json_values.map(lambda value: {"type": "json_schema", "schema": value}),
    reasoning=st.none() | st.just({"effort": "low"}),
)  # fmt: skip


@given(requests)
def test_the_same_context_gives_the_same_answer(ask: PracticeRequest) -> None:
    """The answer to random items is deterministic and can be encoded, and the request is not modified."""
    before = copy.deepcopy(ask)
    reply = answer(ask)
    assert isinstance(reply, PracticeOutput)
    assert reply.parts
    assert answer(before) == reply
    assert ask == before
    for part in reply.parts:
        part.text.encode()


@given(st.text(max_size=60))
def test_any_sentence_has_an_answer(sentence: str) -> None:
    """A random sentence raises no error, with and without tools."""
    answer_parts(sentence, tools=[ADD, SHOUT, PING])
    answer_parts(sentence, text_format={"type": "json_object"})


def test_many_messages_are_counted_in_plain_digits() -> None:
    """The count has no thousands separator, because programs parse it."""
    items = [user_item(f"Line {number}") for number in range(1_001)]
    assert answer_text(*items).endswith("(I can see 1001 messages.)")
    assert "I can see 1002 messages" in answer_text(*items, "How many messages are there?")


def test_a_long_message_is_echoed_truncated() -> None:
    """The echo of a long message is truncated, and a quotation of it is not."""
    assert len(answer_text("x" * 10_000)) < 300
    assert len(answer_text("x" * 10_000, "What did I say first?")) > 10_000


def test_the_effort_determines_reasoning() -> None:
    """The efforts none and minimal give no reasoning, and every other effort does."""
    for effort, thinks in ((None, False), ("none", False), ("minimal", False), ("xhigh", True)):
        parts = answer_parts("Hi", reasoning={"effort": effort, "summary": "auto"})
        assert (parts[0].kind == "reasoning") == thinks


def test_tool_results_fill_a_schema() -> None:
    """The members of a JSON result fill the properties of the same names."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text_format = {"type": "json_schema", "name": "s", "schema": schema}
    text = answer_text("Hi", call_item("f"), output_item('{"n": 7}'), text_format=text_format)
    assert json.loads(text) == {"n": 7}


def test_a_refusal_is_not_json() -> None:
    """A refusal remains a refusal in every text format."""
    assert answer_parts("Refuse", text_format={"type": "json_object"}) == (
        OutputPart("refusal", "I will not do that."),
    )


TOOL_CHOICES: list[tuple[Any, str, list[str]]] = [
    ("auto", "Hello", []),
    ("none", "call add", []),
    ("required", "Hello", ["add"]),
    ("required", "call ping", ["ping"]),
    ("required", "call ping and shout", ["ping", "shout"]),
    ({"type": "function", "name": "ping"}, "call add", ["ping"]),
    ({"type": "custom", "name": "shout"}, "Hello", ["shout"]),
    ({"type": "function", "name": "unknown"}, "Hello", []),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "ping"}]}, "call add", []),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "ping"}]}, "call ping", ["ping"]),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "ping"}]}, "Hi", ["ping"]),
    ({"type": "web_search"}, "call ping", ["ping"]),
]


@for_each(("choice", "sentence", "names"), TOOL_CHOICES)
def test_tool_choice_is_respected(choice: Any, sentence: str, names: list[str]) -> None:
    """The model respects none, auto, required, a tool name and a list of allowed tools."""
    parts = answer_parts(
        sentence, tools=[ADD, SHOUT, PING, {"type": "web_search"}], tool_choice=choice
    )
    assert [part.name for part in parts if part.name] == names


def test_a_forced_call_is_forced_again_after_its_result() -> None:
    """As with hosted models, a required call is repeated until the client changes ``tool_choice``."""
    second = answer_parts(
        "Hi", call_item("ping"), output_item("pong"), tools=[PING], tool_choice="required"
    )
    assert second == (OutputPart("function_call", "{}", "ping"),)


TOOL_MENTIONS: list[tuple[str, list[str]]] = [
    ("add 1 and 2", ["add"]),
    ("Please ADD 1 and 2", ["add"]),
    ("the add tool is nice", []),
    ("never call add", []),
    ('call shout with "add"', ["shout"]),
    ("call add and add", ["add", "add"]),
    ("call all tools", ["add", "shout", "ping"]),
    ("can you run ping?", ["ping"]),
    ("Say: call add", []),
    ("ping " * 100, ["ping"]),
    ("call ping " * 100, ["ping"] * 64),
    ("shall we ping?", ["ping"]),
]


@for_each(("sentence", "names"), TOOL_MENTIONS)
def test_tools_are_called_on_request(sentence: str, names: list[str]) -> None:
    """A tool is called for a verb, a leading name or a question, but not for a mere mention."""
    parts = answer_parts(sentence, tools=[ADD, SHOUT, PING])
    assert [part.name for part in parts if part.name] == names


def test_steps_run_one_after_another() -> None:
    """A step after "then" waits for the result of the one before and receives it."""
    text = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = [ADD, {"type": "function", "name": "shout", "parameters": text}]
    sentence = "call add with 1 and 2, then shout the result"
    assert answer_parts(sentence, tools=tools) == (
        OutputPart("function_call", '{"a":1,"b":2}', "add"),
    )
    second = answer_parts(sentence, call_item("add"), output_item("3"), tools=tools)
    assert second == (OutputPart("function_call", '{"text":"3"}', "shout"),)
    done = answer_text(
        sentence,
        call_item("add"),
        output_item("3"),
        call_item("shout", "c2"),
        output_item("!", "c2"),
        tools=tools,
    )
    assert done == "add says: 3. shout says: !"


def test_a_malformed_tool_is_called_without_arguments() -> None:
    """Parameters that are not a valid schema give an empty object."""
    broken = {"type": "function", "name": "f", "parameters": {"properties": 1, "required": 2}}
    assert answer_parts("call f", tools=[broken]) == (OutputPart("function_call", "{}", "f"),)


@pytest.mark.parametrize(
    ("sentence", "size"), [("write 500 words", 500), ("count to 1000", 1_000), ("write 1 word", 1)]
)
def test_answers_have_the_requested_length(sentence: str, size: int) -> None:
    """The answer has the requested number of words."""
    assert len(answer_text(sentence).split()) == size


def test_lengths_are_bounded() -> None:
    """Answers are limited to 100,000 words, and repetitions to 1,000."""
    assert len(answer_text("write 999999999 words").split()) == 100_000
    assert len(answer_text("say a 9999 times").split()) == 1_000


@pytest.mark.parametrize(
    ("sentence", "pace"),
    [("Hi", 0), ("slowly: hi", 0.05), ("Please say hi very slowly!", 0.25), ("every 99 s: hi", 10)],
)
def test_the_pace_is_parsed(sentence: str, pace: float) -> None:
    """The pace is the number of seconds between chunks, limited to 10."""
    assert answer(PracticeRequest([user_item(sentence)])).pace == pace


@pytest.mark.parametrize("question", ["Hello, who are you?", "Who are you?", "what are you"])
def test_it_says_that_it_is_a_toy(question: str) -> None:
    """Asked who it is, it says what it is for, how to learn more and how to use a real model."""
    (part,) = answer(PracticeRequest([{"role": "user", "content": question}])).parts
    assert part.kind == "text"
    assert "toy" in part.text
    assert '"help"' in part.text
    assert "kedge chat --model openai:gpt-5.1" in part.text
    (other,) = answer(PracticeRequest([{"role": "user", "content": "What are you doing?"}])).parts
    assert "toy" not in str(other)
