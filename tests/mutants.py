"""``make campaign ONLY=mutants``: apply the mutants of ``mutants.toml`` to copies of the tree, and run their tests.

A mutant is caught if a test fails, or does not end in time. The others survive: they are printed, and either a test
lacks an assertion, or the change makes no difference and the mutant is replaced. ``python tests/mutants.py TEXT…``
runs only those whose file or change contains one of the texts.
"""

import importlib
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import NoReturn

import pytest
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
TIMEOUT = 900
POLL_SECONDS = 0.05
OPTIONS = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Some packages whose assertions pytest could rewrite are imported already."""
IMPORTED = (
    *("aiohttp", "hypothesis", "httpx2", "mcp", "openai", "openai.types.responses", "pydantic"),
    *("starlette.applications", "uvicorn", "websockets", "anyio._backends._asyncio"),
)
COPIED = ("src", "tests", "docs", "examples", "pyproject.toml", "README.md")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the source, and the test files that must fail with it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        """Return the changed source."""
        return source.replace(self.old, self.new)

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old} -> {new or 'nothing'}"


def read_mutants() -> Iterator[Mutant]:
    """Yield all mutants."""
    found = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))
    for group in found["group"]:
        for old, new in group["mutants"]:
            yield Mutant(group["file"], old, new, tuple(group["tests"]))


def run_mutant(tree: Path, mutant: Mutant) -> str:
    """Run the tests of a mutant in a copy of the tree; return how it was caught, or an empty text."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    _write(path, mutant.apply(source))
    try:
        return run_tests(tree, mutant.tests)
    finally:
        _write(path, source)


def _write(path: Path, source: str) -> None:
    """Write a module without a compiled copy of its old text, which may have the same size and time."""
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run_tests(tree: Path, tests: tuple[str, ...]) -> str:
    """Run test files up to the first failure; return its name, or an empty text if all passed.

    They run in a fork of this process, which has imported the packages that most tests import, and nothing of Kedge.
    """
    log = tree / "tests.log"
    process = os.fork()
    if process == 0:
        _run_in_fork(tree, log, tests)
    end = time.monotonic() + TIMEOUT
    while (status := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "no end"
        time.sleep(POLL_SECONDS)
    if status[1] == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line.partition(" - ")[0] for line in lines if re.match(r"(FAILED|ERROR) \S", line)]
    return failed[0] if failed else f"exit code {os.waitstatus_to_exitcode(status[1])}"


def _run_in_fork(tree: Path, log: Path, tests: tuple[str, ...]) -> NoReturn:
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.path.insert(0, str(tree / "src"))
    code = 1
    try:
        with log.open("w", encoding="utf-8") as sys.stdout, redirect_stderr(sys.stdout):
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *OPTIONS, *tests]))
    finally:
        os._exit(code)


def copy_tree(folder: Path) -> Path:
    """Copy what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def prepare_worker(folder: str) -> None:
    """Give this process a tree of its own, and import what most tests import."""
    os.chdir(copy_tree(Path(mkdtemp(dir=folder))))
    for name in IMPORTED:
        importlib.import_module(name)


def run_in_worker(mutant: Mutant) -> str:
    """Run a mutant in the tree of this process."""
    return run_mutant(Path.cwd(), mutant)


def main(*texts: str) -> int:
    """Run the mutants; the exit code is 0 if all were caught."""
    chosen = texts or ("",)
    mutants = [each for each in read_mutants() if any(text in str(each) for text in chosen)]
    survivors: list[Mutant] = []
    with (
        TemporaryDirectory() as folder,
        Progress(disable=not sys.stderr.isatty()) as progress,
        ProcessPoolExecutor(os.cpu_count(), initializer=prepare_worker, initargs=(folder,)) as pool,
    ):
        results = zip(mutants, pool.map(run_in_worker, mutants), strict=True)
        for mutant, caught in progress.track(results, len(mutants), description="mutants"):
            survivors += [] if caught else [mutant]
            print(f"{caught or 'SURVIVED'}  {mutant}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
