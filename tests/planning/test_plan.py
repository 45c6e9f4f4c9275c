"""Request plans use the longest proved prefix, give a reason for each rejection or fallback, and never raise."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from for_each import for_each
from kedge import planning
from kedge._internal.json_text import encode
from kedge.errors import Unsendable, UnsupportedBlock
from kedge.planning import AnchorRecord, ConversationState, get_state, prefix_digest, set_state
from kedge.planning.anchors import STATE_KEY, anchor_sort_key
from kedge.planning.render import measure_full_body
from kedge.turns import Turn, assistant, dumps, loads, tool_result, user
from planning.recorded_turns import (
    NOW,
    SCOPE,
    add_response,
    call_block,
    make_exchanges,
    make_plan,
    make_reasoning_turn,
    message_block,
    reasoning_block,
    records,
    render_full,
)
from strategies import json_objects, json_values, turns

DAY = 24 * 3600.0


def test_next_request_sends_only_new_blocks() -> None:
    """The next request chains on the newest response and sends only the new blocks."""
    turn = make_exchanges(3).append(user("next"))
    planned = make_plan(turn)
    assert planned.previous_response_id == "R3"
    assert [item["content"] for item in planned.input()] == ["next"]
    assert (planned.full_blocks, planned.delta_blocks) == (7, 1)
    assert 0 < planned.delta_bytes < planned.full_bytes
    assert planned.digest == prefix_digest(turn)
    assert planned.reason == ""
    check_full_size(planned)


def check_full_size(plan: planning.RequestPlan) -> None:
    """Check the size of a full send that is derived from the size of the body of a plan."""
    body = {"previous_response_id": plan.previous_response_id, "input": plan.input()}
    full = {"input": render_full(plan.source)}  # pyright: ignore[reportArgumentType]
    assert measure_full_body(plan, len(encode(body))) == len(encode(full))


def test_empty_delta_is_sent_with_the_anchor() -> None:
    """Without new blocks an empty input is sent, so that the model continues from the anchor."""
    planned = make_plan(make_exchanges(1))
    assert (planned.previous_response_id, planned.input()) == ("R1", [])
    assert (planned.delta_blocks, planned.delta_bytes) == (0, 0)
    check_full_size(planned)
    check_full_size(make_plan(make_reasoning_turn().append(user("next"))))


@for_each(
    ("reason", "changed", "options"),
    [
        ("scope", {"scope": "there"}, {}),
        ("incomplete", {"status": "incomplete"}, {}),
        ("unstored", {"stored": False}, {}),
        ("expired", {"expires_at": NOW}, {}),
        ("changed", {"digest": "sha256:00"}, {}),
        ("unproven", {"response_id": ""}, {}),
        ("lost", {"status": "lost"}, {}),
        ("too_deep", {"digest": "sha256:00", "depth": 5}, {"max_depth": 4}),  # it was also edited
    ],
)
def test_rejected_candidate_has_a_reason_and_an_older_one_is_used(
    reason: str, changed: dict[str, Any], options: dict[str, Any]
) -> None:
    """A candidate rejected for any reason but the depth alone is replaced by an older one."""
    turn = make_exchanges(2).append(user("next"))
    first, last = get_state(turn).anchors
    invalid = structs.replace(last, **changed)
    planned = make_plan(with_anchors(turn, first, invalid), **options)
    assert planned.previous_response_id == "R1"
    assert [each.reason for each in planned.rejected] == [reason]
    alone = make_plan(with_anchors(turn, invalid), **options)
    assert alone.is_full
    assert [each.reason for each in alone.rejected] == [reason]


def with_anchors(turn: Turn, *anchors: AnchorRecord) -> Turn:
    return set_state(turn, ConversationState(anchors=anchors))


def test_chain_at_its_maximum_depth_causes_a_full_send() -> None:
    """A chain that is too deep is not continued from an ancestor, whose delta would only grow."""
    turn = make_exchanges(2).append(user("next"))
    first, last = get_state(turn).anchors
    planned = make_plan(with_anchors(turn, first, structs.replace(last, depth=5)), max_depth=4)
    assert (planned.is_full, planned.fallback) == (True, "too_deep")


def test_reasoning_after_the_anchor_is_sent() -> None:
    """An unstored response is sent completely, including its encrypted reasoning and ids."""
    turn = add_response(Turn([user("u")]), "R1", message_block("a"))
    turn = add_response(
        turn.append(user("v")), "R2", reasoning_block("b"), message_block("b"), stored=False
    )
    planned = make_plan(turn.append(user("next")))
    assert planned.previous_response_id == "R1"
    assert [item.get("id", "") for item in planned.input()] == ["", "rs_b", "msg_b", ""]


def test_conversation_mode_needs_the_newest_response_of_its_object() -> None:
    """An object holds everything stored in it, so an edit anywhere starts a new one, as ``store=false`` does."""
    options = {"mode": "conversation", "conversation_id": "c1"}
    turn = add_response(Turn([user("a")]), "R1", **options)
    turn = add_response(turn.append(user("b")), "R2", **options).append(user("c"))
    planned = make_plan(turn, mode="conversation", now=NOW + 400 * DAY, max_depth=1)
    assert (planned.conversation_id, planned.delta_blocks) == ("c1", 1)
    assert planned.anchor is not None
    edited = make_plan(turn.edit(turn[2].id, user("edited")), mode="conversation")
    assert (edited.conversation_id, edited.is_full, edited.fallback) == ("", True, "changed")
    assert make_plan(turn, mode="conversation", scope="there").fallback is None
    for other in ("c2", ""):
        moved = set_state(turn, structs.replace(get_state(turn), conversation_id=other))
        assert make_plan(moved, mode="conversation").fallback == "scope"
    unstored = add_response(Turn([user("a")]), "R1", **options, stored=False).append(user("b"))
    assert make_plan(unstored, mode="conversation").fallback == "unstored"


def test_extra_candidates_are_checked_in_the_same_way() -> None:
    """Records passed as ``extra``, such as those of a store's index, are checked like those of the state."""
    turn = make_exchanges(3).append(user("next"))
    known = get_state(turn).anchors
    cleared = set_state(turn, ConversationState())
    assert make_plan(cleared).is_full
    assert make_plan(cleared, extra=known).previous_response_id == "R3"
    assert make_plan(cleared, extra=reversed(known[:2])).previous_response_id == "R2"
    [newest, *_] = make_plan(cleared, extra=iter(known), scope="there").rejected
    assert newest.reason == "scope"
    partly = set_state(turn, ConversationState(anchors=known[:1]))
    assert make_plan(partly, extra=known[1:]).previous_response_id == "R3"
    assert make_plan(turn, extra=known).rejected == ()


def test_lost_response_is_not_tried_again() -> None:
    """A response marked as lost in the state is rejected, even if ``extra`` lists it as completed."""
    turn = make_exchanges(2).append(user("next"))
    lost = set_state(turn, get_state(turn).mark_lost(["R2"]))
    planned = make_plan(lost, extra=get_state(turn).anchors)
    assert planned.previous_response_id == "R1"
    assert [(each.response_id, each.reason) for each in planned.rejected] == [("R2", "lost")]


def test_extra_record_can_mark_a_response_as_stored() -> None:
    """A live socket that can continue an unstored response passes an extra record for it."""
    turn = make_exchanges(1, stored=False).append(user("next"))
    assert make_plan(turn).fallback == "unstored"
    (record,) = get_state(turn).anchors
    stored = structs.replace(record, stored=True)
    assert make_plan(turn, extra=[stored]).previous_response_id == "R1"


@given(st.lists(records(), max_size=8), st.lists(records(), max_size=4))
def test_candidates_are_tried_by_length_then_age(
    known: list[AnchorRecord], extra: list[AnchorRecord]
) -> None:
    """Candidates from the state and from ``extra`` are merged and tried longest first, then newest first."""
    turn = with_anchors(Turn([user("a")]), *known)
    planned = make_plan(turn, extra=extra)
    order = [anchor_sort_key(each.record) for each in planned.rejected]
    assert order == sorted(order, reverse=True)
    assert len(known) <= len(order) <= len(known) + len(extra)


def test_problems_are_listed_and_only_sending_raises() -> None:
    """A plan with problems can be inspected, but its ``input`` raises ``Unsendable``."""
    turn = add_response(Turn([user("u")]), "R1", call_block("a"))
    planned = make_plan(turn.append(user("never mind")))
    problem = "call call_a (f) has no result; add one or remove the call"
    assert [str(problem) for problem in planned.problems] == [problem]
    assert planned.previous_response_id == "R1"
    with pytest.raises(Unsendable, match="call_a") as exc_info:
        planned.input()
    assert exc_info.value.problems == planned.problems
    answered = turn.append(tool_result("call_a", "1"))
    make_plan(answered).check()


record_forms = st.fixed_dictionaries(
    {
        "response_id": st.sampled_from(["", "R1", "resp_1"]),
        "scope": st.just(SCOPE),
        "digest": st.sampled_from(["", prefix_digest(Turn())]),
        "block_count": st.sampled_from([-1, 0, 1, 2, 10**30]),
    },
    optional={
        "expires_at": st.sampled_from([0, -5, 10**400, None, 1e308]),
        "created_at": st.sampled_from([0, -1e308, 1e308]),
        "barrier": st.sampled_from([None, 0, -1, 7]),
        "derived": st.sampled_from([[], ["x"], "x"]),
        "depth": st.integers(),
        "status": st.sampled_from(["completed", "lost", "?"]),
    },
)
state_forms = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("mode", "previous_response_id", "conversation_id"), json_values()),
        "anchors": json_values() | st.lists(json_objects() | record_forms, max_size=4),
    },
)
modes = st.sampled_from(["chained", "stateless", "conversation", "?"])


@given(turns(), json_values() | state_forms, modes, st.data())
def test_planning_never_raises(turn: Turn, state: Any, mode: Any, data: st.DataObject) -> None:
    """Planning does not raise for any Turn, state or mode; only building the input may."""
    if state is not None:
        turn = turn.with_data({STATE_KEY: state})
    extra = data.draw(st.lists(records(), max_size=3))
    planned = planning.plan_request(turn, scope=SCOPE, mode=mode, now=NOW, extra=extra, max_depth=2)
    assert isinstance(planned, planning.RequestPlan)
    assert planned.explain()
    assert len(planned.left_out) + planned.delta_blocks == len(planned.delta) <= len(turn)
    planning.find_best_anchor(turn)
    for attempt in (planned.input, lambda: planning.render(turn, scope=SCOPE)):
        with contextlib.suppress(Unsendable, UnsupportedBlock):
            attempt()


@given(turns(), st.lists(records(), max_size=4))
def test_valid_record_among_invalid_ones_is_found(turn: Turn, noise: list[AnchorRecord]) -> None:
    """Duplicate and invalid records do not hide a valid anchor, before and after a JSON round trip."""
    covered = planning.covered_count(turn)
    if not covered:
        return
    true = AnchorRecord("R", SCOPE, prefix_digest(turn), covered, created_at=1e11)
    turn = with_anchors(turn, *noise, true, true)
    barrier = make_plan(turn).barrier
    turn = with_anchors(turn, *noise, structs.replace(true, barrier=barrier))
    planned = make_plan(turn)
    assert planned.previous_response_id == make_plan(loads(dumps(turn))).previous_response_id
    if planned.barrier == barrier:
        assert planned.previous_response_id == "R"


ANSWERED = add_response(Turn([user("a")]), "R1").append(user("b"))


def answer_without_anchor(response_id: str = "") -> Turn:
    """Return a Turn with an answer that has no record, and a new message."""
    return Turn([user("a"), *planning.tag_blocks([assistant("A")], response_id), user("b")])


@for_each(("response_id", "reason"), [("", "no_id"), ("R1", "unproven")])
@for_each("mode", ["chained", "conversation"])
def test_answer_without_a_record_is_sent_again(response_id: str, reason: str, mode: str) -> None:
    """An answer without an id, or one that could not be recorded, is sent in full with the reason."""
    plan = make_plan(answer_without_anchor(response_id), mode=mode)
    assert (plan.reason, plan.fallback, plan.rejected) == (reason, reason, ())
    assert "the last answer cannot be continued, because" in plan.explain()


EMPTY = set_state(Turn([user("a")]), ConversationState(mode="conversation"))


@for_each(
    ("turn", "options", "reason"),
    [
        # Answers that the program wrote, or those of another server, are new to the server.
        (Turn([user("a"), assistant("A"), user("b")]), {}, "new"),
        (ANSWERED, {"scope": "there"}, "new"),
        # A stateless request has no fallback, whatever the server has.
        (ANSWERED, {"mode": "stateless"}, "stateless"),
        (answer_without_anchor(), {"mode": "stateless"}, "stateless"),
        # A conversation object does not have the responses of a chain.
        (EMPTY, {"mode": "conversation"}, "conversation"),
        (ANSWERED, {"mode": "conversation"}, "scope"),
    ],
)
def test_full_send_has_a_reason(turn: Turn, options: dict[str, Any], reason: str) -> None:
    """A full send has a reason; it is a fallback only if the server could not do what was requested."""
    plan = make_plan(turn, **options)
    assert (plan.reason, plan.fallback) == (reason, reason if reason == "scope" else None)


def reason_of_mode(turn: Turn, mode_reason: str) -> tuple[str, str | None]:
    plan = structs.replace(make_plan(turn, mode="stateless"), mode_reason=mode_reason)
    return (plan.reason, plan.fallback)


def test_mode_that_the_server_forces_is_a_fallback() -> None:
    """A request that is stateless against its setting falls back once there is an answer."""
    for chosen in ("switched_off", "never"):
        assert reason_of_mode(ANSWERED, chosen) == ("stateless", None)
    for forced in ("never_stores", "unsupported", "prompt", "stateless_api"):
        assert reason_of_mode(ANSWERED, forced) == (forced, forced)
        assert reason_of_mode(Turn([user("a")]), forced) == ("stateless", None)


def test_answers_of_another_server_are_not_sent_again() -> None:
    """The newest rejected answer of the server decides about the reason."""
    both = add_response(ANSWERED, "R2", scope="there").append(user("c"))
    edited = both.edit(both[0].id, user("edited"))
    assert [each.reason for each in make_plan(edited).rejected] == ["scope", "changed"]
    assert make_plan(edited).fallback == "changed"
