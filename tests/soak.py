"""A soak test: conversations and resent histories for a long time, with the memory of each process.

``python tests/soak.py 3600`` runs ``kedge serve`` and ``kedge proxy`` as separate processes, and engines
in this one. Each round runs a stored conversation with an edit and a fork and deletes it, and resends a
history through the proxy, streamed and not. Memory is read after every round. The caches of a process are
full after half of the time; from then on its memory must not grow.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.servers import Process, run_server

from kedge import Conversation, connect
from kedge.engines import Engine
from kedge.store import Store, open_store
from kedge.turns import UserBlock

MIN_ROUNDS = 4
"""Each quarter of the time has at least one round."""
MESSAGES = 6
PADDING = "word " * 4000
"""Long enough to fill the caches after some minutes."""
MAX_GROWTH = 0.03
"""The maximum growth of a process's memory in the last quarter, relative to the quarter before."""
MEGABYTE = 1e6


@dataclass
class Soak:
    """The memory of each process, in bytes, after every round."""

    requests: int = 0
    chained: int = 0
    """Requests that the proxy chained to a stored response."""
    samples: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def add_sample(self, processes: Mapping[str, Process]) -> None:
        """Read the memory of the processes."""
        for name, process in processes.items():
            self.samples.setdefault(name, []).append(process.resident_bytes())

    def get_quarters(self, name: str) -> list[float]:
        """Return the median memory of a process in each quarter of the time, in megabytes."""
        samples = self.samples[name]
        length = len(samples) // 4
        parts = [samples[length * index : length * (index + 1)] for index in range(4)]
        return [statistics.median(part) / MEGABYTE for part in parts]

    def get_growth(self, name: str) -> float:
        """Return the relative growth of a process's memory in the last quarter."""
        *_, before, after = self.get_quarters(name)
        return after / before - 1


@contextmanager
def run_processes(folder: Path) -> Generator[dict[str, Process]]:
    """Run a server and a proxy in front of it."""
    files = ("--db", str(folder / "server.db"), "--store", str(folder / "page.db"))
    with run_server("serve", "--port", "0", *files, "--no-page", "--json") as server:
        forward = ("proxy", "--port", "0", "--upstream", f"http://127.0.0.1:{server.port}/v1")
        with run_server(*forward, "--db", str(folder / "proxy.db"), "--json") as proxy:
            yield {"server": server, "proxy": proxy}


async def run_soak(
    folder: Path,
    seconds: float,
    processes: Mapping[str, Process],
    on_round: Callable[[float], None] | None = None,
) -> Soak:
    """Run rounds for a time, and at least ``MIN_ROUNDS`` of them.

    Args:
        folder: The folder of the store.
        seconds: The duration.
        processes: The server and the proxy.
        on_round: Called with the elapsed seconds after each round.
    """
    soak, started = Soak(), time.monotonic()
    urls = {name: f"http://127.0.0.1:{each.port}/v1" for name, each in processes.items()}
    measured = {**processes, "engine": Process(os.getpid(), 0)}
    async with (
        open_store(f"sqlite:///{folder}/store.db") as store,
        connect(f"responses:{urls['server']}#practice") as engine,
        httpx2.AsyncClient(
            base_url=urls["proxy"],
            headers={"authorization": "Bearer key"},
            timeout=300,
            verify=False,
        ) as http,
    ):
        number, elapsed = 0, 0.0
        while number < MIN_ROUNDS or elapsed < seconds:
            await asyncio.gather(
                hold_conversation(soak, store, engine, number), replay_history(soak, http, number)
            )
            soak.add_sample(measured)
            number += 1
            elapsed = time.monotonic() - started
            if on_round is not None:
                on_round(elapsed)
    return soak


async def hold_conversation(soak: Soak, store: Store, engine: Engine, number: int) -> None:
    """Run a conversation with an edit and a fork, and delete it."""
    conversation = await Conversation.create(engine, store=store, title=f"Round {number}")
    for index in range(MESSAGES):
        await conversation.send(
            f"Line {index} of round {number}: {PADDING}", streaming=index % 2 == 0
        )
        soak.requests += 1
    forked = await conversation.fork()
    question = next(block for block in forked.turn.blocks if isinstance(block, UserBlock))
    await forked.edit(question.id, f"Another line of round {number}")
    await forked.send("What did I say first?")
    soak.requests += 1
    await forked.delete()
    await conversation.delete()


async def replay_history(soak: Soak, http: httpx2.AsyncClient, number: int) -> None:
    """Send a growing history of messages through the proxy, in full with each new message."""
    history: list[Any] = []
    for index in range(MESSAGES):
        text = f"Message {index} of round {number}: {PADDING}"
        history.append({"role": "user", "content": text})
        body = {"model": "practice", "input": history, "stream": index % 2 == 1}
        answer = await http.post("/responses", json=body)
        answer.raise_for_status()
        history += read_output(answer.text)
        soak.requests += 1
        soak.chained += answer.headers["x-kedge-plan"].startswith("chained")


def read_output(text: str) -> list[Any]:
    """Return the output of a response, streamed or not."""
    if text.startswith("{"):
        return json.loads(text)["output"]
    events = [line.removeprefix("data: ") for line in text.splitlines() if "data: {" in line]
    return json.loads(events[-1])["response"]["output"]


def main(seconds: float) -> int:
    """Run a soak test and print the memory; the exit code is 0 if it did not grow."""
    from rich.progress import Progress

    with (
        tempfile.TemporaryDirectory() as folder,
        run_processes(Path(folder)) as processes,
        Progress(disable=not sys.stderr.isatty()) as progress,
    ):
        task = progress.add_task("soaking", total=seconds)
        soak = asyncio.run(
            run_soak(
                Path(folder), seconds, processes, lambda now: progress.update(task, completed=now)
            )
        )
    print(f"{soak.requests:,} requests in {seconds:g} s, {soak.chained:,} chained by the proxy")
    print("memory in MB, by quarter of the time:")
    is_flat = True
    for name in soak.samples:
        growth = soak.get_growth(name)
        is_flat = is_flat and growth <= MAX_GROWTH
        quarters = "  ".join(f"{each:7.1f}" for each in soak.get_quarters(name))
        print(f"{name:10}{quarters}   {growth:+.1%} in the last (at most {MAX_GROWTH:.0%})")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
