"""Run the tests of mutants, each in a process of its own.

A worker has a copy of the repository, in which it changes the source, and has imported the packages that most tests
need, but nothing of Kedge. For each mutant it forks, so that a run needs neither a new interpreter nor these imports.
"""

import hashlib
import importlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, NoReturn

import pytest

from mutation.measure import HarnessError
from mutation.operators import Mutant

COPIED = ("src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")
"""What the tests need of the repository."""
IMPORTED = (
    *("aiohttp", "hypothesis", "httpx2", "mcp", "openai", "openai.types.responses", "pydantic"),
    *("starlette.applications", "uvicorn", "websockets", "anyio._backends._asyncio"),
)
OPTIONS = (
    *("-x", "-q", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # such packages are imported already
    *("-o", "timeout=120"),  # seconds, after which a test that waits for something fails
)
FIRST_TESTS = 20
"""The most specific tests run first, without the time for collecting the others."""
POLL_SECONDS = 0.05
MAX_MEMORY = 4 << 30
"""A loop that a mutant makes endless may not use up the memory of the machine."""

Status = Literal["caught", "timed out", "survived", "not executed"]


@dataclass(frozen=True, slots=True)
class MutantRun:
    """The tests of a mutant.

    Attributes:
        mutant: The mutant.
        tests: The tests that are run.
        executing: The number of tests that execute the changed code, of which these are selected.
        timeout: The number of seconds after which the run is ended.
        cpu_timeout: The same in seconds of CPU, which a busy machine does not exceed earlier.
    """

    mutant: Mutant
    tests: tuple[str, ...]
    executing: int
    timeout: float
    cpu_timeout: int


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant: its status, and the test that failed."""

    mutant: Mutant
    status: Status
    failed: str = ""


def copy_tree(tree: Path, folder: Path) -> Path:
    """Copy what the tests need of a repository, and return the folder."""
    for name in COPIED:
        source = tree / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def hash_tree(tree: Path, paths: Sequence[str]) -> str:
    """Return a hash of the source, the tests, and what is run of them."""
    digest = hashlib.sha256(repr(paths).encode())
    for folder in ("src", "tests"):
        for path in sorted((tree / folder).rglob("*.py")):
            digest.update(str(path.relative_to(tree)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def prepare_worker(tree: Path, folder: Path, checked: MutantRun | None) -> None:
    """Give this process a copy of the repository, and import what most tests import.

    Args:
        tree: The repository.
        folder: Where the copy is created.
        checked: Tests that have to pass in the copy without the mutant.
    """
    os.chdir(copy_tree(tree, Path(mkdtemp(dir=folder))))
    for name in IMPORTED:
        importlib.import_module(name)
    if "kedge" in sys.modules:
        raise HarnessError(
            "a worker has imported Kedge, so that no change of its source has an effect"
        )
    if checked is not None and (failed := run_tests(Path.cwd(), checked, checked.tests)):
        raise HarnessError(f"a test fails without a mutant: {failed}")


def run_in_worker(run: MutantRun) -> Result:
    """Run the tests of a mutant in the copy of this process."""
    return run_mutant(Path.cwd(), run)


def run_mutant(tree: Path, run: MutantRun) -> Result:
    """Change the source, run the tests up to the first one that fails, and restore the source."""
    if not run.tests:
        return Result(run.mutant, "not executed")
    path = tree / "src" / "kedge" / run.mutant.module
    _write_module(path, run.mutant.apply())
    try:
        failed = run_tests(tree, run, run.tests[:FIRST_TESTS])
        if not failed and len(run.tests) > FIRST_TESTS:
            failed = run_tests(tree, run, run.tests[FIRST_TESTS:])
    except TimeoutError:
        return Result(run.mutant, "timed out")
    finally:
        _write_module(path, run.mutant.source)
    return Result(run.mutant, "caught" if failed else "survived", failed)


def _write_module(path: Path, source: str) -> None:
    """Write a module without a compiled copy of its old text, which may have the same size and time."""
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run_tests(tree: Path, run: MutantRun, tests: Sequence[str]) -> str:
    """Run some of the tests in a fork of this process up to the first failure.

    Returns:
        The test that failed, or an empty text if all of them passed.

    Raises:
        TimeoutError: They took too long.
    """
    log = tree / "tests.log"
    process = os.fork()
    if process == 0:
        _run_in_fork(tree, log, tests, run.cpu_timeout)
    end = time.monotonic() + run.timeout
    while (status := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise TimeoutError
        time.sleep(POLL_SECONDS)
    code = os.waitstatus_to_exitcode(status[1])
    if code == 0:
        return ""
    if code == -signal.SIGXCPU:
        raise TimeoutError
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"exit code {code}"


def _run_in_fork(tree: Path, log: Path, tests: Sequence[str], cpu_timeout: int) -> NoReturn:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_timeout, cpu_timeout + 60))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.path.insert(0, str(tree / "src"))
    code = 1
    try:
        with log.open("w", encoding="utf-8") as sys.stdout, redirect_stderr(sys.stdout):
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            code = int(pytest.main([*OPTIONS, *tests], plugins=[SelectedOrder(tests)]))
    finally:
        os._exit(code)


class SelectedOrder:
    """A plugin of pytest that runs the tests in the order in which they were selected."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._ranks = {name: rank for rank, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests."""
        items.sort(key=lambda item: self._ranks.get(item.nodeid, len(self._ranks)))
