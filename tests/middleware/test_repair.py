"""Tests of ``repair``, which changes a Turn so that it can be sent."""

from collections.abc import Sequence
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from kedge.middleware import repair_turn
from kedge.planning import find_best_anchor, find_problems, plan_request, record_response
from kedge.turns import Block, ToolResultBlock, Turn, opaque, tool_call, tool_result, user


def test_an_open_call_can_be_removed() -> None:
    """With the mode ``remove`` a tool call without a result is removed."""
    turn = repair_turn(Turn([user("go"), tool_call("f", {}, call_id="c1")]), "remove")
    assert [each.kind for each in turn.blocks] == ["user"]


def test_results_are_appended_after_the_complete_answer() -> None:
    """Results are added after both calls of a response, so that its anchor remains valid."""
    requested = Turn([user("go")])
    plan = plan_request(requested, scope="s", now=0.0)
    calls = [tool_call("f", {}, call_id="c1"), tool_call("f", {}, call_id="c2")]
    turn = record_response(requested, calls, response_id="r", plan=plan, created_at=0.0)
    repaired = repair_turn(turn)
    assert [each.kind for each in repaired.blocks[1:3]] == ["tool_call", "tool_call"]
    assert find_best_anchor(repaired) == "r"
    assert repaired.blocks[-1].origin == "repair"


block_lists = st.lists(
    st.one_of(
        st.builds(lambda c: tool_call("f", {}, call_id=c), st.sampled_from("abc")),
        st.builds(lambda c: tool_result(c, "x"), st.sampled_from("abc")),
        st.builds(lambda c: tool_call("f", "x", call_id=c, custom=True), st.sampled_from("abc")),
        st.builds(lambda c: opaque({"type": "computer_call", "call_id": c}), st.sampled_from("ab")),
        st.builds(user, st.just("hello")),
    ),
    max_size=10,
)
repair_modes: st.SearchStrategy[Literal["complete", "remove"]] = st.sampled_from(
    ("complete", "remove")
)


@given(block_lists, repair_modes)
def test_any_turn_can_be_repaired(
    blocks: Sequence[Block], mode: Literal["complete", "remove"]
) -> None:
    """A Turn with random calls can be sent after a repair, and a second repair changes nothing."""
    turn = repair_turn(Turn(blocks), mode)
    assert find_problems(turn) == ()
    assert repair_turn(turn) is turn


def test_many_problems_are_repaired_in_order() -> None:
    """Results are added in the order of their calls, and the Turn is rebuilt at most twice."""
    calls = [tool_call("f", "{}", call_id=f"call_{i}") for i in range(2_000)]
    repaired = repair_turn(Turn([user("?"), *calls, user("!")]))
    answered = [b.call_id for b in repaired.blocks if isinstance(b, ToolResultBlock)]
    assert answered == [call.call_id for call in calls]
    assert repaired.blocks[-1] == user("!")
    assert find_problems(repaired) == ()
