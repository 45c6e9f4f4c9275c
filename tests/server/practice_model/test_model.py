"""Tests of the practice model, a pure function of the context that accepts any items."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.server.practice_model import OutputPart, PracticeOutput, PracticeRequest, answer

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
BROKEN = {"type": "function", "name": "f", "parameters": {"properties": 1, "required": 2}}


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
    st.lists(items | st.text(max_size=60).map(user_item), max_size=6),
    tools=st.lists(st.sampled_from([ADD, SHOUT, PING, BROKEN]), unique_by=lambda tool: tool["name"]),
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


def test_tool_results_fill_a_schema() -> None:
    """The members of a JSON result fill the properties of the same names."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text_format = {"type": "json_schema", "name": "s", "schema": schema}
    text = answer_text("Hi", call_item("f"), output_item('{"n": 7}'), text_format=text_format)
    assert json.loads(text) == {"n": 7}


def test_sizes_are_bounded() -> None:
    """Answers, repetitions, echoes, pauses and calls have limits; a quotation and a count of messages do not."""
    assert len(answer_text("write 500 words").split()) == 500
    assert len(answer_text("write 999999999 words").split()) == 100_000
    assert len(answer_text("say a 9999 times").split()) == 1_000
    assert len(answer_text("x" * 10_000)) < 300
    assert len(answer_text("x" * 10_000, FIRST)) > 10_000
    assert answer(PracticeRequest([user_item("every 99 s: hi")])).pace == 10
    # Programs parse the count, so it has no thousands separator.
    items = [user_item(f"Line {number}") for number in range(1_001)]
    assert answer_text(*items).endswith("(I can see 1001 messages.)")


def test_a_required_call_is_repeated_after_its_result() -> None:
    """As with hosted models, a call is forced until the client changes ``tool_choice``."""
    items = ("Hi", call_item("ping"), output_item("pong"))
    second = answer_parts(*items, tools=[PING], tool_choice="required")
    assert second == (OutputPart("function_call", "{}", "ping"),)


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
