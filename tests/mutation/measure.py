"""Run the tests without a mutant, and find those that execute the code of a mutant.

The lines that each test executes decide which tests can fail with a mutant. They are measured once for a state of the
source and the tests, in all workers of pytest, and kept in a folder.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path, PurePath

from coverage import CoverageData

from mutation.operators import Mutant
from mutation.recorder import FILES_VARIABLE, FOLDER_VARIABLE

MAX_TESTS = 400
"""The number of tests that run for one mutant; the most specific ones are selected."""
MAX_SECONDS = 90.0
"""The sum of the durations of these tests, as they were measured."""
MAX_OUTPUT = 5_000
FINISHED = "finished"
IMPORT = ""
"""The place of a test for lines that are executed before one runs."""


class HarnessError(Exception):
    """The tests cannot be run, or fail without a mutant."""


def measure_tests(
    tree: Path, folder: Path, paths: Sequence[str], ignored: Iterable[str], workers: int
) -> "Measurement":
    """Run tests in a copy of the repository, and record the lines that each of them executes.

    A test that fails is run again, alone. If it passes then, it depends on the load of the machine, and is not used.

    Args:
        tree: The copy.
        folder: Where the records are kept; if they exist, nothing is run.
        paths: The files and folders of tests.
        ignored: Those that are left out.
        workers: The number of processes.

    Raises:
        HarnessError: A test fails, or pytest does.
    """
    if (folder / FINISHED).exists():
        return Measurement(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plugin = ["-p", "mutation.recorder"]
    parallel = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    options = [f"--ignore={path}" for path in ignored]
    variables = {
        FOLDER_VARIABLE: str(folder),
        FILES_VARIABLE: str(tree / "src" / "*"),
        "COVERAGE_CORE": "ctrace",  # the only one that distinguishes tests
    }
    output, code = _run_pytest(tree, [*plugin, *parallel, *options, *paths], variables)
    measurement = Measurement(folder)
    failed = measurement.failed
    if code and failed:
        output, code = _run_pytest(tree, failed, {})
    if code:
        raise HarnessError(f"tests fail without a mutant:\n{output[-MAX_OUTPUT:]}")
    (folder / FINISHED).touch()
    return measurement


def _run_pytest(tree: Path, arguments: Sequence[str], variables: dict[str, str]) -> tuple[str, int]:
    """Run pytest in a new process; return its output and its exit code."""
    paths = os.pathsep.join([str(tree / "src"), str(tree / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout, done.returncode


class Measurement:
    """The lines that each test executes, and its duration."""

    def __init__(self, folder: Path) -> None:
        self.failed: list[str] = []
        self._seconds: dict[str, float] = {}
        for path in folder.glob("tests-*.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            self.failed += record["failed"]
            self._seconds |= record["seconds"]
        self._files = sorted(folder.glob("lines-*.sqlite"))
        self._read_lines = cache(self._read_module)

    def get_seconds(self, tests: Iterable[str]) -> float:
        """Return the sum of the durations of tests."""
        return sum(self._seconds[name] for name in tests)

    def find_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the changed code, the most specific ones first.

        Code that runs while a module is imported, such as for a table, has the tests that execute the module.
        """
        lines = self._read_lines(mutant.module)
        names = _collect(lines, mutant.lines) or _collect(lines, mutant.statement_lines)
        if names == {IMPORT}:
            names = set[str]().union(*lines.values())
        passed = names & self._seconds.keys()
        return sort_tests(mutant.module, sorted(passed, key=lambda name: self._seconds[name]))

    def limit_tests(self, names: Sequence[str]) -> list[str]:
        """Return as many of the tests as may run for one mutant, the first of them at least."""
        selected: list[str] = []
        seconds = 0.0
        for name in names[:MAX_TESTS]:
            seconds += self._seconds[name]
            if selected and seconds > MAX_SECONDS:
                break
            selected.append(name)
        return selected

    def _read_module(self, module: str) -> dict[int, set[str]]:
        """Return the tests that execute each line of a module."""
        tests: dict[int, set[str]] = {}
        for path in self._files:
            data = CoverageData(path)
            data.read()
            for file in data.measured_files():
                if file.endswith(f"/src/kedge/{module}"):
                    for line, names in data.contexts_by_lineno(file).items():
                        tests.setdefault(line, set()).update(names)
        return tests


def _collect(lines: dict[int, set[str]], numbers: range) -> set[str]:
    return {name for number in numbers for name in lines.get(number, ())}


def sort_tests(module: str, names: Sequence[str]) -> list[str]:
    """Sort tests by how specific they are for a module: those in files with its name, in its folder, and all others.

    In each of these groups the files take turns, so that a large one does not displace the others.
    """
    path = PurePath(module)
    package = path.parts[0]
    groups: list[dict[str, list[str]]] = [{}, {}, {}]
    for name in names:
        file = name.partition("::")[0]
        folder = PurePath(file).parts[1]
        is_mirrored = folder == package
        has_name = is_mirrored and path.stem in PurePath(file).stem
        group = groups[0 if has_name else 1 if is_mirrored else 2]
        group.setdefault(file, []).append(name)
    return [*chain.from_iterable(_take_turns(group.values()) for group in groups)]


def _take_turns(lists: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in zip_longest(*lists):
        yield from (name for name in row if name is not None)
