"""``make fuzz N=…``: a long campaign of the law over HTTP, with a progress bar and a tally.

Each round plays a script of 60 actions against two fresh servers, from its own seed, so that a round
that fails can be played again: ``make fuzz N=60 SEED=<seed>``. Rounds take turns over HTTP, over
WebSocket, and over WebSocket with nothing stored. Each is followed by a conversation with a server whose
memory misbehaves (``law.memory_fuzzer``).
"""

import logging
import random
import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from law.engine_fuzzer import TRANSPORTS, EngineFuzzer, FuzzStats, choose_actions
from law.memory_fuzzer import BEHAVIORS, LATE_BEHAVIORS, MemoryFuzzer, MemoryStats
from law.memory_fuzzer import TRANSPORTS as MEMORY_TRANSPORTS

ACTIONS_PER_ROUND = 60
MESSAGES_PER_ROUND = 20


async def run_round(seed: int, stats: FuzzStats) -> None:
    """Play one round."""
    rng = random.Random(seed)
    world = list(TRANSPORTS.values())[seed % len(TRANSPORTS)]
    async with EngineFuzzer(rng, stats, settings=world) as player:
        await player.run(choose_actions(rng, ACTIONS_PER_ROUND))


async def run_memory_round(seed: int, stats: MemoryStats) -> int:
    """Play a conversation with a misbehaving server; return how many wrong answers are too many."""
    rng = random.Random(seed)
    behavior = list(BEHAVIORS)[seed % len(BEHAVIORS)]
    transport = rng.choice(list(MEMORY_TRANSPORTS))
    late = rng.choice(("", *LATE_BEHAVIORS))
    before, flagged = stats.wrong, stats.flagged
    fuzzer = MemoryFuzzer(rng, behavior, transport, stats)
    await fuzzer.run(MESSAGES_PER_ROUND, late=late, edits=rng.random() < 0.5)
    # A server may show one answer in flight each time it begins to forget: at its cap, and later.
    in_flight = (bool(late) + behavior.startswith("caps")) if transport != "whole" else 0
    unflagged = (stats.wrong - before) - (stats.flagged - flagged)
    return max(stats.wrong - before - in_flight, unflagged)


def main(count: int, seed: int) -> int:
    """Play at least ``count`` actions; the exit code tells whether every request was coherent."""
    from rich.progress import Progress

    logging.getLogger().addHandler(logging.NullHandler())  # broken connections are on purpose here
    tally, memory, excess = FuzzStats(), MemoryStats(), 0
    rounds = max(1, -(-count // ACTIONS_PER_ROUND))
    with Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("playing", total=rounds)
        for number in range(rounds):
            before = tally.incoherent
            anyio.run(run_round, seed + number, tally)
            if tally.incoherent > before:
                print(f"incoherent with seed {seed + number}:\n{tally.first_incoherent}")
            if found := anyio.run(run_memory_round, seed + number, memory):
                excess += found
                print(f"wrong answers with seed {seed + number}:\n{memory.first_wrong}")
            progress.advance(task)
    best, full = max(tally.best_bytes, 1), max(tally.full_bytes, 1)
    print(f"requests            {tally.requests:>12,}")
    print(f"incoherent          {tally.incoherent:>12,}   (must be 0)")
    print(f"rejected            {tally.rejected:>12,}")
    print(f"healed              {tally.healed:>12,}")
    print(f"failed with Turn    {tally.failed:>12,}")
    print(
        f"bytes sent          {tally.sent_bytes:>12,}   {tally.sent_bytes / best:.4f}x of the best plan"
    )
    print(f"bytes, best plan    {tally.best_bytes:>12,}")
    print(
        f"bytes, always full  {tally.full_bytes:>12,}   {tally.sent_bytes / full:.4f}x of them sent"
    )
    print(f"misbehaving servers {memory.requests:>12,}   requests, {memory.chained:,} chained")
    print(f"wrong, in flight    {memory.wrong:>12,}   {memory.flagged:,} flagged")
    print(f"wrong beyond that   {excess:>12,}   (must be 0)")
    return 1 if tally.incoherent or excess else 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]] or [600]
    sys.exit(main(given[0], given[1] if len(given) > 1 else 0))
