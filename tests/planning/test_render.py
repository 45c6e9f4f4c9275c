"""Rendering: nothing repaired, nothing leaked; reasoning, ids and compactions by proof only."""

from dataclasses import replace

import pytest

from kedge.errors import UnsupportedBlock
from kedge.planning import build_input_from_blocks, get_instructions, get_state, render, set_state
from kedge.turns import (
    ReasoningBlock,
    RefusalPart,
    Turn,
    loads,
    opaque,
    reasoning,
    system,
    user,
)
from kedge.turns.json_codec import dumps
from planning.recorded_turns import (
    add_response,
    compaction_block,
    item_ids,
    item_types,
    make_plan,
    make_reasoning_turn,
    message_block,
    reasoning_block,
    render_full,
)


def test_leading_system_text_becomes_the_instructions() -> None:
    """And later system text stays in its place."""
    turn = Turn([system("one"), system("two", role="developer"), user("u"), system("three")])
    assert get_instructions(turn) == "one\n\ntwo"
    assert item_types(render(turn)) == ["user", "system"]
    assert get_instructions(Turn([user("u")])) is None
    assert get_instructions(Turn([system("")])) is None


def test_encrypted_reasoning_is_sent_with_its_id_before_its_item() -> None:
    """And only these two kinds of items carry the provider's ids."""
    items = render_full(make_reasoning_turn().append(user("next")))
    assert item_types(items) == [
        "user",
        "reasoning",
        "function_call",
        "function_call_output",
        "reasoning",
        "assistant",
        "user",
    ]
    assert item_ids(items) == ["", "rs_a", "fc_a", "", "rs_b", "msg_b", ""]
    assert items[1]["encrypted_content"] == "sealed a"
    assert items[1]["summary"] == []


def test_no_other_item_carries_an_id() -> None:
    """An item with an id makes a server look for reasoning, so one without reasoning has none."""
    turn = add_response(
        Turn([user("u")]), "R1", reasoning_block("a"), message_block("a"), message_block("b")
    )
    assert item_ids(render_full(turn)) == ["", "rs_a", "msg_a", ""]
    plain = add_response(Turn([user("u")]), "R1", message_block("a"))
    assert item_ids(render_full(plain)) == ["", ""]


def test_local_ids_never_leave_the_house() -> None:
    """Whatever is rendered holds no id that Kedge made."""
    turn = make_reasoning_turn()
    written = repr(render_full(turn))
    assert not any(block.id in written for block in turn)
    assert turn.id not in written


@pytest.mark.parametrize("name", ["prefix", "own output", "own reasoning", "reasoning taken out"])
def test_reasoning_stays_home_once_what_it_was_made_from_changed(name: str) -> None:
    """Its prefix, its own output, or its own words: with it go the ids of its response."""
    turn = make_reasoning_turn()
    first = turn[1]
    assert isinstance(first, ReasoningBlock)
    changes = {
        "prefix": lambda: turn.replace(turn[0].id, user("redacted")),
        "own output": lambda: turn.replace(turn[2].id, replace(turn[2], arguments="[]")),  # pyright: ignore[reportCallIssue]
        "own reasoning": lambda: turn.replace(first.id, replace(first, summary=("redacted",))),
        "reasoning taken out": lambda: turn.remove(first.id),
    }
    items = render_full(changes[name]())
    assert not {"rs_a", "fc_a"} & set(item_ids(items))
    retained = name in ("own reasoning", "reasoning taken out")  # R2 was not touched by these
    assert ("rs_b" in item_ids(items)) is retained


def test_reasoning_of_another_provider_is_left_out_and_reported() -> None:
    """Nobody else can read it; the plan tells."""
    turn = make_reasoning_turn().append(user("next"))
    elsewhere = make_plan(turn, scope="elsewhere")
    assert item_types(elsewhere.input()) == item_types(render_full(turn, "elsewhere"))
    assert "reasoning" not in item_types(elsewhere.input())
    assert elsewhere.left_out == (turn[1], turn[4])
    assert "Left out: 2 blocks of reasoning." in elsewhere.explain()


def test_reasoning_of_an_unfinished_response_is_left_out() -> None:
    """Nothing proves that the server would know it."""
    turn = add_response(
        Turn([user("u")]),
        "R1",
        reasoning_block("a"),
        message_block("a"),
        message_block("b"),
        status="incomplete",
    )
    assert item_types(render_full(turn)) == ["user", "assistant", "assistant"]


def test_reasoning_of_a_lost_response_is_still_sent() -> None:
    """The server forgot the response; what it sealed is whole."""
    turn = make_reasoning_turn()
    lost = set_state(turn, get_state(turn).mark_lost(["R1", "R2"]))
    assert item_ids(render_full(lost)) == item_ids(render_full(turn))


def test_reasoning_without_encrypted_content_or_id_is_left_out() -> None:
    """Nobody could verify it."""
    turn = add_response(
        Turn([user("u")]), "R1", reasoning_block("a", encrypted=""), message_block("a")
    )
    assert item_types(render_full(turn)) == ["user", "assistant"]
    nameless = reasoning("hm", encrypted_content="sealed")
    turn = add_response(Turn([user("u")]), "R1", nameless, message_block("a"))
    assert item_types(render_full(turn)) == ["user", "assistant"]


def test_reasoning_without_a_following_item_is_left_out() -> None:
    """A response of nothing but reasoning, or that ends with it, does not spoil the conversation."""
    only = add_response(Turn([user("u")]), "R1", reasoning_block("a"))
    assert item_types(render_full(only)) == ["user"]
    assert item_types(render_full(only.append(user("next")))) == ["user", "user"]
    assert make_plan(only.append(user("next"))).previous_response_id == "R1"
    last = add_response(Turn([user("u")]), "R1", message_block("a"), reasoning_block("b"))
    assert item_types(render_full(last.append(user("next")))) == ["user", "assistant", "user"]


def test_reasoning_that_was_moved_is_left_out() -> None:
    """Within its response too: it belongs to one item only."""
    turn = add_response(
        Turn([user("u")]), "R1", reasoning_block("a"), message_block("a"), message_block("b")
    )
    moved = turn.remove(turn[1].id).insert(2, turn[1])
    assert item_types(render_full(moved)) == ["user", "assistant", "assistant"]


def test_consecutive_reasoning_is_sent_together() -> None:
    """As long as each of it may; what comes before a gap in it stays home."""
    run = [reasoning_block(name) for name in "abc"]
    turn = add_response(Turn([user("u")]), "R1", *run, message_block("x"))
    assert item_ids(render_full(turn)) == ["", "rs_a", "rs_b", "rs_c", "msg_x"]
    gap = [reasoning_block("a"), reasoning_block("b", encrypted=""), reasoning_block("c")]
    turn = add_response(Turn([user("u")]), "R1", *gap, message_block("x"))
    assert item_ids(render_full(turn)) == ["", "rs_c", "msg_x"]


def test_a_long_run_of_reasoning_is_no_problem() -> None:
    """Thousands in a row are rendered in one pass."""
    run = [reasoning_block(str(number)) for number in range(3_000)]
    turn = add_response(Turn([user("u")]), "R1", *run, message_block("x"))
    assert len(render_full(turn)) == 3_002


def test_a_copy_of_an_output_carries_neither_reasoning_nor_ids() -> None:
    """A server that holds the first would refuse the second as a duplicate."""
    turn = add_response(Turn([user("u")]), "R1", reasoning_block("a"), message_block("a"))
    copied = turn.append(user("again"), *(replace(block, id="") for block in turn[1:]))
    assert make_plan(copied).previous_response_id == "R1"
    assert item_ids(make_plan(copied).input()) == ["", ""]
    assert item_ids(render_full(copied)) == ["", "rs_a", "msg_a", "", ""]


def test_an_equal_rebuild_keeps_its_reasoning() -> None:
    """New local ids and a round trip through JSON change nothing; lost tags only cost reasoning."""
    turn = make_reasoning_turn()
    assert render_full(loads(dumps(turn))) == render_full(turn)
    renamed = Turn((replace(block, id="") for block in turn), data=turn.data)
    assert render_full(renamed) == render_full(turn)
    bare = Turn((replace(block, metadata={}) for block in turn), data=turn.data)
    assert "reasoning" not in item_types(render_full(bare))
    assert make_plan(bare).previous_response_id == "R2"


def test_reasoning_in_an_unknown_shape_is_never_sent() -> None:
    """Also where it was kept as an opaque item."""
    odd = opaque({"type": "reasoning", "encrypted_content": "sealed", "summary": "?"})
    assert item_types(render(Turn([user("u"), odd]))) == ["user"]
    assert make_plan(Turn([user("u"), odd])).left_out == (odd,)


def test_a_plan_can_do_without_reasoning() -> None:
    """When a server refuses it; compactions stay."""
    turn = add_response(
        Turn([user("u")]), "R1", compaction_block("c"), reasoning_block("a"), message_block("a")
    )
    full = make_plan(turn.append(user("next")), mode="stateless")
    assert item_types(full.input()) == ["compaction", "reasoning", "assistant", "user"]
    without = full.without_reasoning()
    assert item_types(without.input()) == ["compaction", "assistant", "user"]
    assert item_ids(without.input()) == ["", "", ""]


def test_without_proof_nothing_derived_is_sent() -> None:
    """Blocks on their own, with no plan that knows them, are sent without what was derived."""
    turn = make_reasoning_turn()
    assert item_types(build_input_from_blocks(turn.blocks)) == [
        "user",
        "function_call",
        "function_call_output",
        "assistant",
    ]
    assert item_types(build_input_from_blocks([compaction_block("c"), user("u")])) == ["user"]


def test_unsupported_content_of_a_provider_is_reported() -> None:
    """A refusal in the user's words, or a block of a newer Kedge."""
    with pytest.raises(UnsupportedBlock, match="a refusal is only possible"):
        render(Turn([user([RefusalPart("no")])]))
