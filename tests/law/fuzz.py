"""``make fuzz N=…``: a long campaign of the law over HTTP, with a progress bar and statistics.

Each round runs a script of 60 actions against two new servers, from its own seed, so that a failed round
can be repeated: ``make fuzz N=60 SEED=<seed>``. Rounds alternate between HTTP, WebSocket, and WebSocket
without stored responses. Each is followed by a conversation with a server whose memory misbehaves
(``law.memory_fuzzer``), with each level of trust, with encrypted reasoning and with images, with a dry run before
every request, by the same script through a chained client or the proxy, whose reports are checked
(``law.program_fuzzer``), and by branches in
conversation objects that several processes continue (``law.object_fuzzer``). Last, stored
conversations are run, and everything that is said about each request is compared with the wire (``law.record_fuzzer``).
Several processes run at the same time.
"""

import logging
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from kedge.memory.evidence import TRUST_LEVELS, Trust
from law.engine_fuzzer import TRANSPORTS, EngineFuzzer, FuzzStats, choose_actions
from law.memory_fuzzer import BEHAVIORS, CONTENTS, LATE_BEHAVIORS, MemoryFuzzer, MemoryStats
from law.memory_fuzzer import TRANSPORTS as MEMORY_TRANSPORTS
from law.object_fuzzer import ObjectFuzzer, ObjectStats
from law.program_fuzzer import DOORS, ProgramFuzzer
from law.record_fuzzer import RecordFuzzer
from law.record_fuzzer import choose_actions as choose_record_actions
from law.record_views import RecordStats

ACTIONS_PER_ROUND = 60
OBJECT_ACTIONS_PER_ROUND = 25
RECORD_ACTIONS_PER_ROUND = 30
MESSAGES_PER_ROUND = 20
UNSUITABLE = frozenset({"report_usage=none", "lone_surrogate"})
"""Faults that are not used with programs: without counts it cannot be recognized that a server does not use what it
lists, and the SDK cannot send a lone surrogate back."""
WORKERS = 4 * (os.cpu_count() or 1)
"""The number of concurrent rounds, which mostly wait for sockets."""


async def run_round(seed: int, stats: FuzzStats) -> None:
    """Run one round."""
    rng = random.Random(seed)
    transport = list(TRANSPORTS.values())[seed % len(TRANSPORTS)]
    async with EngineFuzzer(rng, stats, settings=transport) as player:
        await player.run(choose_actions(rng, ACTIONS_PER_ROUND))


async def run_memory_round(seed: int, stats: MemoryStats) -> int:
    """Run a conversation with a misbehaving server, and return the number of unacceptable wrong answers."""
    rng = random.Random(seed)
    behavior = list(BEHAVIORS)[seed % len(BEHAVIORS)]
    transport = rng.choice(list(MEMORY_TRANSPORTS))
    late = rng.choice(("", *LATE_BEHAVIORS))
    trust = choose_trust(rng)
    fuzzer = MemoryFuzzer(rng, behavior, transport, stats, trust, rng.choice(CONTENTS))
    await fuzzer.run(MESSAGES_PER_ROUND, late=late, edits=rng.random() < 0.5)
    # A stream may show one wrong answer each time a server begins to forget: at its cap, and later.
    in_flight = (bool(late) + behavior.startswith("caps")) if transport != "whole" else 0
    return count_excess(stats, trust, in_flight)


def choose_trust(rng: random.Random) -> Trust:
    """Return a level of trust, mostly the default."""
    return rng.choices(TRUST_LEVELS, (6, 1, 1))[0]


def count_excess(stats: MemoryStats, trust: str, in_flight: int) -> int:
    """Return the number of unacceptable wrong answers, dry runs and missing reports."""
    if trust == "always":  # its answers are shown whatever the server did, and counts only report
        stats.trusted_wrong, stats.wrong, stats.flagged = stats.wrong, 0, 0
        return stats.unreported + stats.contradicted
    in_flight = 0 if trust == "never" else in_flight
    return max(stats.wrong - in_flight, stats.wrong - stats.flagged) + stats.contradicted


def run_program_round(seed: int, stats: MemoryStats, records: RecordStats) -> int:
    """Run a script through a chained client or the proxy; return the number of unacceptable wrong answers."""
    rng = random.Random(seed)
    behaviors = [name for name in BEHAVIORS if UNSUITABLE.isdisjoint(BEHAVIORS[name])]
    behavior, streaming = behaviors[seed % len(behaviors)], rng.random() < 0.5
    late = rng.choice(("", *LATE_BEHAVIORS))
    has_reasoning, trust = rng.random() < 0.3, choose_trust(rng)
    fuzzer = ProgramFuzzer(rng, behavior, DOORS[seed % 2], streaming, trust, has_reasoning, stats)
    fuzzer.records = records
    fuzzer.run(MESSAGES_PER_ROUND, late=late, edits=rng.random() < 0.5)
    # A stream cannot be held back: it may show one wrong answer each time that a server begins to forget.
    in_flight = (bool(late) + bool(BEHAVIORS[behavior])) if streaming else 0
    return count_excess(stats, trust, in_flight)


async def run_object_round(seed: int, stats: ObjectStats) -> None:
    """Run branches in conversation objects."""
    await ObjectFuzzer(random.Random(seed), stats).run(OBJECT_ACTIONS_PER_ROUND)


async def run_record_round(seed: int, stats: RecordStats) -> None:
    """Run a script in stored conversations, and compare everything that is said about its requests."""
    rng = random.Random(seed)
    with TemporaryDirectory() as folder:
        async with RecordFuzzer(rng, str(Path(folder) / "store.db"), stats=stats) as fuzzer:
            await fuzzer.run(choose_record_actions(rng, RECORD_ACTIONS_PER_ROUND))


def run_seed(seed: int) -> tuple[FuzzStats, MemoryStats, ObjectStats, RecordStats, int]:
    """Run the rounds of a seed; return their statistics and the number of unacceptable wrong answers."""
    logging.getLogger().addHandler(logging.NullHandler())  # broken connections are intended here
    tally, memory, program, objects = FuzzStats(), MemoryStats(), MemoryStats(), ObjectStats()
    anyio.run(run_round, seed, tally)
    excess = anyio.run(run_memory_round, seed, memory)
    records = RecordStats()
    excess += run_program_round(seed, program, records)
    add_stats(memory, program)
    anyio.run(run_object_round, seed, objects)
    anyio.run(run_record_round, seed, records)
    return tally, memory, objects, records, excess


def add_stats(total: Any, part: Any) -> None:
    """Add the numbers of a part to a total, and retain the first text."""
    for each in fields(total):
        before, more = getattr(total, each.name), getattr(part, each.name)
        setattr(total, each.name, before or more if isinstance(before, str) else before + more)


def main(count: int, seed: int, workers: int) -> int:
    """Run at least ``count`` actions, and return the exit code: 0 if every request was coherent."""
    from rich.progress import Progress

    tally, memory, objects, excess = FuzzStats(), MemoryStats(), ObjectStats(), 0
    records = RecordStats()
    seeds = range(seed, seed + max(1, -(-count // ACTIONS_PER_ROUND)))
    with (
        Progress(disable=not sys.stderr.isatty()) as progress,
        ProcessPoolExecutor(min(workers, len(seeds))) as pool,
    ):
        task = progress.add_task("playing", total=len(seeds))
        results = zip(seeds, pool.map(run_seed, seeds), strict=True)
        for number, (one, two, three, four, beyond) in results:
            if one.incoherent or one.stale_reasoning:
                print(f"incoherent with seed {number}:\n{one.first_incoherent}")
            if beyond:
                print(f"wrong answers with seed {number}:\n{two.first_wrong}")
            add_stats(tally, one)
            if three.unreported or three.repeated:
                print(f"conversation objects with seed {number}:\n{three.first_wrong}")
            add_stats(memory, two)
            add_stats(objects, three)
            if four.differences:
                print(f"records with seed {number}:\n{four.first_difference}")
            add_stats(records, four)
            excess += beyond
            progress.advance(task)
    best, full = max(tally.best_bytes, 1), max(tally.full_bytes, 1)
    print(f"requests            {tally.requests:>12,}")
    print(f"incoherent          {tally.incoherent:>12,}   (must be 0)")
    print(f"reasoning sent again{tally.reasoning:>12,}")
    print(f"stale reasoning     {tally.stale_reasoning:>12,}   (must be 0)")
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
    print(
        f"wrong, trust=always {memory.trusted_wrong:>12,}   {memory.unreported:,} unreported that a "
        "count shows (must be 0)"
    )
    print(f"dry runs            {memory.contradicted:>12,}   contradicted (must be 0)")
    print(f"wrong beyond that   {excess:>12,}   (must be 0)")
    print(f"conversation objects{objects.requests:>12,}   requests, {objects.answers:,} answers")
    print(f"wrong, reported     {objects.flagged:>12,}")
    print(f"wrong, not reported {objects.unreported:>12,}   (must be 0)")
    print(f"tools run again     {objects.repeated:>12,}   (must be 0)")
    print(f"requests compared   {records.requests:>12,}   {records.plans:,} of them with a dry run")
    print(f"differences         {records.differences:>12,}   (must be 0)")
    is_wrong = objects.unreported or objects.repeated or records.differences or excess
    return 1 if tally.incoherent or tally.stale_reasoning or is_wrong else 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*given, *(600, 0, WORKERS)[len(given) :]))
