"""Rendering a Turn as items: reasoning, ids and compactions are included only if a record proves them."""

from typing import Any

from msgspec import structs
from msgspec.structs import replace

from for_each import for_each
from kedge.planning import build_input_from_blocks, get_instructions, get_state, render, set_state
from kedge.planning.anchors import base_scope, conversation_scope
from kedge.planning.render import COMPACTOR_ORIGIN
from kedge.turns import Block, Source, Turn, assistant, loads, opaque, reasoning, system, user
from kedge.turns.json_codec import dumps
from planning.recorded_turns import (
    add_response,
    call_block,
    compaction_block,
    item_ids,
    item_types,
    make_exchanges,
    make_plan,
    make_reasoning_turn,
    message_block,
    reasoning_block,
    render_full,
)


def test_leading_system_text_becomes_the_instructions() -> None:
    """Leading system text becomes the instructions, and later system text remains an item."""
    turn = Turn([system("one"), system("two", role="developer"), user("u"), system("three")])
    assert get_instructions(turn) == "one\n\ntwo"
    assert item_types(render(turn)) == ["user", "system"]
    assert get_instructions(Turn([user("u")])) is None
    assert get_instructions(Turn([system("")])) is None


def answered(*blocks: Block, **facts: Any) -> Turn:
    """Return a Turn with a message and the response R1 of these blocks."""
    return add_response(Turn([user("u")]), "R1", *blocks, **facts)


def compacted(count: int = 2, **facts: Any) -> Turn:
    """Return a Turn with exchanges, and a response that starts with a compaction."""
    turn = make_exchanges(count).append(user("u"))
    blocks = compaction_block("c"), message_block("c")
    return add_response(turn, f"R{count + 1}", *blocks, **facts)


def test_encrypted_reasoning_is_sent_with_its_id_before_its_item() -> None:
    """Encrypted reasoning and the item after it are the only items sent with the provider's ids."""
    turn = make_reasoning_turn().append(user("next"))
    items = render_full(turn)
    call = ["user", "reasoning", "function_call", "function_call_output"]
    assert item_types(items) == [*call, "reasoning", "assistant", "user"]
    assert item_ids(items) == ["", "rs_a", "fc_a", "", "rs_b", "msg_b", ""]
    assert items[1]["encrypted_content"] == "sealed a"
    assert items[1]["summary"] == []
    assert not any(each in repr(items) for each in (turn.id, *(block.id for block in turn)))


def test_no_other_item_has_an_id() -> None:
    """Items not preceded by reasoning have no id, because a server requires the reasoning of such an id."""
    turn = answered(reasoning_block("a"), message_block("a"), message_block("b"))
    assert item_ids(render_full(turn)) == ["", "rs_a", "msg_a", ""]
    assert item_ids(render_full(answered(message_block("a")))) == ["", ""]
    other = assistant("next", source=Source("R2", "msg_b", 1))
    assert item_ids(render_full(answered(reasoning_block("a")).append(other))) == ["", ""]


def test_copied_reasoning_is_not_sent_again() -> None:
    """A copy of an output has the tags of its response, and no record ends there."""
    turn = make_reasoning_turn()
    copied = turn.append(*(replace(block, id="") for block in turn[1:3]))
    assert item_ids(render_full(copied)) == [*item_ids(render_full(turn)), ""]


@for_each("name", ["prefix", "own output", "own reasoning", "reasoning taken out"])
def test_reasoning_is_not_sent_after_a_change(name: str) -> None:
    """Reasoning and ids are left out if the prefix, the response's output or the reasoning itself changed."""
    turn = make_reasoning_turn()
    message, first, call = turn[0], turn[1], turn[2]
    changes = {
        "prefix": lambda: turn.edit(message.id, user("redacted")),
        "own output": lambda: turn.edit(call.id, replace(call, arguments="[]")),  # pyright: ignore[reportCallIssue]
        "own reasoning": lambda: turn.edit(first.id, replace(first, summary=("redacted",))),  # pyright: ignore[reportCallIssue]
        "reasoning taken out": lambda: turn.remove(first.id),
    }
    items = render_full(changes[name]())
    assert not {"rs_a", "fc_a"} & set(item_ids(items))
    retained = name in ("own reasoning", "reasoning taken out")  # these leave R2 unchanged
    assert ("rs_b" in item_ids(items)) is retained


def test_reasoning_of_another_provider_is_left_out_and_reported() -> None:
    """Reasoning encrypted by another provider is left out, and the plan reports it."""
    turn = make_reasoning_turn().append(user("next"))
    other = make_plan(turn, scope="elsewhere")
    assert item_types(other.input()) == item_types(render_full(turn, "elsewhere"))
    assert "reasoning" not in item_types(other.input())
    assert other.left_out == (turn[1], turn[4])
    assert "Left out: 2 blocks of reasoning." in other.explain()


@for_each(
    ("blocks", "facts", "types"),
    [
        # Nothing proves that the server knows the reasoning of an incomplete response.
        ([reasoning_block("a"), message_block("a")], {"status": "incomplete"}, ["assistant"]),
        # Reasoning without encrypted content or without an id cannot be verified.
        ([reasoning_block("a", encrypted=""), message_block("a")], {}, ["assistant"]),
        ([reasoning("hm", encrypted_content="sealed"), message_block("a")], {}, ["assistant"]),
        # A response that ends with reasoning is rendered without it.
        ([reasoning_block("a")], {}, []),
        ([message_block("a"), reasoning_block("b")], {}, ["assistant"]),
    ],
)
def test_reasoning_that_is_not_proved_is_left_out(
    blocks: list[Block], facts: dict[str, str], types: list[str]
) -> None:
    """Reasoning is sent only if it can be verified and precedes an item."""
    turn = answered(*blocks, **facts).append(user("next"))
    assert item_types(render_full(turn)) == ["user", *types, "user"]
    assert make_plan(turn).previous_response_id == ("" if facts else "R1")


def test_reasoning_of_a_lost_response_is_still_sent() -> None:
    """Encrypted reasoning remains valid after the server lost the response."""
    turn = make_reasoning_turn()
    lost = set_state(turn, get_state(turn).mark_lost(["R1", "R2"]))
    assert item_ids(render_full(lost)) == item_ids(render_full(turn))


def test_consecutive_reasoning_is_sent_together() -> None:
    """Consecutive reasoning is sent together, except for reasoning before a block that cannot be sent."""
    run = [reasoning_block(name) for name in "abc"]
    turn = answered(*run, message_block("x"))
    assert item_ids(render_full(turn)) == ["", "rs_a", "rs_b", "rs_c", "msg_x"]
    gap = [reasoning_block("a"), reasoning_block("b", encrypted=""), reasoning_block("c")]
    assert item_ids(render_full(answered(*gap, message_block("x")))) == ["", "rs_c", "msg_x"]


def test_rebuilt_turn_retains_reasoning() -> None:
    """New local ids and a JSON round trip change nothing; without tags only the reasoning is left out."""
    turn = make_reasoning_turn()
    assert render_full(loads(dumps(turn))) == render_full(turn)
    renamed = Turn((replace(block, id="") for block in turn), data=turn.data)
    assert render_full(renamed) == render_full(turn)
    untagged = Turn((replace(block, metadata={}, source=None) for block in turn), data=turn.data)
    assert "reasoning" not in item_types(render_full(untagged))
    assert make_plan(untagged).previous_response_id == "R2"


def test_reasoning_in_an_unknown_shape_is_never_sent() -> None:
    """Reasoning of an unknown shape, stored as an opaque item, is not sent."""
    odd = opaque({"type": "reasoning", "encrypted_content": "sealed", "summary": "?"})
    assert item_types(render(Turn([user("u"), odd]))) == ["user"]
    assert make_plan(Turn([user("u"), odd])).left_out == (odd,)


def test_plan_without_reasoning() -> None:
    """``without_reasoning`` removes reasoning and ids, for servers that reject them, but not compactions."""
    turn = answered(compaction_block("c"), reasoning_block("a"), message_block("a"))
    full = make_plan(turn.append(user("next")), mode="stateless")
    assert item_types(full.input()) == ["compaction", "reasoning", "assistant", "user"]
    without = full.without_reasoning()
    assert item_types(without.input()) == ["compaction", "assistant", "user"]
    assert item_ids(without.input()) == ["", "", ""]


def test_derived_items_need_proof() -> None:
    """Blocks rendered without a plan omit reasoning, ids and compactions."""
    items = build_input_from_blocks(make_reasoning_turn().blocks)
    assert item_types(items) == ["user", "function_call", "function_call_output", "assistant"]
    assert item_types(build_input_from_blocks([compaction_block("c"), user("u")])) == ["user"]


def test_scopes_of_conversation_objects_belong_to_their_provider() -> None:
    """The base scope of a conversation object is its provider's scope, with any characters."""
    scope = "https://host/v1 key 12"
    inside = conversation_scope(scope, "conv_1")
    assert base_scope(inside) == base_scope(scope) == scope
    assert inside != scope
    turn = make_reasoning_turn()
    state = get_state(turn)
    elsewhere = tuple(structs.replace(record, scope="here two") for record in state.anchors)
    other = set_state(turn, structs.replace(state, anchors=elsewhere))
    assert "reasoning" not in item_types(render_full(other))


def test_a_compaction_added_by_the_caller_is_a_barrier() -> None:
    """A compaction added by the caller replaces everything before it, also an open call, even if that is edited."""
    before = make_exchanges(2).append(call_block("a"))
    turn = before.append(compaction_block("c", origin="compact"), user("u"))
    assert item_types(make_plan(turn).input()) == ["compaction", "user"]
    assert make_plan(turn).total_blocks == 2
    assert item_types(render_full(before)) == [*["user", "assistant"] * 2, "function_call"]
    assert make_plan(turn).anchor is None
    assert "because a compaction has replaced it." in make_plan(turn).explain()
    answered = add_response(turn, "R3").append(user("next"))
    assert make_plan(answered).previous_response_id == "R3"
    edited = answered.edit(answered[0].id, user("edited"))
    assert item_types(make_plan(edited).input()) == ["compaction", "user", "assistant", "user"]
    incomplete = make_exchanges(1).append(compaction_block("c", origin="compact"), user("u"))
    incomplete = add_response(incomplete, "R2", status="incomplete").append(user("again"))
    assert item_types(make_plan(incomplete).input()) == ["compaction", "user", "assistant", "user"]


def test_untagged_compaction_is_recognized_by_its_record() -> None:
    """The record identifies a compaction created by a response, even if all tags were removed."""
    turn = compacted()
    bare = (structs.replace(b, metadata={}, source=None, origin="user") for b in turn)
    untagged = Turn(bare, data=turn.data)
    assert make_plan(untagged).previous_response_id == "R3"
    assert item_types(render_full(untagged)) == ["compaction", "assistant"]
    edited = untagged.edit(untagged[2].id, user("redacted")).append(user("next"))
    assert "compaction" not in item_types(render_full(edited))
    assert make_plan(edited).previous_response_id == "R1"


@for_each(("origin", "types"), [(COMPACTOR_ORIGIN, ["compaction", "user"]), ("copy", ["user"])])
def test_only_the_compactor_detaches_a_compaction(origin: str, types: list[str]) -> None:
    """An item from a response starts the conversation if it was put there for that, whatever records remain."""
    moved = Turn([compaction_block("c", origin=origin), user("next")], data=compacted().data)
    assert item_types(render_full(moved)) == types


def test_received_compaction_without_a_record_is_not_used() -> None:
    """A compaction with the origin or tag of a response but without a record is not used."""
    received = compaction_block("c", origin="engine")
    assert item_types(render(Turn([user("u"), received, user("v")]))) == ["user", "user"]
    tagged = compaction_block("c", source=Source("R9"))
    assert item_types(render(Turn([user("u"), tagged, user("v")]))) == ["user", "user"]
