"""Recovery after SIGKILL of a process that uses a conversation; ``make campaign`` kills more of them."""

import os
from pathlib import Path

from forked import run_forked_async
from kedge.testing import serve

SENDER = Path(__file__).parent / "crash_sender.py"
KILLS = int(os.environ.get("KEDGE_KILLS", "2"))


async def test_killed_processes_lose_and_repeat_no_question(tmp_path: Path) -> None:
    """The next process continues after the last stored node, and answers have the complete context."""
    url = f"sqlite:///{tmp_path}/killed.db"
    with serve() as server:
        done = await run_forked_async(
            str(SENDER), url, server.base_url, str(KILLS), "7", check=True, timeout=None
        )
    assert int(done.stdout.split()[0]) == KILLS
