"""Anchor lookup by tags: the fourteen reference scenarios, and the changes only digests detect.

The scenarios and their names come from the original specification. It considered three changes
harmless that are not; each of them has a test here.
"""

import logging
from collections.abc import Callable

import pytest

from for_each import for_each
from kedge.observe import TRACE
from kedge.observe.logs import get_fields
from kedge.planning import (
    anchor_problem,
    blocks_after_response,
    find_best_anchor,
    get_state,
    is_valid_anchor,
    set_state,
)
from kedge.planning import record as module
from kedge.planning.record import drop_changed_anchors
from kedge.turns import Block, Source, Turn, assistant, system, tool_call, tool_result, user
from planning.recorded_turns import (
    add_response,
    call_block,
    make_exchanges,
    make_plan,
    message_block,
)


def tagged_answer(response_id: str) -> Block:
    """Return an assistant block tagged with a response id."""
    return assistant("said", source=Source(response_id))


def tagged_call(response_id: str) -> Block:
    """Return a tool call tagged with a response id."""
    return tool_call("f", "{}", call_id="c", source=Source(response_id))


def untagged_result() -> Block:
    """Return a tool result without a response id."""
    return tool_result("c", "1")


BEST_ANCHOR_CASES = {
    "Empty Turn": ([], ""),
    "Single Response, No Middleware": (
        [user("u"), tagged_answer("resp_A"), tagged_call("resp_A")],
        "resp_A",
    ),
    "Single Response, Middleware Appended": (
        [user("u"), tagged_answer("resp_A"), tagged_call("resp_A"), untagged_result()],
        "resp_A",
    ),
    "Multiple Responses": (
        [user("u"), tagged_answer("resp_A"), untagged_result(), tagged_answer("resp_B")],
        "resp_B",
    ),
    "Middleware Inserted in Middle": (
        [user("u"), tagged_answer("resp_A"), user("INJECTED"), tagged_call("resp_A")],
        "",
    ),
    "All Middleware Blocks": ([user("u"), system("s"), untagged_result()], ""),
}

VALID_ANCHOR_CASES = {
    "Valid Contiguous Sequence": (
        [user("u"), tagged_answer("resp_A"), tagged_call("resp_A")],
        "resp_A",
        True,
    ),
    "Non-contiguous (Gap)": (
        [tagged_answer("resp_A"), user("OTHER"), tagged_answer("resp_A")],
        "resp_A",
        False,
    ),
    "Non-existent Response ID": ([tagged_answer("resp_A")], "resp_B", False),
    "Single Block": ([tagged_answer("resp_A")], "resp_A", True),
}

BLOCKS_AFTER_CASES = {
    "Blocks After Anchor": (
        [user("u"), tagged_answer("resp_A"), untagged_result(), user("user2")],
        "resp_A",
        2,
    ),
    "No Blocks After": ([user("u"), tagged_answer("resp_A")], "resp_A", 0),
    "Anchor Not Found": ([user("u"), tagged_answer("resp_A")], "resp_B", 0),
    "Multiple Blocks with Same Anchor": (
        [tagged_answer("resp_A"), tagged_call("resp_A"), untagged_result()],
        "resp_A",
        1,
    ),
}


@for_each("name", BEST_ANCHOR_CASES)
def test_find_best_anchor(name: str) -> None:
    """``find_best_anchor`` returns the newest contiguous response in the six reference scenarios."""
    blocks, expected = BEST_ANCHOR_CASES[name]
    assert find_best_anchor(Turn(blocks)) == expected


@pytest.mark.parametrize("name", VALID_ANCHOR_CASES)
def test_is_valid_anchor(name: str) -> None:
    """``is_valid_anchor`` accepts only contiguous responses in the four reference scenarios."""
    blocks, response_id, expected = VALID_ANCHOR_CASES[name]
    assert is_valid_anchor(Turn(blocks), response_id) is expected


@pytest.mark.parametrize("name", BLOCKS_AFTER_CASES)
def test_blocks_after_response(name: str) -> None:
    """``blocks_after_response`` returns the blocks after a response's last block."""
    blocks, response_id, count = BLOCKS_AFTER_CASES[name]
    after = blocks_after_response(Turn(blocks), response_id)
    assert after == blocks[len(blocks) - count :]


def remove_last_call(turn: Turn) -> Turn:
    """Remove the call of a response; its remaining blocks are still contiguous."""
    return turn.remove(turn[3].id)


def edit_in_place(turn: Turn) -> Turn:
    """Change the model's text and leave the block's id and tags unchanged."""
    block = turn[2]
    return turn.edit(block.id, assistant("edited", id=block.id, metadata=block.metadata))


def edit_before(turn: Turn) -> Turn:
    """Change the user's message before the response."""
    return turn.edit(turn[1].id, user("redacted"))


@pytest.mark.parametrize("change", [remove_last_call, edit_in_place, edit_before])
def test_digests_detect_changes_that_tags_do_not(change: Callable[[Turn], Turn]) -> None:
    """A removed call or an edit in or before a response invalidates the anchor, but not its tags."""
    turn = add_response(
        Turn([system("s"), user("u")]), "resp_A", message_block("a"), call_block("a")
    )
    turn = turn.append(tool_result("call_a", "1"), user("next"))
    assert is_valid_anchor(turn, "resp_A")
    assert make_plan(turn).previous_response_id == "resp_A"
    changed = change(turn)
    assert is_valid_anchor(set_state(changed, type(get_state(turn))()), "resp_A")  # tags alone
    assert anchor_problem(changed, "resp_A") == "changed"
    assert find_best_anchor(changed) == ""
    assert make_plan(changed).anchor is None


def test_anchor_problem_names_the_reason() -> None:
    """``anchor_problem`` returns the reason why a response is not an anchor, and ``None`` for a valid one."""
    turn = make_exchanges(3)
    assert anchor_problem(turn, "R3") is None
    assert anchor_problem(turn, "") == anchor_problem(turn, "R9") == "unproven"
    assert anchor_problem(turn.insert(0, tagged_answer("R3")), "R3") == "split"
    lost = set_state(turn, get_state(turn).mark_lost(["R3"]))
    assert anchor_problem(lost, "R3") == "lost"
    assert find_best_anchor(lost) == "R2"
    incomplete = add_response(turn.append(user("u")), "R4", status="incomplete")
    assert anchor_problem(incomplete, "R4") == "incomplete"
    unstored = add_response(turn.append(user("u")), "R4", stored=False)
    assert anchor_problem(unstored, "R4") == "unstored"
    assert find_best_anchor(unstored) == "R3"


def test_a_turn_without_its_newest_response_is_detached_from_its_object() -> None:
    """A conversation object still has the items of a removed answer, so it is not used any more."""
    turn = make_exchanges(2, conversation_id="conv_1")
    kept = get_state(drop_changed_anchors(turn.append(user("next"))))
    assert (kept.previous_response_id, kept.conversation_id) == ("R2", "conv_1")
    cut = get_state(drop_changed_anchors(turn.take(2)))
    assert [record.response_id for record in cut.anchors] == ["R1", "R2"]
    assert (cut.previous_response_id, cut.conversation_id) == ("R1", "")


def test_tags_on_other_blocks_do_not_move_an_anchor() -> None:
    """The end of a response is defined by its record, even if later blocks have its tag."""
    turn = make_exchanges(2)
    tagged = turn.append(tagged_answer("R2"))
    assert anchor_problem(tagged, "R2") == "changed"
    assert find_best_anchor(tagged) == "R1"


def test_anchor_lookup_reads_a_turn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of invalid responses are rejected in a single pass over the Turn."""
    turn = make_exchanges(300)
    edited = turn.edit(turn[0].id, user("edited"))
    passes: list[Turn] = []
    group = module._group_by_response
    monkeypatch.setattr(
        module, "_group_by_response", lambda turn: passes.append(turn) or group(turn)
    )
    assert find_best_anchor(edited) == ""
    assert find_best_anchor(turn) == "R300"
    assert passes == [edited, turn]


def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The result is logged at DEBUG and each rejected candidate at TRACE, with ids as fields."""
    turn = make_exchanges(2)
    edited = turn.edit(turn[2].id, user("edited"))
    with caplog.at_level(TRACE, "kedge.planning"):
        find_best_anchor(edited)
        find_best_anchor(Turn())
        blocks_after_response(turn, "R1")
        is_valid_anchor(turn, "R2")
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [
        ("TRACE", "responses in the Turn, newest first: ['R2', 'R1']"),
        ("TRACE", "anchor is not valid: changed"),
        ("TRACE", "anchor is valid"),
        ("DEBUG", "best anchor by tags: R1"),
        ("TRACE", "responses in the Turn, newest first: []"),
        ("DEBUG", "no valid anchor by tags among 0 responses"),
        ("DEBUG", "2 blocks after the response"),
        ("TRACE", "anchor is valid"),
    ]
    assert get_fields(caplog.records[1]) == {"response_id": "R2", "turn_id": edited.id}


def test_tagging_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Tagging blocks is logged, also for a response without an id, which cannot be an anchor."""
    with caplog.at_level(logging.DEBUG, "kedge.planning"):
        add_response(Turn([user("u")]), "R1")
        add_response(Turn([user("u")]), "")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == ["tagged 1 blocks", "tagged 1 blocks"]
    assert messages[2].startswith("no anchor: the response has no id")
