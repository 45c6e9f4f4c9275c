"""Compactions that may be sent again according to their records, and scopes of conversation objects."""

from msgspec import structs

from kedge.planning import get_state, render, set_state
from kedge.planning.render import base_scope, conversation_scope
from kedge.turns import Source, Turn, assistant, tool_call, tool_result, user
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


def test_rendering_starts_at_the_newest_valid_compaction() -> None:
    """Rendering starts at a compaction created by the server while its record matches the Turn."""
    turn = add_response(
        make_exchanges(2).append(user("u")), "R3", compaction_block("c"), message_block("c")
    )
    turn = turn.append(user("next"))
    assert item_types(render_full(turn)) == ["compaction", "assistant", "user"]
    assert make_plan(turn).previous_response_id == "R3"
    assert make_plan(turn, mode="stateless").full_blocks == 3


def test_edit_before_a_compaction_invalidates_it() -> None:
    """After an edit before a compaction all blocks are sent, and the compaction is never sent again."""
    turn = add_response(
        make_exchanges(2).append(user("u")), "R3", compaction_block("c"), message_block("c")
    )
    edited = turn.edit(turn[0].id, user("redacted")).append(user("next"))
    complete = ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert item_types(render_full(edited)) == complete
    assert "Left out: 1 block of compaction." in make_plan(edited).explain()
    answered = add_response(edited, "R4").append(user("more"))
    assert item_types(render_full(answered)) == [
        *complete,
        "assistant",
        "user",
    ]  # the new record does not make it valid again
    assert make_plan(answered).previous_response_id == "R4"
    assert item_types(render_full(add_response(answered, "R5"))) == [
        *complete,
        "assistant",
        "user",
        "assistant",
    ]


def test_a_compaction_of_another_provider_is_left_out() -> None:
    """A compaction is sent only to the provider that created it, whose chain continues from it."""
    turn = add_response(
        make_exchanges(1).append(user("u")), "R2", compaction_block("c"), message_block("c")
    )
    turn = add_response(turn.append(user("v")), "S1", scope="there").append(user("next"))
    assert item_types(render_full(turn, "there")) == [*["user", "assistant"] * 3, "user"]
    assert make_plan(turn, scope="there").previous_response_id == "S1"
    assert item_types(render_full(turn)) == ["compaction", "assistant", "user", "assistant", "user"]
    assert make_plan(turn).previous_response_id == "R2"


def test_a_compaction_added_by_the_caller_is_a_barrier() -> None:
    """A compaction added by the caller replaces everything before it, even if that is edited later."""
    turn = make_exchanges(2).append(compaction_block("c", origin="compact"), user("u"))
    assert item_types(make_plan(turn).input()) == ["compaction", "user"]
    assert make_plan(turn).anchor is None
    assert "because a compaction has replaced it." in make_plan(turn).explain()
    answered = add_response(turn, "R3").append(user("next"))
    assert make_plan(answered).previous_response_id == "R3"
    edited = answered.edit(answered[0].id, user("edited"))
    assert item_types(make_plan(edited).input()) == ["compaction", "user", "assistant", "user"]


def test_added_compaction_is_valid_after_an_incomplete_response() -> None:
    """A compaction added by the caller is still sent after an incomplete response."""
    turn = make_exchanges(1).append(compaction_block("c", origin="compact"), user("u"))
    incomplete = add_response(turn, "R2", status="incomplete").append(user("again"))
    assert item_types(make_plan(incomplete).input()) == ["compaction", "user", "assistant", "user"]


def test_untagged_compaction_is_recognized_by_its_record() -> None:
    """The record identifies a compaction created by a response, even if all tags were removed."""
    turn = add_response(
        make_exchanges(2).append(user("u")), "R3", compaction_block("c"), message_block("c")
    )
    untagged = Turn(
        (structs.replace(b, metadata={}, source=None, origin="user") for b in turn), data=turn.data
    )
    assert make_plan(untagged).previous_response_id == "R3"
    assert item_types(render_full(untagged)) == ["compaction", "assistant"]
    edited = untagged.edit(untagged[2].id, user("redacted")).append(user("next"))
    assert "compaction" not in item_types(render_full(edited))
    assert make_plan(edited).previous_response_id == "R1"


def test_received_compaction_without_a_record_is_not_used() -> None:
    """A compaction with the origin or tag of a response but without a record is not used."""
    received = compaction_block("c", origin="engine")
    assert item_types(render(Turn([user("u"), received, user("v")]))) == ["user", "user"]
    tagged = compaction_block("c", source=Source("R9"))
    assert item_types(render(Turn([user("u"), tagged, user("v")]))) == ["user", "user"]


def test_calls_before_a_barrier_are_no_problem() -> None:
    """A call before a compaction needs no result, and a result for it after the compaction is an orphan."""
    turn = Turn([tool_call("f", "{}", call_id="c"), compaction_block("c"), user("u")])
    assert make_plan(turn).problems == ()
    late = turn.append(tool_result("c", "1"))
    assert [problem.kind for problem in make_plan(late).problems] == ["orphan"]
    assert [problem.kind for problem in make_plan(turn.append(assistant("a"))).problems] == []
