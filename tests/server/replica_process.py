"""One of several servers on a PostgreSQL database; its model answers with a digest of what it saw.

Usage: ``python replica_process.py URL``
"""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

from kedge.cli.serve import run
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    PracticeModel,
    Prompt,
)
from kedge.server.settings import Limits, Settings

LEASE_SECONDS = 3.0
PIECE_SECONDS = 0.01
"""The model pauses between two pieces, so that a server can be killed in between."""


def digest_messages(messages: Iterable[tuple[str, str]]) -> str:
    """Return the digest of a context: the roles and texts of its messages."""
    lines = (f"{role}: {text}" for role, text in messages)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def list_messages(items: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the roles and texts of items."""
    return [(item["role"], item["content"][0]["text"]) for item in items]


class DigestModel(PracticeModel):
    """Answers with the digest of its context, in four pieces."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Write the answer."""
        digest = digest_messages(list_messages(prompt.ask.items))
        yield ItemOpened("text")
        for start in range(0, len(digest), 16):
            yield ItemDelta(digest[start : start + 16])
            await asyncio.sleep(PIECE_SECONDS)
        yield ItemClosed()


if __name__ == "__main__":
    limits = Limits(lease_seconds=LEASE_SECONDS, shutdown_seconds=1.0)
    run(
        Settings(db=sys.argv[1], model=DigestModel(), limits=limits),
        "127.0.0.1",
        0,
        as_json=True,
    )
