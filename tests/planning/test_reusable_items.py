"""What may go out again: compactions by their records, and scopes that belong together."""

from dataclasses import replace

from kedge.planning import get_state, render, set_state
from kedge.planning.reusable_items import base_scope, conversation_scope
from kedge.turns import Turn, assistant, tool_call, tool_result, user
from planning.recorded_turns import (
    add_response,
    compaction_block,
    item_types,
    make_exchanges,
    make_plan,
    make_reasoning_turn,
    message_block,
    render_full,
)


def test_scopes_of_conversation_objects_belong_to_their_provider() -> None:
    """Whatever characters a scope is made of."""
    scope = "https://host/v1 key 12"
    inside = conversation_scope(scope, "conv_1")
    assert base_scope(inside) == base_scope(scope) == scope
    assert inside != scope
    turn = make_reasoning_turn()
    elsewhere = [replace(record, scope="here two") for record in get_state(turn).anchors]
    other = set_state(turn, get_state(turn).with_anchors(elsewhere))
    assert "reasoning" not in item_types(render_full(other))


def test_rendering_starts_at_the_newest_compaction_that_holds() -> None:
    """A server's own, while its record proves."""
    turn = add_response(
        make_exchanges(2).append(user("u")), "R3", compaction_block("c"), message_block("c")
    )
    turn = turn.append(user("next"))
    assert item_types(render_full(turn)) == ["compaction", "assistant", "user"]
    assert make_plan(turn).previous_response_id == "R3"
    assert make_plan(turn, mode="stateless").full_blocks == 3


def test_a_compaction_falls_with_what_it_was_made_from() -> None:
    """After an edit before it everything is sent itself, and the compaction never again."""
    turn = add_response(
        make_exchanges(2).append(user("u")), "R3", compaction_block("c"), message_block("c")
    )
    edited = turn.replace(turn[0].id, user("redacted")).append(user("next"))
    complete = ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert item_types(render_full(edited)) == complete
    assert "Left out: 1 block of compaction." in make_plan(edited).explain()
    answered = add_response(edited, "R4").append(user("more"))
    assert item_types(render_full(answered)) == [
        *complete,
        "assistant",
        "user",
    ]  # the new record does not revive it
    assert make_plan(answered).previous_response_id == "R4"
    assert item_types(render_full(add_response(answered, "R5"))) == [
        *complete,
        "assistant",
        "user",
        "assistant",
    ]


def test_a_compaction_of_another_provider_is_left_out() -> None:
    """Only who made it can read it; its own chain goes on from it."""
    turn = add_response(
        make_exchanges(1).append(user("u")), "R2", compaction_block("c"), message_block("c")
    )
    turn = add_response(turn.append(user("v")), "S1", scope="there").append(user("next"))
    assert item_types(render_full(turn, "there")) == [*["user", "assistant"] * 3, "user"]
    assert make_plan(turn, scope="there").previous_response_id == "S1"
    assert item_types(render_full(turn)) == ["compaction", "assistant", "user", "assistant", "user"]
    assert make_plan(turn).previous_response_id == "R2"


def test_a_compaction_added_by_the_caller_is_a_barrier() -> None:
    """It stands for what is before it from then on, whatever happens to that."""
    turn = make_exchanges(2).append(compaction_block("c", origin="compact"), user("u"))
    assert item_types(make_plan(turn).input()) == ["compaction", "user"]
    assert make_plan(turn).anchor is None
    assert "because a compaction has replaced it." in make_plan(turn).explain()
    answered = add_response(turn, "R3").append(user("next"))
    assert make_plan(answered).previous_response_id == "R3"
    edited = answered.replace(answered[0].id, user("edited"))
    assert item_types(make_plan(edited).input()) == ["compaction", "user", "assistant", "user"]


def test_a_compaction_put_there_survives_an_unfinished_answer() -> None:
    """That a response was cut off says nothing about what was sent."""
    turn = make_exchanges(1).append(compaction_block("c", origin="compact"), user("u"))
    cut = add_response(turn, "R2", status="incomplete").append(user("again"))
    assert item_types(make_plan(cut).input()) == ["compaction", "user", "assistant", "user"]


def test_a_rebuilt_turn_does_not_make_a_compaction_deliberate() -> None:
    """Its record remembers that a response made it, though all tags are gone."""
    turn = add_response(
        make_exchanges(2).append(user("u")), "R3", compaction_block("c"), message_block("c")
    )
    bare = Turn((replace(b, metadata={}, origin="user") for b in turn), data=turn.data)
    assert make_plan(bare).previous_response_id == "R3"
    assert item_types(render_full(bare)) == ["compaction", "assistant"]
    edited = bare.replace(bare[2].id, user("redacted")).append(user("next"))
    assert "compaction" not in item_types(render_full(edited))
    assert make_plan(edited).previous_response_id == "R1"


def test_a_compaction_without_any_record_is_judged_by_its_tags() -> None:
    """One that an engine received and nobody wrote down is not relied on."""
    received = compaction_block("c", origin="engine")
    assert item_types(render(Turn([user("u"), received, user("v")]))) == ["user", "user"]
    tagged = compaction_block("c", metadata={"response_id": "R9"})
    assert item_types(render(Turn([user("u"), tagged, user("v")]))) == ["user", "user"]


def test_calls_before_a_barrier_are_no_problem_after_it() -> None:
    """The server has folded them away; a result for one of them is an orphan, though."""
    turn = Turn([tool_call("f", "{}", call_id="c"), compaction_block("c"), user("u")])
    assert make_plan(turn).problems == ()
    late = turn.append(tool_result("c", "1"))
    assert [problem.kind for problem in make_plan(late).problems] == ["orphan"]
    assert [problem.kind for problem in make_plan(turn.append(assistant("a"))).problems] == []
