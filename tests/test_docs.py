"""Run the Python snippets of every page and compare their output with the page.

Each ``python`` block runs on its own: in a new namespace and in an empty directory. A page whose programs use
files of earlier ones states it (``IN_ORDER``); they share a directory. A snippet may ``await`` at top level;
its page then links to the explanation. A ``text`` block after a snippet is its expected output.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import logging
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from kedge.mcp import mcp_tools

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


IN_ORDER = "Run the programs of this page in order, in one folder"
EXPLAINED = "index.md#run-the-examples"


def run_page(page: Path, folder: Path) -> int:
    """Run the snippets of a page, each in a new directory below ``folder``, and return their number."""
    text = page.read_text(encoding="utf-8")
    snippets = list(SNIPPET.finditer(text))
    with asyncio.Runner() as runner:
        for number, snippet in enumerate(snippets):
            directory = folder / ("shared" if IN_ORDER in text else str(number))
            directory.mkdir(exist_ok=True)
            printed = io.StringIO()
            with contextlib.chdir(directory), contextlib.redirect_stdout(printed):
                awaits = _run(snippet, page, runner)
            explained = EXPLAINED in text or page.name in ("index.md", "README.md")
            assert explained or not awaits, f"{page.name} uses await: link to {EXPLAINED}"
            if snippet["printed"] is not None:
                assert printed.getvalue() == snippet["printed"]
    return len(snippets)


def _run(snippet: re.Match[str], page: Path, runner: asyncio.Runner) -> bool:
    """Run a snippet and return whether it awaits at top level."""
    before = snippet.string.count("\n", 0, snippet.start("code"))
    source = "\n" * before + snippet["code"]  # so that a traceback has the line number of the page
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        result = eval(compile(source, str(page), "exec", flags), names)  # noqa: S307 - our own page
        if not inspect.iscoroutine(result):
            return False
        runner.run(result)
        return True
    finally:
        for value in names.values():
            if isinstance(value, OpenAI | Anthropic):
                value.close()  # as the end of a program does


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != TUTORIAL], ids=lambda page: page.name
)
def test_every_snippet_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every snippet of the page is found and runs on its own, as a reader would copy it."""
    # A busy machine may need longer than the default to start the server of docs/mcp.md.
    defaults = {**(mcp_tools.__kwdefaults__ or {}), "connect_timeout": 300.0}
    monkeypatch.setattr(mcp_tools, "__kwdefaults__", defaults)
    logger = logging.getLogger("kedge")
    monkeypatch.setattr(logger, "handlers", logger.handlers.copy())
    level = logger.level
    try:
        count = run_page(page, tmp_path)
    finally:
        logger.setLevel(level)
    assert count == page.read_text(encoding="utf-8").count("```python")


def test_snippets_pass_a_type_check(tmp_path: Path) -> None:
    """A type checker accepts every snippet, except ``await`` outside of a function."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
        for snippet in SNIPPET.finditer(text):
            line = text.count("\n", 0, snippet.start("code")) + 1
            (tmp_path / f"{name}_{line}.py").write_text(snippet["code"], encoding="utf-8")
    settings = {"typeCheckingMode": "standard", "reportPossiblyUnboundVariable": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(tmp_path)]
    options = ["--pythonpath", sys.executable]
    done = subprocess.run([*command, *options], capture_output=True, timeout=1_800, check=False)
    problems = [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']}"
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error" and "async function" not in each["message"]
    ]
    assert problems == []


def test_the_clients_page_has_the_tested_versions() -> None:
    """Each row of the table has the version that ``make test-clients`` installs."""
    folder = ROOT / "tests" / "clients"
    pinned = set(json.loads((folder / "package.json").read_text())["dependencies"].values())
    for path in folder.glob("requirements*.txt"):
        pinned |= set(re.findall(r"==(\S+)$", path.read_text(), re.MULTILINE))
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \[[^|]+\| ([^|]+) \|", page, re.MULTILINE))
    assert named
    assert named <= pinned


def hide_ids(text: str) -> str:
    """Return a text with the same id for all responses."""
    return re.sub(r"resp_…\w+", "resp_…", text)


def test_the_tutorial_runs_on_the_built_wheel(tmp_path: Path) -> None:
    """The tutorial and the chat of the README run with only the files of the wheel."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("kedge-*.whl")
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(wheel) as archive:  # as pip installs a wheel of pure Python
        archive.extractall(site)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KEDGE_")}
    folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    environment = {**environ, **folders, "PYTHONPATH": str(site), "PYTHONUTF8": "1"}

    def run(*arguments: str, stdin: str = "") -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=work,
            env=environment,
            input=stdin,
            check=True,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        ).stdout

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^    \$ printf '(.+?)' \| make chat\n((?:    .+\n)+)", readme, re.MULTILINE)
    assert match
    chat = run("-m", "kedge", "chat", stdin=match[1].replace("\\n", "\n"))
    assert hide_ids(chat) == hide_ids(dedent(match[2]))
    code = (
        f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import kedge, test_docs, pathlib\n"
        "print(kedge.__file__, test_docs.run_page(test_docs.TUTORIAL, pathlib.Path.cwd()))"
    )
    printed = run("-c", code).split()
    assert printed == [str(site / "kedge" / "__init__.py"), "5"]


def test_few_pages_have_programs_that_depend_on_each_other() -> None:
    """Only the tutorial and the MCP page, whose programs start a server from a file, depend on order."""
    dependent = [page.name for page in PAGES if IN_ORDER in page.read_text(encoding="utf-8")]
    assert dependent == ["mcp.md", "tutorial.md"]


GOOD = """
# A page

```python
from pathlib import Path

Path("made.txt").write_text("1")
```

[Prose](index.md#run-the-examples).

```python
import asyncio
await asyncio.sleep(0)
async def double(n): return 2 * n
print(await double(1))
```

```text
2
```

```python
import anyio
async def double(n): return 2 * n
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
    "asyncio.run",
    "import anyio\nawait anyio.sleep(0)",
    "x = 1\n```\n\n```python\nprint(x)",
    "open('a', 'w').close()\n```\n\n```python\nopen('a')",
]


def test_a_page_may_await_and_start_loops(tmp_path: Path) -> None:
    """A page may define functions, await at top level and start an event loop."""
    page = tmp_path / "good.md"
    page.write_text(GOOD)
    assert run_page(page, tmp_path) == 3


def test_programs_of_a_page_in_order_share_a_folder(tmp_path: Path) -> None:
    """The programs of a page that states its order share files but no names."""
    page = tmp_path / "steps.md"
    first = "```python\nx = open('made', 'w').close()\n```\n"
    page.write_text(f"{IN_ORDER}.\n\n{first}\n```python\nopen('made').close()\n```\n")
    assert run_page(page, tmp_path) == 2
    page.write_text(f"{IN_ORDER}.\n\n{first}\n```python\nprint(x)\n```\n")
    with pytest.raises(NameError):
        run_page(page, tmp_path)


@pytest.mark.parametrize("code", BAD)
def test_a_wrong_page_is_detected(code: str, tmp_path: Path) -> None:
    """A snippet that fails, prints something else, or needs an earlier one, fails the test."""
    page = tmp_path / "bad.md"
    page.write_text(f"# A page\n\n```python\n{code}\n```\n")
    with pytest.raises((Exception, SystemExit)):
        run_page(page, tmp_path)
