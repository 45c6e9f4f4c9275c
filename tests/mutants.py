"""``make campaign ONLY=mutants``: apply the mutants of ``mutants.toml`` to a copy of the tree, and run their tests.

A mutant is caught if a test fails, or does not end in time. The others survive: they are printed, and either a test
lacks an assertion, or the change makes no difference and the mutant is replaced. ``python tests/mutants.py TEXT…``
runs only those whose file or change contains one of the texts.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import Progress

ROOT = Path(__file__).parents[1]
TIMEOUT = 900
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
    """Run test files up to the first failure; return its name, or an empty text if all passed."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode == 0:
        return ""
    lines = done.stdout.splitlines()
    failed = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit code {done.returncode}"


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


def main(*texts: str) -> int:
    """Run the mutants; the exit code is 0 if all were caught."""
    chosen = texts or ("",)
    mutants = [each for each in read_mutants() if any(text in str(each) for text in chosen)]
    survivors: list[Mutant] = []
    with TemporaryDirectory() as folder, Progress(disable=not sys.stderr.isatty()) as progress:
        tree = copy_tree(Path(folder))
        for mutant in progress.track(mutants, description="mutants"):
            caught = run_mutant(tree, mutant)
            survivors += [] if caught else [mutant]
            print(f"{caught or 'SURVIVED'}  {mutant}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
