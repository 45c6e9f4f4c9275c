"""Run one peer in the environment in which it is installed.

    python driver.py NAME BASE_URL FOLDER [--chain]

Reads operations as lines of JSON from standard input, and answers each with a line: the CPU seconds it took,
the text of the answer and the error that reached the program, if any.
"""

import asyncio
import importlib
import json
import sys
import time
from typing import Any

from history import Peer


async def apply(peer: Peer, operation: dict[str, Any]) -> dict[str, Any]:
    """Apply an operation to a peer."""
    name = operation.pop("op")
    start = time.process_time()
    text, error = "", ""
    try:
        text = await getattr(peer, name)(**operation)
    except Exception as exc:  # noqa: BLE001 - counted as an error that reached the program
        error = f"{type(exc).__name__}: {exc}"
    return {"cpu": time.process_time() - start, "text": text, "error": error}


async def run(name: str, base_url: str, folder: str, chained: bool) -> None:
    """Open a peer and apply the operations of standard input."""
    module = importlib.import_module(f"peer_{name}")
    peer: Peer = module.PEER(base_url, chained, folder)
    await peer.open()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answer = await apply(peer, json.loads(line))
        print(json.dumps(answer), flush=True)
    await peer.close()


if __name__ == "__main__":
    peer_name, url, files = sys.argv[1:4]
    asyncio.run(run(peer_name, url, files, "--chain" in sys.argv))
