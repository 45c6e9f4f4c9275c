"""Blocks: equality by content, metadata, text, and validation."""

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
    ReasoningBlock,
    RefusalPart,
    Source,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    Turn,
    UnknownBlock,
    UserBlock,
    assistant,
    dump_block,
    load_block,
    opaque,
    user,
)
from kedge.turns.blocks import BlockBase
from strategies import blocks, json_objects, sample_blocks


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
        UserBlock(()),
        AssistantBlock((TextPart("ab"),)),
        AssistantBlock((RefusalPart("ab"),)),
        SystemBlock("ab"),
        SystemBlock("ab", "developer"),
        ToolCallBlock("f", "{ }", "call_1"),
        ToolCallBlock("g", "{}", "call_1"),
        ToolCallBlock("f", "{}", "call_2"),
        ToolCallBlock("f", "{}", "call_1", custom=True),
        ToolResultBlock("call_1", (TextPart("ab"),)),
        ToolResultBlock("call_2", (TextPart("ab"),)),
        ToolResultBlock("call_1", (TextPart("ab"),), custom=True),
        ReasoningBlock(("ab",)),
        ReasoningBlock((), ("ab",)),
        ReasoningBlock((), (), "ab"),
        opaque({"type": "x", "a": 1}),
        opaque({"type": "x", "a": True}),
        opaque({"type": "x", "a": 1.0}),
        opaque({"type": "x", "a": [1]}),
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
    assert opaque({"type": "item_reference", "id": "a"}) != opaque(
        {"type": "item_reference", "id": "b"}
    )
    done, failed = (
        {"type": "apply_patch_call_output", "status": s} for s in ("completed", "failed")
    )
    assert opaque(done) != opaque(failed)


untyped: Any = turns  # the same module, untyped
INVALID_BLOCKS: list[tuple[Any, str]] = [
    (BlockBase, "this class is abstract; use kedge.user"),
    (lambda: untyped.UserBlock("text"), "a user block must have parts, not str"),
    (lambda: untyped.UserBlock({"a": 1}), "a user block must have parts, not dict"),
    (lambda: untyped.UserBlock(5), "a user block must have parts, not int"),
    (lambda: untyped.UserBlock(None), "a user block must have parts, not NoneType"),
    (lambda: untyped.UserBlock(["text"]), "a user block must have TextPart"),
    (lambda: untyped.UserBlock([user("a")]), "not UserBlock"),
    (
        lambda: untyped.AssistantBlock([ImagePart("u")]),
        "an assistant block must have TextPart, RefusalPart",
    ),
    (lambda: untyped.ToolResultBlock("c", "text"), "a tool result must have parts, not str"),
    (lambda: untyped.ToolResultBlock("", ()), "a tool result needs the call_id of its call"),
    (lambda: untyped.ToolResultBlock(None, ()), "call_id: expected a string, got NoneType"),
    (
        lambda: untyped.ToolResultBlock("c", (), custom=None),
        "custom: expected a bool, got NoneType",
    ),
    (lambda: untyped.ToolCallBlock("f", "{}", ""), "a tool call needs a call_id"),
    (lambda: untyped.ToolCallBlock("f", {}, "c"), "arguments: expected a string, got dict"),
    (lambda: untyped.ToolCallBlock(None, "{}", "c"), "name: expected a string, got NoneType"),
    (lambda: untyped.ToolCallBlock("f", "{}", "c", 1), "custom: expected a bool, got int"),
    (lambda: untyped.SystemBlock("a", "user"), "must be system or developer, not 'user'"),
    (lambda: untyped.SystemBlock("a", []), "role: expected a string, got list"),
    (lambda: untyped.SystemBlock(b"a"), "text: expected a string, got bytes"),
    (lambda: untyped.ReasoningBlock("abc"), "summary: expected several strings, got str"),
    (lambda: untyped.ReasoningBlock(5), "summary: expected several strings, got int"),
    (lambda: untyped.ReasoningBlock((), ["a", 5]), "texts[1]: expected a string, got int"),
    (lambda: untyped.ReasoningBlock((), (), None), "encrypted_content: expected a string"),
    (lambda: untyped.OpaqueBlock({}), "an opaque block's item needs a type"),
    (lambda: untyped.OpaqueBlock({"type": 5}), "an opaque block's item needs a type"),
    (lambda: untyped.OpaqueBlock("x"), "item: expected a mapping, got str"),
    (lambda: untyped.OpaqueBlock({"type": "x", "a": {1}}), "item.a: a set is not a JSON value"),
    (lambda: untyped.UnknownBlock({"a": 1}), "needs a kind that Kedge does not know"),
    (lambda: untyped.UnknownBlock({"kind": "user"}), "needs a kind that Kedge does not know"),
    (lambda: untyped.UnknownBlock({"kind": "x", "id": "y"}), "must not have id, metadata"),
    (lambda: untyped.UnknownBlock({"kind": "x"}, extra={"a": 1}), "must not have id, metadata"),
    (lambda: untyped.user("a", id=5), "id: expected a string, got int"),
    (lambda: untyped.user("a", id="\ud800"), "id: lone surrogate"),
    (lambda: untyped.user("a", origin=5), "origin: expected a string, got int"),
    (lambda: untyped.user("a", metadata=[1]), "metadata: expected a mapping, got list"),
    (lambda: untyped.user("a", metadata={"a": {"b": object()}}), "metadata.a.b: a object is not"),
    (lambda: untyped.user("a", extra={"parts": 1}), "extra holds 'parts'"),
    (lambda: untyped.user("a", source=["resp_1"]), "source: expected a Source, got list"),
    (lambda: untyped.Source(5), "response_id: expected a string, got int"),
    (lambda: untyped.Source("", "\ud800"), "item_id: lone surrogate"),
    (lambda: untyped.Source("", "", True), "output_index: expected an integer, got bool"),
]


@for_each(("make", "message"), INVALID_BLOCKS)
def test_invalid_block_is_rejected(make: Any, message: str) -> None:
    """An invalid block raises ``InvalidTurn``, which names the member and the expected type."""
    with pytest.raises(InvalidTurn) as error:
        make()
    assert message in str(error.value)


def test_with_metadata_and_with_origin_return_a_new_block() -> None:
    """``with_metadata`` and ``with_origin`` return a new block with the same id and content."""
    block = user("a", metadata={"mine": 1, "gone": 2, "null": None})
    tagged = block.with_metadata({"odd key": [1]}, gone=None).with_source(
        Source("resp_1", "msg_1", 2)
    )
    assert tagged.metadata == {"mine": 1, "null": None, "odd key": [1]}
    assert tagged.output_index == 2
    assert (tagged.response_id, tagged.item_id) == ("resp_1", "msg_1")
    assert (block.response_id, block.item_id) == ("", "")
    assert block.metadata == {"mine": 1, "gone": 2, "null": None}
    moved = tagged.with_origin("engine")
    assert (moved.id, moved.origin, block.origin) == (block.id, "engine", "user")
    assert moved == tagged == block


@pytest.mark.parametrize("name", Source.__struct_fields__)
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


def test_source_of_a_block() -> None:
    """The ids and the index of a block are those of its source, which has no part in comparisons."""
    block = assistant("a", source=Source("resp_1", "msg_1", 0))
    assert (block.response_id, block.item_id, block.output_index) == ("resp_1", "msg_1", 0)
    assert block.source == Source("resp_1", "msg_1", 0)
    plain = assistant("a")
    assert (plain.source, plain.response_id, plain.item_id, plain.output_index) == (
        None,
        "",
        "",
        None,
    )
    assert plain == block
    assert load_block(dump_block(block)).source == block.source
    assert dump_block(block)["source"] == ["resp_1", "msg_1", 0]


def test_block_text() -> None:
    """``text`` joins the text parts, without images and refusals."""
    assert UserBlock((TextPart("a"), ImagePart("u"), TextPart("b"))).text == "ab"
    names = AssistantBlock((TextPart("a"), RefusalPart("no"), RefusalPart("!")))
    assert (names.text, names.refusal) == ("a", "no!")
    assert ToolResultBlock("c", (TextPart("4"), TextPart("2"))).text == "42"


def test_every_block_has_a_text() -> None:
    """A block that is no message and no result has an empty text."""
    texts = {block.kind: block.text for block in sample_blocks()}
    without = {kind for kind, text in texts.items() if text == ""}
    assert without == {"tool_call", "reasoning", "opaque", "unknown"}
    with pytest.raises(TypeError):
        SystemBlock()  # pyright: ignore[reportCallIssue] - the text has no default


def test_blocks_have_unique_ids() -> None:
    """Equal blocks created without an id have different ids, in order of creation."""
    one, other = user("a"), user("a")
    assert one == other
    assert one.id < other.id


def describe_by_kind(block: Block) -> str:
    """Return a member of a block that only its kind has; the type checker narrows the type by the kind."""
    if block.kind == "tool_call":
        return block.arguments
    if block.kind == "reasoning":
        return block.encrypted_content
    if block.kind == "opaque":
        return block.type
    return block.text


def test_the_kind_of_a_block_determines_its_type() -> None:
    """A condition on the kind gives access to the members of that kind, for a type checker, too."""
    turn = Turn([user("a"), ToolCallBlock("f", "{}", "c"), opaque({"type": "x"})])
    assert [describe_by_kind(block) for block in turn] == ["a", "{}", "x"]
