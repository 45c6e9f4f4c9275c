"""What may go out again: compactions by their records, and scopes that belong together."""

from dataclasses import replace

from kedge.planning import get_state, render, set_state
from kedge.planning.proof import base_scope, conversation_scope
from kedge.turns import Turn, assistant, tool_call, tool_result, user
from planning.making import compacted, exchanges, plan, respond, sent, spoken, thinking, types


def test_scopes_of_conversation_objects_belong_to_their_provider() -> None:
    """Whatever characters a scope is made of."""
    scope = "https://host/v1 key 12"
    inside = conversation_scope(scope, "conv_1")
    assert base_scope(inside) == base_scope(scope) == scope
    assert inside != scope
    turn = thinking()
    elsewhere = [replace(record, scope="here two") for record in get_state(turn).anchors]
    other = set_state(turn, get_state(turn).keeping(elsewhere))
    assert "reasoning" not in types(sent(other))


def test_rendering_starts_at_the_newest_compaction_that_holds() -> None:
    """A server's own, while its record proves."""
    turn = respond(exchanges(2).append(user("u")), "R3", compacted("c"), spoken("c"))
    turn = turn.append(user("next"))
    assert types(sent(turn)) == ["compaction", "assistant", "user"]
    assert plan(turn).previous_response_id == "R3"
    assert plan(turn, mode="stateless").full_blocks == 3


def test_a_compaction_falls_with_what_it_was_made_from() -> None:
    """After an edit before it everything is sent itself, and the compaction never again."""
    turn = respond(exchanges(2).append(user("u")), "R3", compacted("c"), spoken("c"))
    edited = turn.replace(turn[0].id, user("redacted")).append(user("next"))
    whole = ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert types(sent(edited)) == whole
    assert "Left out: 1 block of compaction." in plan(edited).explain()
    answered = respond(edited, "R4").append(user("more"))
    assert types(sent(answered)) == [
        *whole,
        "assistant",
        "user",
    ]  # the new record does not revive it
    assert plan(answered).previous_response_id == "R4"
    assert types(sent(respond(answered, "R5"))) == [*whole, "assistant", "user", "assistant"]


def test_a_compaction_of_another_provider_is_left_out() -> None:
    """Only who made it can read it; its own chain goes on from it."""
    turn = respond(exchanges(1).append(user("u")), "R2", compacted("c"), spoken("c"))
    turn = respond(turn.append(user("v")), "S1", scope="there").append(user("next"))
    assert types(sent(turn, "there")) == [*["user", "assistant"] * 3, "user"]
    assert plan(turn, scope="there").previous_response_id == "S1"
    assert types(sent(turn)) == ["compaction", "assistant", "user", "assistant", "user"]
    assert plan(turn).previous_response_id == "R2"


def test_a_compaction_that_somebody_put_there_is_a_barrier() -> None:
    """It stands for what is before it from then on, whatever happens to that."""
    turn = exchanges(2).append(compacted("c", origin="compact"), user("u"))
    assert types(plan(turn).input()) == ["compaction", "user"]
    assert plan(turn).anchor is None
    assert "because a compaction has taken its place." in plan(turn).explain()
    answered = respond(turn, "R3").append(user("next"))
    assert plan(answered).previous_response_id == "R3"
    edited = answered.replace(answered[0].id, user("edited"))
    assert types(plan(edited).input()) == ["compaction", "user", "assistant", "user"]


def test_a_compaction_put_there_survives_an_unfinished_answer() -> None:
    """That a response was cut off says nothing about what was sent."""
    turn = exchanges(1).append(compacted("c", origin="compact"), user("u"))
    cut = respond(turn, "R2", status="incomplete").append(user("again"))
    assert types(plan(cut).input()) == ["compaction", "user", "assistant", "user"]


def test_a_rebuilt_turn_does_not_make_a_compaction_deliberate() -> None:
    """Its record remembers that a response made it, though all tags are gone."""
    turn = respond(exchanges(2).append(user("u")), "R3", compacted("c"), spoken("c"))
    bare = Turn((replace(b, metadata={}, origin="user") for b in turn), data=turn.data)
    assert plan(bare).previous_response_id == "R3"
    assert types(sent(bare)) == ["compaction", "assistant"]
    edited = bare.replace(bare[2].id, user("redacted")).append(user("next"))
    assert "compaction" not in types(sent(edited))
    assert plan(edited).previous_response_id == "R1"


def test_a_compaction_without_any_record_is_judged_by_its_tags() -> None:
    """One that an engine received and nobody wrote down is not relied on."""
    received = compacted("c", origin="engine")
    assert types(render(Turn([user("u"), received, user("v")]))) == ["user", "user"]
    tagged = compacted("c", metadata={"response_id": "R9"})
    assert types(render(Turn([user("u"), tagged, user("v")]))) == ["user", "user"]


def test_calls_before_a_barrier_are_no_problem_after_it() -> None:
    """The server has folded them away; a result for one of them is an orphan, though."""
    turn = Turn([tool_call("f", "{}", call_id="c"), compacted("c"), user("u")])
    assert plan(turn).problems == ()
    late = turn.append(tool_result("c", "1"))
    assert [problem.kind for problem in plan(late).problems] == ["orphan"]
    assert [problem.kind for problem in plan(turn.append(assistant("a"))).problems] == []
