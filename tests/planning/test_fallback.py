"""A fallback is a full send of blocks that an earlier answer of the same server covered."""

import pytest
from msgspec import structs

from kedge.planning import ConversationState, set_state, tag_blocks
from kedge.planning.plan import is_fallback_reason
from kedge.turns import Turn, assistant, user
from planning.recorded_turns import add_response, make_plan

ANSWERED = add_response(Turn([user("a")]), "R1").append(user("b"))


def answer_without_anchor(response_id: str = "") -> Turn:
    """Return a Turn with an answer that has no record, and a new message."""
    return Turn([user("a"), *tag_blocks([assistant("A")], response_id), user("b")])


@pytest.mark.parametrize(("response_id", "reason"), [("", "no_id"), ("R1", "unproven")])
@pytest.mark.parametrize("mode", ["chained", "conversation"])
def test_answer_without_a_record_is_sent_again(response_id: str, reason: str, mode: str) -> None:
    """An answer without an id, or one that could not be recorded, is sent in full with the reason."""
    plan = make_plan(answer_without_anchor(response_id), mode=mode)
    assert (plan.reason, plan.fallback, plan.rejected) == (reason, reason, ())
    assert "the last answer cannot be continued, because" in plan.explain()


def test_written_answer_is_not_one_of_the_server() -> None:
    """A Turn with answers that the program wrote is new to the server."""
    plan = make_plan(Turn([user("a"), assistant("A"), user("b")]))
    assert (plan.reason, plan.fallback) == ("new", None)


def test_request_that_is_meant_to_be_stateless_is_no_fallback() -> None:
    """A stateless request has no fallback, whatever the server has."""
    for turn in (ANSWERED, answer_without_anchor()):
        plan = make_plan(turn, mode="stateless")
        assert (plan.reason, plan.fallback) == ("stateless", None)


@pytest.mark.parametrize("chosen", ["switched_off", "never"])
def test_mode_that_a_setting_forces_is_no_fallback(chosen: str) -> None:
    """A setting that turns chaining off makes requests stateless on purpose."""
    plan = structs.replace(make_plan(ANSWERED, mode="stateless"), mode_reason=chosen)
    assert (plan.reason, plan.fallback) == ("stateless", None)


@pytest.mark.parametrize("forced", ["never_stores", "unsupported", "prompt", "stateless_api"])
def test_mode_that_the_server_forces_is_a_fallback(forced: str) -> None:
    """A request that is stateless although another mode was requested falls back once there is an answer."""
    plan = structs.replace(make_plan(ANSWERED, mode="stateless"), mode_reason=forced)
    assert (plan.reason, plan.fallback) == (forced, forced)
    first = structs.replace(make_plan(Turn([user("a")]), mode="stateless"), mode_reason=forced)
    assert (first.reason, first.fallback) == ("stateless", None)


def test_answers_of_another_server_are_not_sent_again() -> None:
    """The first request to another server is new there; then the newest rejected answer of it decides."""
    assert make_plan(ANSWERED, scope="there").reason == "new"
    both = add_response(ANSWERED, "R2", scope="there").append(user("c"))
    edited = both.edit(both[0].id, user("edited"))
    assert [each.reason for each in make_plan(edited).rejected] == ["scope", "changed"]
    assert make_plan(edited).fallback == "changed"


def test_change_to_conversation_mode_is_a_fallback() -> None:
    """A conversation object does not have the responses of a chain."""
    assert make_plan(ANSWERED, mode="conversation").fallback == "scope"
    empty = set_state(Turn([user("a")]), ConversationState(mode="conversation"))
    plan = make_plan(empty, mode="conversation")
    assert (plan.reason, plan.fallback) == ("conversation", None)


def test_chained_request_has_no_reason() -> None:
    """A request with an anchor is no full send."""
    assert make_plan(ANSWERED).reason == ""
    assert not is_fallback_reason("")
