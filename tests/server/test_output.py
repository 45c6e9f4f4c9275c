"""Output items: what a model chose for them is kept where clients can send it back."""

import pytest

from kedge.server.models import Opened
from kedge.server.output import Writer

KIMI = "functions.get_weather:0"


@pytest.mark.parametrize(
    ("calls", "chosen", "kept"),
    [
        ("call", "call_1", True),
        ("call", KIMI, True),
        ("call", "c" * 64, True),
        ("call", "c" * 65, False),
        ("call", "", False),
        ("toolu", "toolu_1", True),
        ("toolu", KIMI, False),
        ("toolu", "", False),
    ],
)
def test_a_call_has_an_id_that_its_client_can_answer_to(
    calls: str, chosen: str, kept: bool
) -> None:
    """One that the checks of this server would refuse is replaced by one of our own."""
    writer = Writer("0a1b", 3, calls=calls)
    writer.take(Opened("function_call", "get_weather", chosen))
    (item,) = writer.items
    assert (item["call_id"] == chosen) is kept
    assert item["call_id"].startswith(chosen if kept else f"{calls}_0a1b")
