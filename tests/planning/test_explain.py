"""A plan in plain English: a few lines that a user can act on."""

from dataclasses import replace

from kedge.planning import ConversationState, get_state, set_state
from kedge.planning.explain import SHOWN, size
from kedge.turns import Turn, assistant, tool_call, user
from planning.making import NOW, exchanges, plan, respond


def test_a_first_request() -> None:
    """Nothing is wrong: there is no response yet."""
    assert plan(Turn([user("hello")])).explain() == (
        "Sending everything (1 block, about 104 bytes): "
        "the server has no response of this conversation yet."
    )


def test_a_chained_request() -> None:
    """What is sent, and what that saves."""
    said = plan(exchanges(20).append(user("next"))).explain()
    assert said == (
        "Chained on R20: sending 1 block, about 103 bytes; "
        "its memory already holds the rest of 41 blocks, about 4.6 kB."
    )


def test_an_edit_names_the_blocks_between_two_records() -> None:
    """One digest tells between which two records something changed."""
    turn = exchanges(3)
    edited = turn.replace(turn[3].id, assistant("edited"))
    words = "because the conversation before or in it was edited since"
    assert plan(edited).explain().splitlines()[1:] == [
        f"Not used: R3, {words} (somewhere in blocks 3 to 6).",
        f"Not used: R2, {words} (somewhere in blocks 3 to 4).",
    ]


def test_a_turn_that_was_cut_short_says_so() -> None:
    """Blocks that are no longer there are not pointed at."""
    said = plan(exchanges(3).take(4)).explain()
    assert "Not used: R3, because the conversation now ends before it (after block 4)." in said


def test_a_fallback_says_what_can_be_done() -> None:
    """Or that nothing needs to be."""
    turn = exchanges(1)
    late = plan(turn, now=NOW + 10_000_000).explain()
    assert late.splitlines() == [
        "Sending everything (2 blocks, about 225 bytes): no stored response matches this history.",
        "Not used: R1, because the server no longer keeps it, or soon will not.",
        "Nothing to do: the whole history is at hand and is sent again.",
    ]
    assert "store=true" in plan(exchanges(1, stored=False)).explain()
    assert "stateless mode" in plan(turn, mode="stateless").explain()


def test_a_conversation_object_is_named() -> None:
    """It holds the rest."""
    turn = respond(Turn([user("a")]), "R1", mode="conversation", conversation_id="conv_7")
    said = plan(turn.append(user("b")), mode="conversation").explain()
    assert "conversation conv_7 already holds the rest" in said


def test_problems_are_told_one_by_one_up_to_a_point() -> None:
    """So are refused candidates; the rest is counted."""
    calls = [tool_call("f", "{}", call_id=f"c{number}") for number in range(SHOWN + 3)]
    lines = plan(Turn(calls)).explain().splitlines()
    assert lines[1] == "Cannot be sent: call c0 (f) has no result; add one or remove the call."
    assert len(lines) == 1 + SHOWN + 1
    assert lines[-1] == "Cannot be sent: 3 more of these."
    turn = exchanges(SHOWN + 2)
    none = set_state(
        turn,
        ConversationState(
            anchors=tuple(replace(record, status="lost") for record in get_state(turn).anchors)
        ),
    )
    assert "Not used: 2 more." in plan(none).explain()


def test_sizes_are_said_as_a_person_would() -> None:
    """Bytes below a thousand, then kilobytes."""
    assert [size(count) for count in (0, 999, 1000, 123_456)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "123.5 kB",
    ]
