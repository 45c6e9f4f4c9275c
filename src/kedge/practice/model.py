"""The practice model itself: from what was asked to an answer."""

from kedge.practice.context import last_said, messages
from kedge.practice.values import Ask, Reply, Say


def answer(ask: Ask) -> Reply:
    """Answer one request: pure, deterministic, instant."""
    seen = len(messages(ask.items))
    said = last_said(ask.items)
    return Reply((Say(f"You said: {said} (I can see {seen} messages.)"),))
