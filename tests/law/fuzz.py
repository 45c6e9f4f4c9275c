"""``make fuzz N=…``: random edited requests through every door, with a progress bar and a report.

A seed runs a round for each door (``law.rounds``): scripts with edits of every kind with an engine, also with servers
whose memory misbehaves and in conversation objects, with ``Chat``, a chained client, the proxy, stored conversations
and the API of the page. One seed in ten runs over sockets, the others in memory. A failed round is printed with its
number, and repeated by ``python tests/law/fuzz.py --round NUMBER DOOR``.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.progress import Progress

from law.rounds import PROBLEMS, Round, run_round, run_seed

WORKERS = os.cpu_count() or 1
KINDS = ("door", "mode", "transport", "trust")


@contextmanager
def open_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open processes that run seeds."""
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        yield pool


def run_seeds(pool: ProcessPoolExecutor, seeds: Sequence[int]) -> Iterator[list[Round]]:
    """Run seeds in several processes, and print the problems that they found."""
    for rounds in pool.map(run_seed, seeds):
        for result in rounds:
            if result.has_problem:
                found = {name: result.counts[name] for name in PROBLEMS if result.counts[name]}
                print(f"round {result.seed} {result.door!r}: {found}\n{result.problem}", flush=True)
        yield rounds


def format_report(counts: Counter[str]) -> str:
    """Return the sums as text: requests, what was compared, the problems, and the requests of each kind."""
    lines = [f"{'requests':32}{counts['requests']:>12,}"]
    lines.append(f"{'contexts compared':32}{counts['compared']:>12,}")
    lines += [f"{name:32}{counts[name]:>12,}   (must be 0)" for name in PROBLEMS]
    lines.append(f"{'losses, reported or trusted':32}{counts['accepted']:>12,}")
    for kind in KINDS:
        names = sorted(name for name in counts if name.startswith(f"{kind} "))
        lines += [f"{name:32}{counts[name]:>12,}" for name in names]
    sent, best, full = (counts[f"{name} bytes"] for name in ("sent", "best", "full"))
    if best and full:
        lines.append(f"bytes sent: {sent / best:.4f}x of the best plan, {sent / full:.4f}x of all")
    return "\n".join(lines)


def main(count: int, seed: int, workers: int) -> int:
    """Send at least ``count`` requests, and return the exit code: 0 if no problem was found."""
    counts: Counter[str] = Counter()
    with Progress(disable=not sys.stderr.isatty()) as progress, open_pool(workers) as pool:
        task = progress.add_task("requests", total=count)
        while counts["requests"] < count:
            seeds = range(seed, seed + workers)
            seed += workers
            for rounds in run_seeds(pool, seeds):
                for result in rounds:
                    counts.update(result.counts)
                progress.update(task, completed=counts["requests"])
    print(format_report(counts))
    return 1 if any(counts[name] for name in PROBLEMS) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--round"]:
        repeated = run_round(int(sys.argv[2]), sys.argv[3])
        print(format_report(repeated.counts), repeated.problem, sep="\n")
        sys.exit(repeated.has_problem)
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*given, *(600, 0, WORKERS)[len(given) :]))
