"""Tests of plan cards: the summary sentence, and the marks of the messages."""

from kedge.store import RequestRecord
from kedge.turns import Turn, assistant, reasoning, user
from kedge.web.plan_card import mark_blocks
from kedge.web.shapes import format_headline


def test_reasoning_that_was_not_sent_is_marked() -> None:
    """Reasoning that no response proves is marked as left out, neither as sent nor as stored."""
    turn = Turn([user("Hello"), reasoning("A thought"), assistant("Hi"), user("Again")])
    row = RequestRecord(provider="practice", scope="practice", sent_blocks=3, omitted=(1,))
    blocks = mark_blocks(turn.body, row)
    marks = [(mark.kind, mark.sent, mark.omitted) for mark in blocks]
    assert marks == [
        ("user", True, False),
        ("reasoning", False, True),
        ("assistant", True, False),
        ("user", True, False),
    ]


def test_the_card_says_what_the_record_says() -> None:
    """The reason is that of the record, and blocks are marked only if the Turn has as many of them."""
    turn = Turn([user("Hello"), assistant("Hi"), user("Again")])
    row = RequestRecord(
        provider="practice", scope="practice", mode="chained", reason="lost", sent_blocks=2
    )
    blocks = mark_blocks(turn.body, row)
    assert "because the server no longer has it" in format_headline(row)
    assert blocks == ()
