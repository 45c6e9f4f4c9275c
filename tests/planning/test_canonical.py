"""The canonical form contains only what a model can see, independent of how a block was created."""

import json
from typing import Any

import msgspec
from hypothesis import given
from msgspec.structs import replace

from for_each import for_each
from kedge import turns
from kedge.planning import canonical
from kedge.planning.digests import canonical_json
from kedge.turns import assistant, image, opaque, system, tool_call, tool_result, user
from kedge.turns.server_fields import ID_IS_CONTENT, STATUS_IS_CONTENT
from planning.reference_digests import canonical_bytes
from strategies import blocks, json_objects, known_blocks


def reverse_members(value: Any) -> Any:
    """Return the same JSON value with the members of its objects in reverse order."""
    if isinstance(value, dict):
        return {name: reverse_members(value[name]) for name in sorted(value, reverse=True)}
    return [reverse_members(member) for member in value] if isinstance(value, list) else value


@given(blocks())
def test_canonical_json_equals_json_dumps(block: turns.Block) -> None:
    """The optimized encoding of common block types gives the same bytes as ``json.dumps``."""
    form = canonical(block)
    assert canonical_json(block) == (None if form is None else canonical_bytes(form))


@given(known_blocks())
def test_wire_item_has_the_canonical_form_of_its_block(block: turns.Block) -> None:
    """A block that is sent and read back from a server has the same canonical form."""
    item = turns.item_from_block(block)
    received = dict(item)
    if item["type"] not in ID_IS_CONTENT:
        received["id"] = "it_1"
    if item["type"] not in STATUS_IS_CONTENT:
        received["status"] = "completed"
    for form in (item, received, json.loads(json.dumps(received)), reverse_members(received)):
        assert canonical_json(turns.block_from_item(form)) == canonical_json(block)


@given(blocks())
def test_json_round_trip_preserves_the_canonical_form(block: turns.Block) -> None:
    """A block loaded from its JSON form has the same canonical form."""
    (restored,) = turns.loads(turns.dumps(turns.Turn([block]))).blocks
    assert canonical_json(restored) == canonical_json(block)


@given(blocks(), json_objects())
def test_canonical_form_ignores_id_metadata_and_origin(
    block: turns.Block, metadata: dict[str, Any]
) -> None:
    """Local ids, metadata and origin do not change the canonical form."""
    other = replace(block, id="", metadata=metadata, origin="a middleware")
    assert canonical_json(other) == canonical_json(block)


@given(blocks(), blocks())
def test_equal_blocks_have_equal_forms(one: turns.Block, other: turns.Block) -> None:
    """Equal blocks have equal canonical forms, and others too if they differ only in nulls; only reasoning has none."""
    if one == other:
        assert canonical_json(one) == canonical_json(other)
    elif canonical_json(one) == canonical_json(other) is not None:
        assert one.kind in {"user", "assistant", "tool_result", "unknown"}
    assert (canonical_json(one) is None) == isinstance(one, turns.ReasoningBlock)


@given(known_blocks(), known_blocks())
def test_different_wire_items_have_different_forms(one: turns.Block, other: turns.Block) -> None:
    """Blocks with different wire items have different canonical forms, so a digest detects every edit."""
    if not isinstance(one, turns.ReasoningBlock) and canonical_json(one) == canonical_json(other):
        assert _comparable_item(one) == _comparable_item(other)


def _comparable_item(block: turns.Block) -> Any:
    """Return a block's item with a fixed local id, because some types derive a name from it."""
    item = turns.item_from_block(replace(block, id="blk_same"))
    return {name: value for name, value in item.items() if name != "status"}


OUTPUT = {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
MESSAGE = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}


@for_each(
    ("one", "other"),
    [
        (user("a"), user(["a"])),
        (assistant("a"), turns.block_from_item({**MESSAGE, "content": [OUTPUT]})),
        (user([image(b"abc")]), user([turns.ImagePart("data:image/png;base64,YWJj")])),
        (
            opaque({"type": "x", "a": {"b": None, "c": [None]}}),
            opaque({"type": "x", "id": "1", "status": "y", "a": {"c": [None]}}),
        ),
        (
            turns.UnknownBlock({"kind": "dream", "a": None}),  # pyright: ignore[reportArgumentType]
            turns.UnknownBlock({"kind": "dream"}),  # pyright: ignore[reportArgumentType]
        ),
    ],
)
def test_canonical_form_is_independent_of_construction(
    one: turns.Block, other: turns.Block
) -> None:
    """Constructors, strings, parts, and items with or without nulls, ids and statuses give the same form."""
    assert canonical_json(one) == canonical_json(other)


@for_each(
    ("one", "other"),
    [
        (user("a"), assistant("a")),
        (user("ab"), user(["a", "b"])),
        (system("a"), system("a", role="developer")),
        (assistant("a"), assistant([turns.RefusalPart("a")])),
        (tool_call("f", "{}", call_id="c"), tool_call("f", "{}", call_id="c", custom=True)),
        (tool_result("c", "1"), tool_result("d", "1")),
        (user([image("data:,u", detail="low")]), user([image("data:,u", detail="high")])),
        (opaque({"type": "x", "a": 1}), opaque({"type": "x", "a": 1.0})),
        (
            opaque({"type": "mcp_approval_request", "id": "1"}),
            opaque({"type": "mcp_approval_request", "id": "2"}),
        ),
        (
            opaque({"type": "apply_patch_call_output", "status": "completed"}),
            opaque({"type": "apply_patch_call_output", "status": "failed"}),
        ),
        (user("é"), user("e\u0301")),
    ],
)
def test_visible_differences_change_the_canonical_form(
    one: turns.Block, other: turns.Block
) -> None:
    """Roles, parts, exact arguments, referenced ids, and the types of numbers change the canonical form."""
    assert canonical_json(one) != canonical_json(other)


class JsonValue(msgspec.Struct, frozen=True):
    def to_json(self) -> dict[str, Any]:
        return {"a": None, "b": 1}


def test_value_with_to_json_is_encoded_by_it() -> None:
    """A value with ``to_json`` in an item or a part is encoded by it, so planning does not raise."""
    block = opaque({"type": "x", "told": JsonValue()})
    assert canonical_json(block) == canonical_json(opaque({"type": "x", "told": {"b": 1}}))
    part = turns.OpaquePart(turns.FrozenMap(type="x", told=[JsonValue()]))
    assert canonical_json(user(part)) == canonical_json(
        turns.load_block(turns.dump_block(user(part)))
    )
