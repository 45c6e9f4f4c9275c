"""The canonical form and ``==`` agree about what a block says."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given

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
def test_equal_blocks_have_one_canonical_form_and_others_do_not(one: Block, other: Block) -> None:
    """Whatever ids, metadata, origin and extra they have."""
    alike = replace(one, id="other", metadata=FrozenMap(a=1), origin="elsewhere")
    assert canonical(alike) == canonical(one)
    if one == other:
        assert canonical(one) == canonical(other)
    elif canonical(one) == canonical(other):
        # Reasoning has no canonical form, and nulls in an opaque part or an unknown block no say.
        assert canonical(one) is None or one.kind in {"user", "assistant", "tool_result", "unknown"}


@given(known_blocks())
def test_json_and_the_wire_keep_the_canonical_form(block: Block) -> None:
    """A block that was stored, or sent and read back, is the same to a model."""
    assert canonical(load_block(dump_block(block))) == canonical(block)
    assert canonical(block_from_item(item_from_block(block))) == canonical(block)


def test_the_outcome_of_a_patch_is_content() -> None:
    """Here the status is the answer: a failed patch is not an applied one."""
    done = {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}
    assert canonical(opaque(done)) != canonical(opaque({**done, "status": "failed"}))
    assert canonical(opaque({**done, "a": 1})) != canonical(opaque({**done, "a": True}))
    search = {"type": "web_search_call", "status": "completed"}
    assert canonical(opaque(search)) == canonical(opaque({**search, "status": "failed"}))


@dataclass(frozen=True)
class JsonValue:
    def to_json(self) -> dict[str, Any]:
        return {"a": None, "b": 1}


def test_a_value_with_its_own_json_form_is_encoded_by_it() -> None:
    """Planning never raises, also where an item or a part holds a value of a higher layer."""
    block = opaque({"type": "x", "told": JsonValue()})
    assert canonical(block) == canonical(opaque({"type": "x", "told": {"b": 1}}))
    part = OpaquePart(FrozenMap(type="x", told=[JsonValue()]))
    assert canonical(user(part)) == canonical(load_block(dump_block(user(part))))
