"""Local ids are unique and sorted by time, in one thread, in many, and after a fork."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from kedge.turns import blocks, new_id


def test_threads_create_unique_ids() -> None:
    """Each thread gets its ids in order, and no two threads get the same id."""
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: [new_id("blk") for _ in range(5_000)], range(8)))
    assert len({id_ for run in runs for id_ in run}) == 8 * 5_000
    assert all(one < other for run in runs for one, other in pairwise(run))


@pytest.mark.parametrize("step", [0, -1_000_000_000], ids=["stands still", "goes back"])
def test_ids_stay_unique_and_ordered_if_the_clock_does_not_advance(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are unique and ordered even if the clock stops or goes back."""
    clock = blocks.time.time_ns()

    def time_ns() -> int:
        nonlocal clock
        clock += step
        return clock

    monkeypatch.setattr(blocks.time, "time_ns", time_ns)
    ids = [new_id("blk") for _ in range(100)]
    assert sorted(set(ids)) == ids


def test_an_id_starts_with_its_prefix() -> None:
    """An id has its prefix, sixteen digits of time and ten random digits."""
    assert re.fullmatch(r"turn_[0-9a-f]{26}", new_id("turn"))


def test_the_ends_of_ids_differ() -> None:
    """Lists show only the last six digits of an id, so these differ within a process."""
    assert len({new_id("conv")[-6:] for _ in range(10)}) == 10


FORK_SCRIPT = """
import os
from kedge.turns import blocks
blocks.new_id("blk")
blocks._id_lock.acquire()  # some other thread is making an id just now
if child := os.fork():
    os.waitpid(child, 0)
print(blocks._process_bits, flush=True)
if not child:
    blocks.new_id("blk")  # would hang, had the child inherited a held lock
    print("made", flush=True)
    os._exit(0)
"""


def test_forked_process_creates_different_ids() -> None:
    """After a fork the two processes have the same clock tick but different random bits."""
    command = [sys.executable, "-c", FORK_SCRIPT]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    child, marker, parent = printed.stdout.split()
    assert marker == "made"
    assert child != parent
