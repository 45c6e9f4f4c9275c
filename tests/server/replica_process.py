"""Servers on a PostgreSQL database, whose model answers with a digest of its context.

Usage: ``python replica_process.py URL``. Each line on standard input starts another server, which writes
its address and process id as a line of JSON. The servers are forks of this process, so that a test that
kills many of them does not wait for imports.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from kedge.server.app import create_app
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    PracticeModel,
    Prompt,
)
from kedge.server.settings import Limits, Settings
from kedge.server.uvicorn_server import UvicornServer, bind
from kedge.usage.tokens import count_text

LEASE_SECONDS = 5.0
PIECE_SECONDS = 0.01
"""Pause of the model between two deltas, so that a server can be killed in between."""


def digest_messages(messages: Iterable[tuple[str, str]]) -> str:
    """Return the digest of a context: the roles and texts of its messages."""
    lines = (f"{role}: {text}" for role, text in messages)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def list_messages(items: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the roles and texts of message items."""
    return [(item["role"], item["content"][0]["text"]) for item in items]


class DigestModel(PracticeModel):
    """A model that answers with the digest of its context in four deltas."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield the answer."""
        digest = digest_messages(list_messages(prompt.ask.items))
        yield ItemOpened("text")
        for start in range(0, len(digest), 16):
            yield ItemDelta(digest[start : start + 16])
            await asyncio.sleep(PIECE_SECONDS)
        yield ItemClosed()


def serve_replica(url: str) -> None:
    """Serve until the process is killed."""
    limits = Limits(lease_seconds=LEASE_SECONDS, shutdown_seconds=1.0)
    app = create_app(Settings(db=url, model=DigestModel(), limits=limits))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        started = {"base_url": f"http://127.0.0.1:{port}/v1", "pid": os.getpid()}

        def announce() -> None:
            sys.stdout.write(json.dumps(started) + "\n")
            sys.stdout.flush()

        asyncio.run(UvicornServer(app, on_started=announce).serve(sockets=[listener]))


def main() -> None:
    """Fork a server for each line of the input; kill all servers when the input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that were killed leave no zombies
    count_text("hello")
    pids: list[int] = []
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve_replica(sys.argv[1])
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
