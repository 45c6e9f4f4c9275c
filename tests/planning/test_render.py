"""Rendering: nothing repaired, nothing leaked; reasoning, ids and compactions by proof only."""

from dataclasses import replace

import pytest

from kedge.errors import UnsupportedBlock
from kedge.planning import build_input_from_blocks, get_state, instructions_of, render, set_state
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
from kedge.turns.jsonform import dumps
from planning.making import compacted, ids, plan, respond, sent, spoken, thinking, thought, types


def test_leading_system_text_goes_into_the_instructions() -> None:
    """And later system text stays in its place."""
    turn = Turn([system("one"), system("two", role="developer"), user("u"), system("three")])
    assert instructions_of(turn) == "one\n\ntwo"
    assert types(render(turn)) == ["user", "system"]
    assert instructions_of(Turn([user("u")])) is None
    assert instructions_of(Turn([system("")])) is None


def test_reasoning_goes_out_sealed_with_its_id_before_the_item_it_belongs_to() -> None:
    """And only these two kinds of items carry the provider's ids."""
    items = sent(thinking().append(user("next")))
    assert types(items) == [
        "user",
        "reasoning",
        "function_call",
        "function_call_output",
        "reasoning",
        "assistant",
        "user",
    ]
    assert ids(items) == ["", "rs_a", "fc_a", "", "rs_b", "msg_b", ""]
    assert items[1]["encrypted_content"] == "sealed a"
    assert items[1]["summary"] == []


def test_no_other_item_carries_an_id() -> None:
    """An item with an id makes a server look for reasoning, so one without reasoning has none."""
    turn = respond(Turn([user("u")]), "R1", thought("a"), spoken("a"), spoken("b"))
    assert ids(sent(turn)) == ["", "rs_a", "msg_a", ""]
    plain = respond(Turn([user("u")]), "R1", spoken("a"))
    assert ids(sent(plain)) == ["", ""]


def test_local_ids_never_leave_the_house() -> None:
    """Whatever is rendered holds no id that Kedge made."""
    turn = thinking()
    written = repr(sent(turn))
    assert not any(block.id in written for block in turn)
    assert turn.id not in written


@pytest.mark.parametrize("name", ["prefix", "own output", "own reasoning", "reasoning taken out"])
def test_reasoning_stays_home_once_what_it_was_made_from_changed(name: str) -> None:
    """Its prefix, its own output, or its own words: with it go the ids of its response."""
    turn = thinking()
    first = turn[1]
    assert isinstance(first, ReasoningBlock)
    changes = {
        "prefix": lambda: turn.replace(turn[0].id, user("redacted")),
        "own output": lambda: turn.replace(turn[2].id, replace(turn[2], arguments="[]")),  # pyright: ignore[reportCallIssue]
        "own reasoning": lambda: turn.replace(first.id, replace(first, summary=("redacted",))),
        "reasoning taken out": lambda: turn.remove(first.id),
    }
    items = sent(changes[name]())
    assert not {"rs_a", "fc_a"} & set(ids(items))
    kept = name in ("own reasoning", "reasoning taken out")  # R2 was not touched by these
    assert ("rs_b" in ids(items)) is kept


def test_reasoning_of_another_provider_is_left_out_and_said() -> None:
    """Nobody else can read it; the plan tells."""
    turn = thinking().append(user("next"))
    elsewhere = plan(turn, scope="elsewhere")
    assert types(elsewhere.input()) == types(sent(turn, "elsewhere"))
    assert "reasoning" not in types(elsewhere.input())
    assert elsewhere.left_out == (turn[1], turn[4])
    assert "Left out: 2 blocks of reasoning." in elsewhere.explain()


def test_reasoning_of_an_unfinished_response_is_left_out() -> None:
    """Nothing proves that the server would know it."""
    turn = respond(
        Turn([user("u")]), "R1", thought("a"), spoken("a"), spoken("b"), status="incomplete"
    )
    assert types(sent(turn)) == ["user", "assistant", "assistant"]


def test_reasoning_of_a_lost_response_still_goes_out() -> None:
    """The server forgot the response; what it sealed is whole."""
    turn = thinking()
    lost = set_state(turn, get_state(turn).without(["R1", "R2"]))
    assert ids(sent(lost)) == ids(sent(turn))


def test_reasoning_without_encrypted_content_or_id_is_left_out() -> None:
    """Nobody could verify it."""
    turn = respond(Turn([user("u")]), "R1", thought("a", sealed=""), spoken("a"))
    assert types(sent(turn)) == ["user", "assistant"]
    nameless = reasoning("hm", encrypted_content="sealed")
    turn = respond(Turn([user("u")]), "R1", nameless, spoken("a"))
    assert types(sent(turn)) == ["user", "assistant"]


def test_reasoning_without_a_following_item_is_left_out() -> None:
    """A response of nothing but reasoning, or that ends with it, does not spoil the conversation."""
    only = respond(Turn([user("u")]), "R1", thought("a"))
    assert types(sent(only)) == ["user"]
    assert types(sent(only.append(user("next")))) == ["user", "user"]
    assert plan(only.append(user("next"))).previous_response_id == "R1"
    last = respond(Turn([user("u")]), "R1", spoken("a"), thought("b"))
    assert types(sent(last.append(user("next")))) == ["user", "assistant", "user"]


def test_reasoning_that_was_moved_is_left_out() -> None:
    """Within its response too: it belongs to one item only."""
    turn = respond(Turn([user("u")]), "R1", thought("a"), spoken("a"), spoken("b"))
    moved = turn.remove(turn[1].id).insert(2, turn[1])
    assert types(sent(moved)) == ["user", "assistant", "assistant"]


def test_a_run_of_reasoning_goes_out_together() -> None:
    """As long as each of it may; what comes before a gap in it stays home."""
    run = [thought(name) for name in "abc"]
    turn = respond(Turn([user("u")]), "R1", *run, spoken("x"))
    assert ids(sent(turn)) == ["", "rs_a", "rs_b", "rs_c", "msg_x"]
    gap = [thought("a"), thought("b", sealed=""), thought("c")]
    turn = respond(Turn([user("u")]), "R1", *gap, spoken("x"))
    assert ids(sent(turn)) == ["", "rs_c", "msg_x"]


def test_a_long_run_of_reasoning_is_no_problem() -> None:
    """Thousands in a row are rendered in one pass."""
    run = [thought(str(number)) for number in range(3_000)]
    turn = respond(Turn([user("u")]), "R1", *run, spoken("x"))
    assert len(sent(turn)) == 3_002


def test_a_copy_of_an_output_carries_neither_reasoning_nor_ids() -> None:
    """A server that holds the first would refuse the second as a duplicate."""
    turn = respond(Turn([user("u")]), "R1", thought("a"), spoken("a"))
    copied = turn.append(user("again"), *(replace(block, id="") for block in turn[1:]))
    assert plan(copied).previous_response_id == "R1"
    assert ids(plan(copied).input()) == ["", ""]
    assert ids(sent(copied)) == ["", "rs_a", "msg_a", "", ""]


def test_an_equal_rebuild_keeps_its_reasoning() -> None:
    """New local ids and a round trip through JSON change nothing; lost tags only cost reasoning."""
    turn = thinking()
    assert sent(loads(dumps(turn))) == sent(turn)
    renamed = Turn((replace(block, id="") for block in turn), data=turn.data)
    assert sent(renamed) == sent(turn)
    bare = Turn((replace(block, metadata={}) for block in turn), data=turn.data)
    assert "reasoning" not in types(sent(bare))
    assert plan(bare).previous_response_id == "R2"


def test_reasoning_in_an_unknown_shape_is_never_sent() -> None:
    """Also where it was kept as an opaque item."""
    odd = opaque({"type": "reasoning", "encrypted_content": "sealed", "summary": "?"})
    assert types(render(Turn([user("u"), odd]))) == ["user"]
    assert plan(Turn([user("u"), odd])).left_out == (odd,)


def test_a_plan_can_do_without_reasoning() -> None:
    """When a server refuses it; compactions stay."""
    turn = respond(Turn([user("u")]), "R1", compacted("c"), thought("a"), spoken("a"))
    full = plan(turn.append(user("next")), mode="stateless")
    assert types(full.input()) == ["compaction", "reasoning", "assistant", "user"]
    without = full.without_reasoning()
    assert types(without.input()) == ["compaction", "assistant", "user"]
    assert ids(without.input()) == ["", "", ""]


def test_without_proof_nothing_derived_goes_out() -> None:
    """Blocks on their own, with no plan that knows them, are sent without what was derived."""
    turn = thinking()
    assert types(build_input_from_blocks(turn.blocks)) == [
        "user",
        "function_call",
        "function_call_output",
        "assistant",
    ]
    assert types(build_input_from_blocks([compacted("c"), user("u")])) == ["user"]


def test_what_a_provider_cannot_express_is_said() -> None:
    """A refusal in the user's words, or a block of a newer Kedge."""
    with pytest.raises(UnsupportedBlock, match="only a model can refuse"):
        render(Turn([user([RefusalPart("no")])]))
