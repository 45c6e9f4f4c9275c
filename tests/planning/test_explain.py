"""``RequestPlan.explain`` describes a plan in a few lines of plain English."""

from kedge.planning import get_state, set_state
from kedge.planning.explain import MAX_LISTED
from kedge.turns import Turn, assistant, system, tool_call, user
from planning.recorded_turns import (
    NOW,
    add_response,
    make_exchanges,
    make_plan,
    message_block,
    reasoning_block,
)


def test_a_chained_request() -> None:
    """The explanation of a chained request says what is sent and what the server already has."""
    reported = make_plan(make_exchanges(20).append(user("next"))).explain()
    assert reported == (
        "Chained on R20: sending 1 block, about 50 B; "
        "the server has the rest of 41 blocks, about 3.1 kB."
    )


def test_an_edit_names_the_blocks_between_two_records() -> None:
    """The explanation of an edit names the range of blocks between two records that contains it."""
    turn = make_exchanges(3)
    edited = turn.edit(turn[3].id, assistant("edited"))
    texts = "because the conversation before or in it was edited since"
    assert make_plan(edited).explain().splitlines()[1:] == [
        f"Not used: R3, {texts} (somewhere in blocks 2 to 5).",
        f"Not used: R2, {texts} (somewhere in blocks 2 to 3).",
    ]


def test_blocks_are_numbered_by_their_positions_in_the_turn() -> None:
    """Numbers count from 0, with leading system blocks and reasoning, as ``kedge inspect`` lists them."""
    turn = Turn([system("Be brief.")])
    for name in ("R1", "R2"):
        turn = add_response(
            turn.append(user(name)), name, reasoning_block(name), message_block(name)
        )
    edited = turn.edit(turn[6].id, assistant("edited"))
    reported = make_plan(edited).explain()
    assert "Chained on R1" in reported
    assert "(somewhere in blocks 4 to 6)" in reported


def test_truncated_turn_is_reported() -> None:
    """The explanation of a truncated Turn names the block where it now ends."""
    reported = make_plan(make_exchanges(3).take(4)).explain()
    assert "Not used: R3, because the conversation now ends before it (with block 3)." in reported


def test_a_fallback_explains_what_to_do() -> None:
    """The explanation of a full send says what to do, or that no action is needed."""
    turn = make_exchanges(1)
    late = make_plan(turn, now=NOW + 10_000_000).explain()
    assert late.splitlines() == [
        "Sending everything (2 blocks, about 151 B): no stored response matches this history.",
        "Not used: R1, because the server no longer stores it, or is about to drop it.",
        "Nothing to do: the full conversation is stored locally and is sent again.",
    ]
    assert "store=true" in make_plan(make_exchanges(1, stored=False)).explain()
    assert "stateless mode" in make_plan(turn, mode="stateless").explain()


def test_problems_are_listed_up_to_a_limit() -> None:
    """Problems and rejected candidates beyond the limit are only counted."""
    calls = [tool_call("f", "{}", call_id=f"c{number}") for number in range(MAX_LISTED + 3)]
    lines = make_plan(Turn(calls)).explain().splitlines()
    assert lines[1] == "Cannot be sent: call c0 (f) has no result; add one or remove the call."
    assert len(lines) == 1 + MAX_LISTED + 1
    assert lines[-1] == "Cannot be sent: 3 more of these."
    turn = make_exchanges(MAX_LISTED + 2)
    lost = get_state(turn).mark_lost([f"R{number + 1}" for number in range(MAX_LISTED + 2)])
    assert "Not used: 2 more." in make_plan(set_state(turn, lost)).explain()
