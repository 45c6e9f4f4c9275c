"""Every page says what is true: its Python snippets run, and print what the page shows.

The ``python`` blocks of a page are run in order, in one fresh namespace and in an empty directory. They
may ``await`` at top level. Where a ``text`` block follows, it is what the snippet prints.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def run_page(page: Path) -> int:
    """Run the snippets of a page, and say how many there were."""
    snippets = list(SNIPPET.finditer(page.read_text(encoding="utf-8")))
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for snippet in snippets:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                _run(snippet, page, names, runner)
            if snippet["printed"] is not None:
                assert printed.getvalue() == snippet["printed"]
    return len(snippets)


def _run(snippet: re.Match[str], page: Path, names: dict[str, Any], runner: asyncio.Runner) -> None:
    before = snippet.string.count("\n", 0, snippet.start("code"))
    source = "\n" * before + snippet["code"]  # so that a traceback names the line of the page
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    running = eval(compile(source, str(page), "exec", flags), names)  # noqa: S307 - our own page
    if inspect.iscoroutine(running):
        runner.run(running)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as a reader would type them; every snippet of the page is found."""
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("kedge")
    monkeypatch.setattr(logger, "handlers", logger.handlers.copy())
    level = logger.level
    try:
        count = run_page(page)
    finally:
        logger.setLevel(level)
    assert count == page.read_text(encoding="utf-8").count("```python")


def test_the_page_of_clients_names_the_versions_that_are_run() -> None:
    """Each row of its table names the version that ``make test-clients`` installs."""
    folder = ROOT / "tests" / "clients"
    pinned = set(json.loads((folder / "package.json").read_text())["dependencies"].values())
    for path in folder.glob("requirements*.txt"):
        pinned |= set(re.findall(r"==(\S+)$", path.read_text(), re.MULTILINE))
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \[[^|]+\| ([^|]+) \|", page, re.MULTILINE))
    assert named - pinned == {"not run"}


GOOD = """
# A page

```python
import asyncio
x = 1
```

Prose.

```python
await asyncio.sleep(0)
async def double(n): return 2 * n
print(await double(x))
```

```text
2
```

```python
import anyio
assert anyio.run(double, 2) == 4
print("not shown, not checked")
```
"""
BAD = [
    "x = y",
    "assert False",
    "await nothing",
    "print(2)\n```\n\n```text\n3",
    "x = (",
    "raise SystemExit",
]


def test_snippets_share_names_and_may_wait(tmp_path: Path) -> None:
    """A page may define, await, and start a loop of its own."""
    page = tmp_path / "good.md"
    page.write_text(GOOD)
    assert run_page(page) == 3


@pytest.mark.parametrize("code", BAD)
def test_a_wrong_page_is_noticed(code: str, tmp_path: Path) -> None:
    """A snippet that fails, or prints something else, fails the test."""
    page = tmp_path / "bad.md"
    page.write_text(f"# A page\n\n```python\n{code}\n```\n")
    with pytest.raises((Exception, SystemExit)):
        run_page(page)
