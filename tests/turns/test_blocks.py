"""Blocks: equality by content, metadata, text, validation, and the functions that create them."""

import json
from typing import Any

import pytest
from hypothesis import given
from msgspec import structs

from for_each import for_each
from kedge import turns
from kedge.errors import InvalidTurn
from kedge.turns import (
    AssistantBlock,
    Block,
    FrozenMap,
    ImagePart,
    OpaqueBlock,
    ReasoningBlock,
    RefusalPart,
    Source,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
    assistant,
    image,
    load_block,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.turns.blocks import BlockBase
from strategies import blocks, json_objects, json_values, sample_blocks


@given(blocks(), json_objects())
def test_equality_ignores_id_metadata_origin_and_extra(block: Block, metadata: Any) -> None:
    """Blocks that differ only in id, metadata, origin or extra are equal and have the same hash."""
    other = structs.replace(block, id="other", metadata=metadata, origin="elsewhere")
    if not isinstance(block, UnknownBlock):
        other = structs.replace(other, extra=FrozenMap(new=1))
    assert other == block
    assert hash(other) == hash(block)
    assert (other.id, other.metadata, other.origin) == ("other", metadata, "elsewhere")


def test_blocks_with_different_content_differ() -> None:
    """Blocks of different kinds, or with any different member, are not equal."""
    variants: list[Block] = [
        *sample_blocks(),
        UserBlock((TextPart("a"), TextPart("b"))),
        UserBlock((TextPart("ab"),)),
        AssistantBlock((TextPart("ab"),)),
        SystemBlock("ab"),
        ToolCallBlock("f", "{ }", "call_1"),
        ToolCallBlock("f", "{}", "call_1", custom=True),
        ToolResultBlock("call_1", (TextPart("ab"),)),
        ToolResultBlock("call_1", (TextPart("ab"),), custom=True),
        ReasoningBlock(("ab",)),
        ReasoningBlock((), ("ab",)),
        opaque({"type": "x", "a": 1}),
        opaque({"type": "x", "a": True}),
        opaque({"type": "y", "a": 1}),
    ]
    for i, one in enumerate(variants):
        for j, other in enumerate(variants):
            assert (one == other) == (i == j)
    assert len(set(variants)) == len(variants)
    assert user("a") != "a"


def test_opaque_blocks_are_compared_by_visible_content() -> None:
    """Comparing opaque blocks ignores provider ids, statuses and nulls, except where they are content."""
    item = opaque({"type": "web_search_call", "action": {"query": "x"}})
    full = {"type": "web_search_call", "id": "ws_1", "status": "completed", "results": None}
    assert opaque({**full, "action": {"query": "x", "sources": None}}) == item
    one, other = ({"type": "item_reference", "id": id_} for id_ in "ab")
    assert opaque(one) != opaque(other)
    patch = {"type": "apply_patch_call_output", "status": "completed"}
    assert opaque(patch) != opaque({**patch, "status": "failed"})


IMAGE = image("https://example.com/a.png")
untyped: Any = turns  # the same module, untyped
INVALID_BLOCKS: list[tuple[Any, str]] = [
    (BlockBase, "this class is abstract; use kedge.user"),
    (lambda: untyped.UserBlock("text"), "a user block must have parts, not str"),
    (lambda: untyped.UserBlock(["text"]), "a user block must have TextPart"),
    (lambda: untyped.AssistantBlock([ImagePart("u")]), "an assistant block must have TextPart, R"),
    (lambda: untyped.ToolResultBlock("", ()), "a tool result needs the call_id of its call"),
    (lambda: untyped.ToolResultBlock("c", (), custom=None), "custom: expected a bool, got None"),
    (lambda: untyped.ToolCallBlock("f", "{}", ""), "a tool call needs a call_id"),
    (lambda: untyped.SystemBlock("a", "user"), "must be system or developer, not 'user'"),
    (lambda: untyped.SystemBlock(b"a"), "text: expected a string, got bytes"),
    (lambda: untyped.ReasoningBlock("abc"), "summary: expected several strings, got str"),
    (lambda: untyped.ReasoningBlock((), ["a", 5]), "texts[1]: expected a string, got int"),
    (lambda: untyped.OpaqueBlock({}), "an opaque block's item needs a type"),
    (
        lambda: untyped.OpaqueBlock({"type": "x", "a": {1}}),
        "item.a: a value of type set is not JSON",
    ),
    (lambda: untyped.UnknownBlock({"a": 1}), "needs a kind that Kedge does not know"),
    (lambda: untyped.UnknownBlock({"kind": "x", "id": "y"}), "must not have id, metadata"),
    (lambda: untyped.user("a", id=5), "id: expected a string, got int"),
    (lambda: untyped.user("a", id="\ud800"), "id: lone surrogate"),
    (
        lambda: untyped.user("a", metadata={"a": {"b": object()}}),
        "metadata.a.b: a value of type object is not",
    ),
    (lambda: untyped.user("a", extra={"parts": 1}), "extra holds 'parts'"),
    (lambda: untyped.user("a", source=["resp_1"]), "source: expected a Source, got list"),
    (lambda: untyped.Source("", "\ud800"), "item_id: lone surrogate"),
    (lambda: untyped.Source("", "", True), "output_index: expected an integer, got bool"),
    (lambda: untyped.user(5), "content must be text or parts, not int"),
    (lambda: untyped.user({"text": "a"}), "content must be text or parts, not dict"),
    (lambda: untyped.assistant(["a", IMAGE]), "not ImagePart"),
    (lambda: untyped.tool_call("f", None), "arguments: expected a mapping, got NoneType"),
    (lambda: untyped.tool_call("f", {"a": float("inf")}), "arguments.a: inf is not a JSON number"),
    (lambda: untyped.tool_call("f", "\ud800"), "arguments: lone surrogate"),
    (lambda: untyped.tool_result("c", {1, 2}), "a value of type set is not JSON"),
]


@for_each(("make", "message"), INVALID_BLOCKS)
def test_invalid_block_is_rejected(make: Any, message: str) -> None:
    """An invalid block, or content of one, raises ``InvalidTurn``, which names the member and the expected type."""
    with pytest.raises(InvalidTurn) as error:
        make()
    assert message in str(error.value)


def test_with_metadata_and_with_origin_return_a_new_block() -> None:
    """``with_metadata`` and ``with_origin`` return a new block with the same id and content."""
    block = user("a", metadata={"mine": 1, "gone": 2, "null": None})
    source = Source("resp_1", "msg_1", 2)
    tagged = block.with_metadata({"odd key": [1]}, gone=None).with_source(source)
    assert tagged.metadata == {"mine": 1, "null": None, "odd key": [1]}
    assert tagged.output_index == 2
    assert (tagged.response_id, tagged.item_id) == ("resp_1", "msg_1")
    assert (block.response_id, block.item_id) == ("", "")
    assert block.metadata == {"mine": 1, "gone": 2, "null": None}
    moved = tagged.with_origin("engine")
    assert (moved.id, moved.origin, block.origin) == (block.id, "engine", "user")
    assert moved == tagged == block


@for_each("name", Source.__struct_fields__)
def test_metadata_with_a_field_of_the_source_is_rejected(name: str) -> None:
    """The names of the fields of the source in metadata raise an error that names ``source``."""
    metadata = {"mine": 1, name: "resp_1"}
    for change in (
        lambda: user("a", metadata=metadata),
        lambda: user("a").with_metadata(metadata),
        lambda: structs.replace(user("a"), metadata=metadata),
        lambda: load_block({"kind": "reasoning", "metadata": metadata}),
    ):
        with pytest.raises(InvalidTurn, match=f"source=Source\\({name}="):
            change()


def test_block_text() -> None:
    """``text`` joins the text parts, without images and refusals; other kinds have an empty one."""
    assert UserBlock((TextPart("a"), ImagePart("u"), TextPart("b"))).text == "ab"
    names = AssistantBlock((TextPart("a"), RefusalPart("no"), RefusalPart("!")))
    assert (names.text, names.refusal) == ("a", "no!")
    assert ToolResultBlock("c", (TextPart("4"), TextPart("2"))).text == "42"
    without = {block.kind for block in sample_blocks() if block.text == ""}
    assert without == {"tool_call", "reasoning", "opaque", "unknown"}
    with pytest.raises(TypeError):
        SystemBlock()  # pyright: ignore[reportCallIssue] - the text has no default


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
    full = reasoning(["a", "b"], text="c", encrypted_content="d")
    assert full == ReasoningBlock(("a", "b"), ("c",), "d")
    assert reasoning() == reasoning("") == ReasoningBlock()
    assert opaque({"type": "x"}) == OpaqueBlock({"type": "x"})  # pyright: ignore[reportArgumentType]


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
    if isinstance(value, str):
        assert text == value
    else:
        assert json.dumps(json.loads(text)) == json.dumps(value)


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
