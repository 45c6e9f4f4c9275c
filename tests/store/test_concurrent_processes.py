"""Four processes create, append, send, fork and delete in one store, which stays valid.

`KEDGE_OPERATIONS=1500` runs the campaign for about a minute.
"""

import os
import sys
from pathlib import Path

import anyio

from kedge.store import open_store

SCRIPT = Path(__file__).parent / "concurrent_process.py"
OPERATIONS = int(os.environ.get("KEDGE_OPERATIONS", "15"))


async def test_four_processes_leave_a_valid_store(lasting_url: str) -> None:
    """`verify` reports nothing after concurrent processes, before and after the search index is updated."""
    async with open_store(lasting_url):
        pass
    command = [sys.executable, str(SCRIPT), lasting_url, str(OPERATIONS), *map(str, range(4))]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr.decode()
    async with open_store(lasting_url) as store:
        assert await store.verify() == []
        await store.search("text")
        assert await store.verify() == []
