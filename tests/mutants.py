"""Generate mutants of the functions that decide, and run the tests that execute them.

    python tests/mutants.py --count 200 --seed 1 --only planning

The mutants are drawn at random from all that the operators generate (``tests/mutation/operators.py``). Those that no
test notices are printed with their difference: a test lacks an assertion, or the change makes no difference. They are a
figure and do not fail the run; it fails if tests fail without a mutant.
"""

import argparse
import difflib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import Progress

from mutation.measure import HarnessError, measure_tests
from mutation.operators import Mutant, generate_mutants
from mutation.run import (
    MutantRun,
    Result,
    copy_tree,
    hash_tree,
    prepare_worker,
    run_in_worker,
)
from mutation.targets import PROCESS_TESTS, TARGETS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "mutants"
MIN_TIMEOUT = 240.0
TIMEOUT_FACTOR = 10.0
"""Tests may take this many times as long as without a mutant, and the minimum more."""
MIN_CPU_TIMEOUT = 60
CPU_TIMEOUT_FACTOR = 4
MAX_SECONDS = 300.0
"""How long tests that were not measured are expected to take."""


def list_mutants(tree: Path, *only: str) -> list[Mutant]:
    """Return the mutants of a repository, or those whose address contains one of some texts."""
    source = tree / "src" / "kedge"
    modules = [module for target in TARGETS for module in target.list_modules(source)]
    texts = only or ("",)
    files = [text.partition("::")[0] for text in texts if "::" in text]
    if len(files) == len(texts):
        modules = [module for module in modules if any(file in module for file in files)]
    return [
        mutant
        for module in modules
        for mutant in generate_mutants(module, (source / module).read_text(encoding="utf-8"))
        if any(_is_addressed(mutant, text) for text in texts)
    ]


def _is_addressed(mutant: Mutant, text: str) -> bool:
    """Return whether an address contains a text; one with a number has to end with it."""
    address = str(mutant)
    return address.endswith(text) if "#" in text else text in address


def draw_mutants(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a number of different mutants at random, in the order of the source."""
    shuffled = random.Random(seed).sample(range(len(mutants)), len(mutants))
    drawn: list[int] = []
    for index in shuffled:
        if len(drawn) == count:
            break
        if mutants[index].is_valid():
            drawn.append(index)
    return [mutants[index] for index in sorted(drawn)]


def list_test_folders(mutants: Sequence[Mutant]) -> list[str]:
    """Return the folders of the tests that are measured for these mutants."""
    packages = {mutant.module.partition("/")[0] for mutant in mutants}
    chosen = [target for target in TARGETS if target.package in packages]
    return sorted({folder for target in chosen for folder in target.list_test_folders()})


def format_diff(mutant: Mutant) -> str:
    """Return the lines that a mutant removes and adds."""
    before = mutant.source.splitlines()
    after = mutant.apply().splitlines()
    lines = [*difflib.unified_diff(before, after, lineterm="", n=0)][2:]
    return "\n".join(f"    {line}" for line in lines if not line.startswith("@@"))


@contextmanager
def share_database() -> Iterator[None]:
    """Start one PostgreSQL server for all processes that run tests."""
    from postgresql import URL_VARIABLE, provide_server_url

    with provide_server_url() as url:
        os.environ[URL_VARIABLE] = url
        yield


def plan_runs(
    tree: Path, mutants: Sequence[Mutant], tests: Sequence[str], workers: int
) -> list[MutantRun]:
    """Select the tests of each mutant.

    Args:
        tree: The repository.
        mutants: The mutants.
        tests: The tests of all mutants. Without them, tests are measured, unless these have been measured already.
        workers: The number of processes.
    """
    if tests:
        return [plan_run(mutant, tests, len(tests), MAX_SECONDS) for mutant in mutants]
    paths = list_test_folders(mutants)
    records = FOLDER / hash_tree(tree, paths)
    measurement = measure_tests(tree, records, paths, PROCESS_TESTS, workers)
    runs: list[MutantRun] = []
    for mutant in mutants:
        executing = measurement.find_tests(mutant)
        selected = measurement.limit_tests(executing)
        seconds = measurement.get_seconds(selected)
        runs.append(plan_run(mutant, selected, len(executing), seconds))
    return runs


def plan_run(mutant: Mutant, tests: Sequence[str], executing: int, seconds: float) -> MutantRun:
    """Return the run of tests, of all that execute a mutant, that take this number of seconds without it."""
    return MutantRun(
        mutant,
        tuple(tests),
        executing,
        timeout=MIN_TIMEOUT + TIMEOUT_FACTOR * seconds,
        cpu_timeout=MIN_CPU_TIMEOUT + round(CPU_TIMEOUT_FACTOR * seconds),
    )


def run_all(tree: Path, runs: Sequence[MutantRun], workers: int) -> Iterator[Result]:
    """Run the tests of all mutants in copies of a repository, and yield the results in order.

    Raises:
        HarnessError: A worker cannot run tests that pass without a mutant.
    """
    checked = next((run for run in runs if run.tests), None)
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            workers,
            mp_context=get_context("spawn"),  # a fork of this process would have Kedge already
            initializer=prepare_worker,
            initargs=(tree, Path(folder), checked),
        ) as pool,
    ):
        try:
            yield from pool.map(run_in_worker, runs)
        except BrokenProcessPool as error:
            raise HarnessError("a worker cannot run tests that pass without a mutant") from error


def report_result(result: Result, run: MutantRun) -> dict[str, Any]:
    """Return the entry of the report for a mutant."""
    mutant = result.mutant
    return {
        "mutant": str(mutant),
        "status": result.status,
        "place": f"src/kedge/{mutant.module}:{mutant.lines.start}",
        "diff": format_diff(mutant),
        "failed": result.failed,
        "tests": len(run.tests),
        "executing": run.executing,
    }


def run_mutants(
    tree: Path, mutants: Sequence[Mutant], tests: Sequence[str], workers: int
) -> Iterator[dict[str, Any]]:
    """Run mutants, with a progress bar on a terminal, and yield their entries of the report.

    Raises:
        HarnessError: The tests cannot be run, or fail without a mutant.
    """
    with share_database(), Progress(disable=not sys.stderr.isatty()) as progress:
        runs = plan_runs(tree, mutants, tests, workers)
        results = zip(run_all(tree, runs, workers), runs, strict=True)
        for result, run in progress.track(results, len(runs), description="mutants"):
            yield report_result(result, run)


def main(arguments: Sequence[str]) -> int:
    """Run the mutants; the exit code is 1 only if the tests cannot be run, or fail without a mutant."""
    parser = argparse.ArgumentParser(description="Count the mutants that the tests notice.")
    parser.add_argument("--count", type=int, default=200, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the random choice")
    parser.add_argument(
        "--only", nargs="+", default=(), help="only mutants whose address contains one of these"
    )
    parser.add_argument(
        "--tests", nargs="+", default=(), help="run these tests, whatever they execute"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, default=FOLDER / "report.json")
    options = parser.parse_args(arguments)
    os.environ.pop("HYPOTHESIS_PROFILE", None)  # the campaign asks for more examples
    entries: list[dict[str, Any]] = []
    # The repository may change meanwhile; all workers copy what it is now.
    with TemporaryDirectory() as folder:
        tree = copy_tree(ROOT, Path(folder))
        mutants = draw_mutants(list_mutants(tree, *options.only), options.count, options.seed)
        if not mutants:
            parser.error(f"no mutant contains any of {options.only}")
        try:
            for entry in run_mutants(tree, mutants, options.tests, options.workers):
                print(f"{entry['status']:<12}  {entry['mutant']}", flush=True)
                entries.append(entry)
        except HarnessError as error:
            print(error)
            return 1
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    print_summary(entries)
    return 0


def print_summary(entries: Sequence[dict[str, Any]]) -> None:
    """Print the mutants that no test noticed, and the number of each status."""
    for entry in entries:
        if entry["status"] in ("survived", "not executed"):
            tests = f"{entry['tests']} of {entry['executing']} tests that execute it"
            print(f"\n{entry['place']}: {entry['status']} {entry['mutant']}, {tests}")
            print(entry["diff"])
    counts = Counter(entry["status"] for entry in entries)
    noticed = counts["caught"] + counts["timed out"]
    print(
        f"\n{noticed} of {len(entries)} mutants were noticed ({counts['timed out']} by a time-out); "
        f"{counts['survived']} survived, and no test executes {counts['not executed']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
