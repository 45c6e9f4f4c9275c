"""When a server is told to have forgotten, and when there is no verdict."""

from typing import Any

import pytest

from kedge.engines.healing import detect_echo_mismatch, detect_lost_context
from kedge.events import ResponseStarted, Usage
from kedge.planning import RequestPlan, plan_request, record_response
from kedge.turns import Turn, assistant, image, user

LONG = "The quick brown fox jumps over the lazy dog. " * 40


def make_chained_plan(*more: Any) -> RequestPlan:
    """A plan that sends little on an anchor that holds much."""
    turn = Turn([user(LONG), assistant(LONG), user(LONG)])
    plan = plan_request(turn, scope="s", now=0.0)
    turn = record_response(turn, [assistant(LONG)], response_id="r", plan=plan, created_at=0.0)
    return plan_request(turn.append(user(["And?", *more])), scope="s", now=1.0)


def make_body(plan: RequestPlan, **params: Any) -> dict[str, Any]:
    """The body that the plan makes."""
    return {"input": plan.input(), **params}


def test_an_echo_of_another_parent_is_a_witness() -> None:
    """A server that names another parent, or none, started from something else."""
    plan = make_chained_plan()
    assert detect_echo_mismatch(ResponseStarted("x", previous_response_id=None, echoed=True), plan)
    assert detect_echo_mismatch(
        ResponseStarted("x", previous_response_id="other", echoed=True), plan
    )


def test_a_right_echo_or_none_at_all_is_no_witness() -> None:
    """The right parent is as it should be; silence says nothing."""
    plan = make_chained_plan()
    assert not detect_echo_mismatch(
        ResponseStarted("x", previous_response_id="r", echoed=True), plan
    )
    assert not detect_echo_mismatch(ResponseStarted("x", echoed=False), plan)


def test_tokens_of_the_delta_alone_are_a_witness() -> None:
    """A count that fits the delta and cannot fit the Turn tells that the rest was not read."""
    plan = make_chained_plan()
    assert detect_lost_context(Usage(input_tokens=12), plan, make_body(plan))


@pytest.mark.parametrize("tokens", [0, 800, 1_600, 5_000])
def test_no_count_or_a_plausible_one_is_no_witness(tokens: int) -> None:
    """Where the tokens could hold the Turn, or none are told, there is no verdict."""
    plan = make_chained_plan()
    assert not detect_lost_context(Usage(input_tokens=tokens), plan, make_body(plan))
    assert not detect_lost_context(None, plan, make_body(plan))


@pytest.mark.parametrize(
    "params",
    [
        {"truncation": "auto"},
        {"context_management": [{"type": "compaction"}]},
        {"reasoning": {"context": "current_turn"}},
    ],
)
def test_honest_reasons_forbid_a_verdict(params: dict[str, Any]) -> None:
    """What changes the count for honest reasons makes the second witness silent."""
    plan = make_chained_plan()
    assert not detect_lost_context(Usage(input_tokens=12), plan, make_body(plan, **params))


def test_pictures_forbid_a_verdict() -> None:
    """Nobody can count a picture's tokens from outside."""
    plan = make_chained_plan(image(b"x"))
    assert not detect_lost_context(Usage(input_tokens=12), plan, make_body(plan))


def test_short_conversations_are_never_suspected() -> None:
    """Small numbers prove nothing."""
    turn = Turn([user("Hi")])
    plan = plan_request(turn, scope="s", now=0.0)
    turn = record_response(turn, [assistant("Hi")], response_id="r", plan=plan, created_at=0.0)
    plan = plan_request(turn.append(user("And?")), scope="s", now=1.0)
    assert not detect_lost_context(Usage(input_tokens=3), plan, make_body(plan))
