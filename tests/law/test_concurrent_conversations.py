"""Concurrent conversations with one faulty request in five; ``make campaign`` runs 200 of them."""

from pathlib import Path

from law.concurrent_conversations import FAULTY_EVERY, ConcurrentRun

CONVERSATIONS, MESSAGES = 5, 4


async def test_concurrent_conversations_with_faulty_requests(tmp_path: Path) -> None:
    """Every answer belongs to its own conversation, and every question is stored once."""
    run = ConcurrentRun(tmp_path, CONVERSATIONS, MESSAGES)
    await run.run()
    assert run.checked >= CONVERSATIONS
    assert run.chained
    assert run.failed
    assert run.faulty >= CONVERSATIONS * MESSAGES // FAULTY_EVERY
