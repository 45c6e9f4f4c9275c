"""Tests of plan cards: the summary sentence, and the marks of the messages."""

from for_each import for_each
from kedge.store import RequestRecord
from kedge.turns import Turn, assistant, reasoning, user
from kedge.web.plan_card import describe_request_size, mark_blocks
from kedge.web.shapes import format_headline


@for_each(
    ("anchor", "sent", "saved", "sentence"),
    [
        ("", 1, 0, "Sent 1 message."),
        ("", 3, 0, "Sent all 3 messages."),
        ("resp_1", 1, 2, "Sent 1 new message; the server already had the other 2."),
        ("resp_1", 0, 4, "Sent no new message; the server already had all 4."),
        ("resp_1", 2, 0, "Sent 2 new messages."),
    ],
)
def test_summary_counts_blocks(anchor: str, sent: int, saved: int, sentence: str) -> None:
    """The summary counts new and already stored messages, with the singular for one message."""
    row = RequestRecord(
        provider="practice", scope="", anchor=anchor, sent_blocks=sent, saved_blocks=saved
    )
    assert describe_request_size(row) == sentence


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
