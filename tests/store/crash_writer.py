"""Processes that write continuously until they are killed, for the fault tests.

    python crash_writer.py URL KILLS SEED

One process after the other is forked and killed with SIGKILL at a random moment while it writes. After
each, another process opens the store and checks that it is valid and contains every acknowledged write.
The last line contains the number of kills and of acknowledged writes.
"""

import asyncio
import os
import random
import signal
import sys
import time

from kedge import assistant, user
from kedge.store import open_store


async def write_until_killed(url: str, out: int) -> None:
    """Append, edit, create and delete until killed, and report each durable write."""
    async with open_store(url) as store:
        row = await store.create("Written")
        node = (await store.load(row)).node
        for number in range(1_000_000):
            blocks = [user(f"question {number}"), assistant(f"answer {number} " * 20)]
            retained = node.length - 1 if number % 7 == 6 else node.length
            node = await store.append(row, node, blocks, kept=retained, head=node.id)
            os.write(out, f"{row.id} {node.id} {node.length}\n".encode())
            if number % 20 == 19:
                other = await store.create("To be deleted")
                await store.append(other, (await store.load(other)).node, blocks)
                await store.delete(other.id)


async def check_store(url: str, acknowledged: list[str]) -> None:
    """Check that the store opens, is valid, and contains every acknowledged write."""
    async with open_store(url) as store:
        damage = await store.verify()
        assert damage == [], damage
        for line in acknowledged:
            name, node, length = line.split()
            row = await store.conversation(name)
            loaded = await store.load(row, int(node))
            assert len(loaded.blocks) == int(length), line
        if acknowledged:
            name, node, _ = acknowledged[-1].split()
            path = await store.path(await store.conversation(name))
            assert int(node) in [each.id for each in path]


def kill_writer(url: str, rng: random.Random) -> list[str]:
    """Kill a writer at a random moment, and return its acknowledged writes."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        asyncio.run(write_until_killed(url, writing))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        acknowledged = [lines.readline() for _ in range(rng.randint(0, 40))]
        time.sleep(rng.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        acknowledged += lines.readlines()
    os.waitpid(child, 0)
    return [line for line in acknowledged if line.endswith("\n")]


def check_in_child(url: str, acknowledged: list[str]) -> None:
    """Check the store in a separate process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(check_store(url, acknowledged))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def main(url: str, kills: int, seed: int) -> None:
    """Kill writers one after the other, and check the store after each."""
    rng = random.Random(seed)
    acknowledged: list[str] = []
    for _ in range(kills):
        newest = kill_writer(url, rng)
        acknowledged += newest
        check_in_child(url, newest)
    check_in_child(url, acknowledged)
    sys.stdout.write(f"{kills} {len(acknowledged)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
