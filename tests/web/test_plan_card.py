"""Tests of the summary sentence of a plan card."""

import pytest

from kedge.store import ResponseRow
from kedge.web.plan_card import summarize_request


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
