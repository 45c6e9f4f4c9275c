"""Tests of plan cards: the summary sentence, and the marks of the messages."""

import pytest

from kedge.planning import plan_request
from kedge.store import ResponseRow
from kedge.turns import Turn, assistant, reasoning, user
from kedge.web.plan_card import build_plan_card, summarize_request


@pytest.mark.parametrize(
    ("anchor", "sent", "saved", "sentence"),
    [
        ("", 1, 0, "Sent 1 message."),
        ("", 3, 0, "Sent all 3 messages."),
        ("resp_1", 1, 2, "Sent 1 new message; the server already had the other 2."),
        ("resp_1", 0, 4, "Sent no new message; the server already had all 4."),
        ("resp_1", 2, 0, "Sent 2 new messages."),
    ],
)
def test_summary_counts_sent_and_stored_blocks(
    anchor: str, sent: int, saved: int, sentence: str
) -> None:
    """The summary counts new and already stored messages, with the singular for one message."""
    row = ResponseRow(
        provider="practice", scope="", anchor=anchor, sent_blocks=sent, saved_blocks=saved
    )
    assert summarize_request(row) == sentence


def test_reasoning_that_was_not_sent_is_marked() -> None:
    """Reasoning that no response proves is marked as left out, neither as sent nor as stored."""
    turn = Turn([user("Hello"), reasoning("A thought"), assistant("Hi"), user("Again")])
    row = ResponseRow(provider="practice", scope="practice", sent_blocks=4)
    card = build_plan_card(plan_request(turn, scope="practice", now=0.0), row, turn, [])
    marks = [(mark.kind, mark.sent, mark.omitted) for mark in card.blocks]
    assert marks == [
        ("user", True, False),
        ("reasoning", False, True),
        ("assistant", True, False),
        ("user", True, False),
    ]
