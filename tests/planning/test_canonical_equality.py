"""The canonical form agrees with ``==`` about the content of a block."""

from typing import Any

import msgspec
from hypothesis import given
from msgspec.structs import replace

from kedge.planning.canonical import canonical_json as canonical
from kedge.turns import (
    Block,
    FrozenMap,
    OpaquePart,
    block_from_item,
    dump_block,
    item_from_block,
    load_block,
    opaque,
    user,
)
from strategies import blocks, known_blocks


@given(blocks(), blocks())
def test_canonical_form_agrees_with_equality(one: Block, other: Block) -> None:
    """Equal blocks have equal canonical forms, regardless of their ids, metadata and origin."""
    alike = replace(one, id="other", metadata=FrozenMap(a=1), origin="elsewhere")
    assert canonical(alike) == canonical(one)
    if one == other:
        assert canonical(one) == canonical(other)
    elif canonical(one) == canonical(other):
        # Reasoning has no canonical form, and nulls in opaque parts and unknown blocks are ignored.
        assert canonical(one) is None or one.kind in {"user", "assistant", "tool_result", "unknown"}


@given(known_blocks())
def test_json_and_wire_items_preserve_the_canonical_form(block: Block) -> None:
    """A block that was stored, or sent and read back, has the same canonical form."""
    assert canonical(load_block(dump_block(block))) == canonical(block)
    assert canonical(block_from_item(item_from_block(block))) == canonical(block)


def test_patch_status_is_content() -> None:
    """The status of an ``apply_patch_call_output`` is part of its canonical form, unlike that of a search."""
    done = {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}
    assert canonical(opaque(done)) != canonical(opaque({**done, "status": "failed"}))
    assert canonical(opaque({**done, "a": 1})) != canonical(opaque({**done, "a": True}))
    search = {"type": "web_search_call", "status": "completed"}
    assert canonical(opaque(search)) == canonical(opaque({**search, "status": "failed"}))


class JsonValue(msgspec.Struct, frozen=True):
    def to_json(self) -> dict[str, Any]:
        return {"a": None, "b": 1}


def test_value_with_to_json_is_encoded_by_it() -> None:
    """A value with ``to_json`` in an item or a part is encoded by it, so planning does not raise."""
    block = opaque({"type": "x", "told": JsonValue()})
    assert canonical(block) == canonical(opaque({"type": "x", "told": {"b": 1}}))
    part = OpaquePart(FrozenMap(type="x", told=[JsonValue()]))
    assert canonical(user(part)) == canonical(load_block(dump_block(user(part))))
