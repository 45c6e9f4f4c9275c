"""The functions that create blocks."""

import json
from typing import Any

import pytest
from hypothesis import given

from for_each import for_each
from kedge import turns
from kedge.errors import InvalidJSON, InvalidTurn
from kedge.turns import (
    AssistantBlock,
    ImagePart,
    OpaqueBlock,
    ReasoningBlock,
    RefusalPart,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UserBlock,
    assistant,
    image,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from strategies import json_objects, json_values

IMAGE = image("https://example.com/a.png")


def test_each_constructor_creates_its_kind_of_block() -> None:
    """Each function creates its kind of block, and accepts content as text, a part or several parts."""
    assert user("hi") == UserBlock((TextPart("hi"),))
    assert user(IMAGE) == UserBlock((IMAGE,))
    assert user(["look", IMAGE]) == UserBlock((TextPart("look"), IMAGE))
    assert user(part for part in ("a", "b")) == UserBlock((TextPart("a"), TextPart("b")))
    assert assistant("hi") == AssistantBlock((TextPart("hi"),))
    assert assistant(RefusalPart("no")) == AssistantBlock((RefusalPart("no"),))
    assert system("be brief") == SystemBlock("be brief", "system")
    assert system("be brief", "developer").role == "developer"
    assert tool_call("f", '{"a": 1}', call_id="c") == ToolCallBlock("f", '{"a": 1}', "c")
    assert tool_call("f", "free text", call_id="c", custom=True).custom
    assert tool_result("c", "42") == ToolResultBlock("c", (TextPart("42"),))
    assert reasoning("thought") == ReasoningBlock(("thought",))
    assert reasoning(["a", "b"], text="c", encrypted_content="d") == ReasoningBlock(
        ("a", "b"), ("c",), "d"
    )
    assert reasoning() == reasoning("") == ReasoningBlock()
    assert opaque({"type": "x"}) == OpaqueBlock({"type": "x"})  # pyright: ignore[reportArgumentType]


CONSTRUCTORS: list[Any] = [
    lambda **identity: user("a", **identity),
    lambda **identity: assistant("a", **identity),
    lambda **identity: system("a", **identity),
    lambda **identity: tool_call("f", "{}", **identity),
    lambda **identity: tool_result("c", "a", **identity),
    lambda **identity: reasoning("a", **identity),
    lambda **identity: opaque({"type": "x"}, **identity),
]


@for_each("make", CONSTRUCTORS)
def test_each_constructor_accepts_the_common_fields(make: Any) -> None:
    """``id``, ``metadata``, ``origin`` and ``extra`` are keyword arguments, and None means the default."""
    block = make(id="mine", metadata={"a": [1]}, origin="guard", extra={"new": 1})
    assert (block.id, block.origin) == ("mine", "guard")
    assert (block.metadata, block.extra) == ({"a": [1]}, {"new": 1})
    plain = make(id=None, metadata=None, origin=None)
    assert (plain.metadata, plain.origin) == ({}, "user")
    assert plain.id.startswith("blk_")


@given(json_objects())
def test_mapping_of_arguments_is_encoded_as_json(arguments: Any) -> None:
    """A mapping of arguments is encoded as JSON, and a string of arguments is left unchanged."""
    call = tool_call("f", arguments, call_id="c")
    assert json.dumps(json.loads(call.arguments)) == json.dumps(arguments)
    assert tool_call("f", call.arguments, call_id="c") == call
    assert tool_call("f", '{"a" :1,}', call_id="c").arguments == '{"a" :1,}'


@given(json_values())
def test_any_json_value_is_a_valid_output(value: Any) -> None:
    """A text output is unchanged, and any other value is encoded as JSON."""
    text = tool_result("c", value).text
    assert (
        text == value
        if isinstance(value, str)
        else json.dumps(json.loads(text)) == json.dumps(value)
    )


def test_parts_are_a_valid_output() -> None:
    """An output that contains parts is stored as parts, and a list of strings is encoded as JSON."""
    assert tool_result("c", IMAGE).parts == (IMAGE,)
    assert tool_result("c", [TextPart("a"), IMAGE]).parts == (TextPart("a"), IMAGE)
    assert tool_result("c", ("a", IMAGE)).parts == (TextPart("a"), IMAGE)
    assert tool_result("c", ["a", "b"]).text == '["a", "b"]'
    assert tool_result("c", []).text == "[]"
    assert tool_result("c", None).text == "null"


def test_a_call_without_a_call_id_gets_one() -> None:
    """A tool call without a ``call_id`` gets a unique one."""
    one, other = tool_call("f", {}), tool_call("f", {})
    assert one.call_id.startswith("call_")
    assert one.call_id != other.call_id


untyped: Any = turns  # the same module, untyped
INVALID_ARGUMENTS: list[tuple[Any, str]] = [
    (lambda: untyped.user(None), "content must be text or parts, not NoneType"),
    (lambda: untyped.user(5), "content must be text or parts, not int"),
    (lambda: untyped.user(b"bytes"), "content must be text or parts, not bytes"),
    (lambda: untyped.user({"text": "a"}), "content must be text or parts, not dict"),
    (lambda: untyped.user(["a", 5]), "not int"),
    (lambda: untyped.assistant(["a", IMAGE]), "not ImagePart"),
    (lambda: untyped.assistant(user("a")), "content must be text or parts, not UserBlock"),
    (lambda: untyped.system(None), "text: expected a string"),
    (lambda: untyped.tool_call("f", None), "arguments: expected a mapping, got NoneType"),
    (lambda: untyped.tool_call("f", [1]), "arguments: expected a mapping, got list"),
    (lambda: untyped.tool_call("f", {"a": float("inf")}), "arguments.a: inf is not a JSON number"),
    (lambda: untyped.tool_call("f", {1: 2}), "arguments: the key 1 is not a string"),
    (lambda: untyped.tool_call("f", "\ud800"), "arguments: lone surrogate"),
    (lambda: untyped.tool_result("c", {1, 2}), "a set is not a JSON value"),
    (lambda: untyped.tool_result("c", [IMAGE, 5]), "not int"),
    (lambda: untyped.reasoning([None]), "summary[0]: expected a string, got NoneType"),
    (lambda: untyped.opaque([1]), "item: expected a mapping, got list"),
]


@for_each(("make", "message"), INVALID_ARGUMENTS)
def test_invalid_content_is_rejected(make: Any, message: str) -> None:
    """Invalid content raises ``InvalidTurn`` with the expected type."""
    with pytest.raises(InvalidTurn) as error:
        make()
    assert message in str(error.value)


def test_unknown_keyword_raises_type_error() -> None:
    """A misspelled keyword raises ``TypeError``."""
    with pytest.raises(TypeError, match="metdata"):
        user("a", metdata={})  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidJSON):
        user("a", metadata={"a": ImagePart("u")})
