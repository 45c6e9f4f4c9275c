"""``make campaign``: long runs of the random and destructive tests, with a progress bar and a JSON report.

Each step is a test or a script of this repository with a larger count; ``SCALE`` multiplies all counts, so
that ``SCALE=0.01`` is a quick check of the campaign itself. The report states for each step what was run,
how long it took and whether it passed; the output of a failed step is in the report.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[1]
OUTPUT_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the campaign.

    Attributes:
        name: What is tested.
        command: Arguments of the Python interpreter; ``{count}`` is replaced.
        count: The number of runs, at scale 1.
        variable: The environment variable that sets the count of a test, if it is one.
        shows_progress: Whether it shows its own progress bar.
    """

    name: str
    command: tuple[str, ...]
    count: int
    variable: str = ""
    shows_progress: bool = False


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
STEPS = (
    Step(
        "edited requests through every door",
        ("tests/law/shards.py", "{count}"),
        1_000_000,
        shows_progress=True,
    ),
    Step(
        "mutants of the source",
        ("tests/mutants.py", "--count", "{count}"),
        1_000,
        shows_progress=True,
    ),
    Step("planning laws, random examples", (*PYTEST, "tests/planning/test_laws.py"), 1),
    Step(
        "other property tests, random examples",
        (*PYTEST, "tests/turns", "tests/planning", "tests/events", "tests/server/practice_model"),
        1,
    ),
    Step("transcripts cut at every byte", (*PYTEST, "tests/events", "-k", "cut_at_any_byte"), 1),
    Step(
        "damaged chat states",
        (*PYTEST, "tests/conversation/chat/test_state.py"),
        100_000,
        "KEDGE_MUTATIONS",
    ),
    Step(
        "kill -9 of a store's writer", (*PYTEST, "tests/store/test_faults.py"), 200, "KEDGE_KILLS"
    ),
    Step(
        "kill -9 of an engine's process",
        (*PYTEST, "tests/conversation/test_crash.py"),
        200,
        "KEDGE_KILLS",
    ),
    Step("kill -9 of a server", (*PYTEST, "tests/server/test_crash.py"), 100, "KEDGE_KILLS"),
    Step(
        "four processes on one store",
        (*PYTEST, "tests/store/test_concurrent_processes.py"),
        2_000,
        "KEDGE_OPERATIONS",
    ),
    Step(
        "writers with skewed clocks",
        (*PYTEST, "tests/store/test_skewed_clocks.py"),
        200,
        "KEDGE_SKEWS",
    ),
    Step(
        "outages of PostgreSQL under twenty senders",
        (*PYTEST, "tests/store/test_outages.py"),
        20,
        "KEDGE_OUTAGES",
    ),
    Step(
        "kill -9 of servers on one PostgreSQL",
        (*PYTEST, "tests/server/test_replica_kills.py"),
        100,
        "KEDGE_REPLICA_KILLS",
    ),
    Step(
        "concurrent conversations, one request in five faulty",
        ("tests/law/concurrent_conversations.py", "{count}"),
        200,
    ),
    Step("fuzzing of every route", (*PYTEST, "tests/web/test_openapi.py", "tests/server"), 1),
    Step("soak: seconds with flat memory", ("tests/soak.py", "{count}"), 3_600),
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    name: str
    count: int
    passed: bool
    seconds: float
    output: str


def run_step(step: Step, scale: float) -> StepResult:
    """Run one step in a separate process."""
    count = max(1, round(step.count * scale))
    command = [argument.format(count=count) for argument in step.command]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "thorough" if scale >= 1 else "random"}
    if step.variable:
        environment[step.variable] = str(count)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=None if step.shows_progress else subprocess.PIPE,
        text=True,
        check=False,
    )
    passed = done.returncode == 0
    output = done.stdout if passed else done.stdout + (done.stderr or "")
    seconds = round(time.monotonic() - started, 1)
    return StepResult(step.name, count, passed, seconds, output[-OUTPUT_LIMIT:])


def main(arguments: list[str]) -> int:
    """Run the campaign; the exit code is 0 if every step passed."""
    parser = argparse.ArgumentParser(description="Run the long tests.")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all counts")
    parser.add_argument("--only", default="", help="run only the steps whose name contains this")
    parser.add_argument("--report", type=Path, default=ROOT / "campaign.json")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if options.only in step.name]
    if not steps:
        parser.error(
            f"no step contains {options.only!r}; there are: {', '.join(s.name for s in STEPS)}"
        )
    results: list[StepResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.name)
            if step.shows_progress:
                progress.stop()
            results.append(run_step(step, options.scale))
            progress.start()
            print(f"{'passed' if results[-1].passed else 'FAILED'}  {step.name}", flush=True)
            progress.advance(task)
            options.report.write_text(json.dumps([asdict(each) for each in results], indent=2))
    print(f"report: {options.report}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
