"""Conversations at the same time, with one request in five faulty; ``make campaign`` holds 200 of them."""

from pathlib import Path

from law.concurrent_conversations import FAULTY_EVERY, ConcurrentRun

CONVERSATIONS, MESSAGES = 5, 4


async def test_conversations_at_the_same_time_with_faulty_requests(tmp_path: Path) -> None:
    """Every answer is to its own conversation, and every question is stored once."""
    run = ConcurrentRun(tmp_path, CONVERSATIONS, MESSAGES)
    await run.run()
    assert run.checked >= CONVERSATIONS
    assert run.chained
    assert run.failed
    assert run.faulty >= CONVERSATIONS * MESSAGES // FAULTY_EVERY
