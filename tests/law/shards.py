"""``make campaign``: a million edited requests in shards, each of which is recorded when it has found no problem.

A shard is a range of seeds (``law.rounds``). The file of finished shards is part of the repository, one line for each:
a run skips these, continues with the next one until the sum reaches the count, and prints the sum. A shard with a
problem is printed and not recorded, so that the next run repeats it. To start again, delete the file.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.progress import Progress

from law.fuzz import WORKERS, format_report, open_pool, run_seeds
from law.rounds import PROBLEMS

FILE = Path(__file__).with_name("shards.jsonl")
SEEDS = 10
"""The number of seeds of a shard; the first of them runs over sockets."""


def read_shards(path: Path) -> list[dict[str, Any]]:
    """Return the finished shards."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def sum_shards(shards: list[dict[str, Any]]) -> Counter[str]:
    """Return the sums of all counts."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard["counts"])
    return counts


def run_shard(pool: ProcessPoolExecutor, number: int, seeds: int = SEEDS) -> dict[str, Any]:
    """Run the seeds of a shard, and return its line for the file."""
    counts: Counter[str] = Counter()
    seconds = 0.0
    first = number * seeds
    for rounds in run_seeds(pool, range(first, first + seeds)):
        for result in rounds:
            counts.update(result.counts)
            seconds += result.cpu_seconds
    return {
        "shard": number,
        "seeds": f"{first}-{first + seeds - 1}",
        "commit": _read_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu_seconds": round(seconds, 1),
        "counts": dict(sorted(counts.items())),
    }


def _read_commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"],
        cwd=FILE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main(arguments: list[str]) -> int:
    """Run shards until the sum of all finished ones reaches the count; the exit code is 0 if none had a problem."""
    parser = argparse.ArgumentParser(description="Send edited requests in shards.")
    parser.add_argument("count", type=int, help="the number of requests of all shards together")
    parser.add_argument("--file", type=Path, default=FILE, help="the finished shards")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no shard later")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="the seeds of a shard")
    options = parser.parse_args(arguments)
    shards, failed = read_shards(options.file), list[int]()
    end = time.monotonic() + options.seconds
    with Progress(disable=not sys.stderr.isatty()) as progress, open_pool(options.workers) as pool:
        task = progress.add_task("requests", total=options.count)
        while (sums := sum_shards(shards))["requests"] < options.count and time.monotonic() < end:
            progress.update(task, completed=sums["requests"])
            done = {shard["shard"] for shard in shards}.union(failed)
            number = next(n for n in range(len(done) + 1) if n not in done)
            shard = run_shard(pool, number, options.seeds)
            if any(shard["counts"].get(name) for name in PROBLEMS):
                failed.append(number)
                continue
            shards.append(shard)
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(shard) + "\n")
    problems = [f"shard {number} has a problem; see above" for number in failed]
    print("\n".join([format_summary(shards), *problems]))
    return 1 if failed else 0


def format_summary(shards: list[dict[str, Any]]) -> str:
    """Return the sum of the shards, with their dates, commits and duration."""
    seconds = sum(shard["cpu_seconds"] for shard in shards)
    dates = sorted({shard["date"] for shard in shards})
    commits = len({shard["commit"] for shard in shards})
    period = f"{dates[0]} to {dates[-1]}" if dates else "none"
    head = f"{len(shards)} shards, {period}, {commits} commits, {seconds:,.0f} s of CPU"
    return f"{head}\n{format_report(sum_shards(shards))}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
