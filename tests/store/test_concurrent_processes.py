"""Four processes create, append, send, fork and delete in one store, which stays valid.

`KEDGE_OPERATIONS=1500` runs the campaign for about a minute.
"""

import os
from pathlib import Path

from forked import run_forked_async
from kedge.store import open_store

SCRIPT = Path(__file__).parent / "concurrent_process.py"
OPERATIONS = int(os.environ.get("KEDGE_OPERATIONS", "15"))


async def test_four_processes_leave_a_valid_store(lasting_url: str) -> None:
    """`verify` reports nothing after concurrent processes, before and after the search index is updated."""
    async with open_store(lasting_url):
        pass
    arguments = (lasting_url, str(OPERATIONS), *map(str, range(4)))
    await run_forked_async(str(SCRIPT), *arguments, check=True, timeout=None)
    async with open_store(lasting_url) as store:
        assert await store.verify() == []
        await store.search("text")
        assert await store.verify() == []
