"""Run the Python snippets of every page and compare their output with the page; see ``snippets.py``."""

import logging
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
import zipfile
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest

from for_each import for_each
from forked import MODULES, run_forked
from kedge.mcp import mcp_tools
from kedge.testing import serve
from snippets import (
    PAGES,
    ROOT,
    SHARED_FOLDER,
    SNIPPET,
    TUTORIAL,
    matches_page,
    run_page,
    write_notebooks,
)

TUTORIAL_PROGRAMS = list(SNIPPET.finditer(TUTORIAL.read_text(encoding="utf-8")))
MIGRATION_PAGES = [page for page in PAGES if page.name.startswith("migrate-")]


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


OTHER_PROGRAM = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DATABASE_FILE = re.compile(r'"(\w+\.db)"')


@pytest.mark.parametrize("page", MIGRATION_PAGES, ids=lambda page: page.name)
def test_migrated_programs_run_beside_files_of_the_other_library(
    page: Path, tmp_path: Path
) -> None:
    """The programs of a page run in one folder, in which the other library has created its databases before."""
    shared = tmp_path / SHARED_FOLDER
    shared.mkdir()
    for program in OTHER_PROGRAM.findall(page.read_text(encoding="utf-8")):
        for name in DATABASE_FILE.findall(program):
            with closing(sqlite3.connect(shared / name)) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS messages (body)")
    run_page(page, tmp_path, in_order=True)


def test_every_snippet_is_type_checked(tmp_path: Path) -> None:
    """``make types`` checks a file for each snippet, those of the tutorial strictly."""
    count = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert write_notebooks(tmp_path / "new") == count
    notebooks = sorted((tmp_path / "new").iterdir())
    assert len(notebooks) == count
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]["strict"]
    (pattern,) = [Path(each).name for each in strict if each.startswith("build/snippets/")]
    assert len(list((tmp_path / "new").glob(pattern))) == len(TUTORIAL_PROGRAMS)


def hide_ids(text: str) -> str:
    """Return a text with the same id for all responses."""
    return re.sub(r"resp_…\w+", "resp_…", text)


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(("cryptography", "dbos", "mcp", "openai", "opentelemetry", "psycopg")))
"""
"""The packages of extras cannot be imported: ``make chat`` and ``pip install .`` install none of them."""


class WheelSite:
    """A folder with only the files of the built wheel, from which programs are run without any extra."""

    def __init__(self, folder: Path) -> None:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
        (wheel,) = folder.glob("kedge_llm-*.whl")
        self.site, self.work = folder / "site", folder / "work"
        self.work.mkdir()
        with zipfile.ZipFile(wheel) as archive:  # as pip installs a wheel of pure Python
            archive.extractall(self.site)
        (self.site / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KEDGE_")}
        folders = {"XDG_DATA_HOME": str(folder / "data"), "XDG_CONFIG_HOME": str(folder / "config")}
        self.environment = {**kept, **folders, "PYTHONPATH": str(self.site), "PYTHONUTF8": "1"}

    def run(self, *arguments: str, stdin: str = "", **environment: str) -> str:
        """Run Python in the folder of programs, and return what it printed."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.work,
            env={**self.environment, **environment},
            input=stdin,
            check=True,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        ).stdout

    def run_programs(self, programs: list[str], **environment: str) -> list[str]:
        """Run programs one after another, each in its own process, and return what each printed."""
        for number, program in enumerate(programs):
            (self.work / f"step{number}.py").write_text(program, encoding="utf-8")
        self.run("-c", RUN_STEPS, str(len(programs)), *MODULES, **environment)
        outputs = [self.work / f"step{number}.out" for number in range(len(programs))]
        return [path.read_text(encoding="utf-8") for path in outputs]


RUN_STEPS = """
import contextlib, gc, importlib, os, runpy, sys
for name in sys.argv[2:]:
    importlib.import_module(name)  # which each process would import again
importlib.import_module("kedge.usage.tokens").get_encoding()
gc.freeze()
for number in range(int(sys.argv[1])):
    process = os.fork()
    if not process:
        with open(f"step{number}.out", "w") as output, contextlib.redirect_stdout(output):
            runpy.run_path(f"step{number}.py", run_name="__main__")
        sys.exit()
    assert os.waitpid(process, 0)[1] == 0, f"step{number}.py failed"
"""
FIND = "import kedge; print(kedge.__file__)"
ADD = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
SYNC_LINES = """
from kedge import Conversation

with Conversation("openai:gpt-5.1", store="agent.db", id="ada", tools=[add]).sync as chat:
    print(chat.send("What is 2+3?").text, len(chat.turn))
"""
ASYNC_LINES = """
import asyncio
from kedge import Conversation

async def main():
    async with Conversation("openai:gpt-5.1", store="agent.db", id="ada", tools=[add]) as chat:
        print((await chat.send("What is 2+3?")).text, len(chat.turn))

asyncio.run(main())
"""


def read_chat() -> tuple[str, str]:
    """Return the input of the chat in the README, and what it prints."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^    \$ printf '(.+?)' \| make chat\n((?:    .+\n)+)", readme, re.MULTILINE)
    assert match
    return match[1].replace("\\n", "\n"), dedent(match[2])


def test_extras_do_not_change_the_chat_of_the_readme(tmp_path: Path) -> None:
    """With the packages of all extras, the chat prints what it prints without: the sizes are equal, too."""
    lines, shown = read_chat()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEDGE_")}
    folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = run_forked("-m", "kedge", "chat", text=lines, cwd=tmp_path, env={**kept, **folders})
    assert hide_ids(done.stdout) == hide_ids(shown)


def test_the_tutorial_runs_on_the_built_wheel(tmp_path: Path) -> None:
    """With only the files of the wheel, the chat of the README and each program of the tutorial run.

    Before them, the first program of a user answers, and another one, which is async, continues its conversation.
    """
    wheel_site = WheelSite(tmp_path)
    lines, shown = read_chat()
    assert hide_ids(wheel_site.run("-m", "kedge", "chat", stdin=lines)) == hide_ids(shown)
    programs = [
        FIND,
        ADD + SYNC_LINES,
        ADD + ASYNC_LINES,
        *(each["code"] for each in TUTORIAL_PROGRAMS),
    ]
    with serve() as server:
        variables = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none"}
        found, *printed = wheel_site.run_programs(programs, **variables)
    assert found.strip() == str(wheel_site.site / "kedge" / "__init__.py")
    assert printed[:2] == ["2+3 = 5. 2\n", "2+3 = 5. 4\n"]
    for program, output in zip(TUTORIAL_PROGRAMS, printed[2:], strict=True):
        assert matches_page(output, program["printed"]), output


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


@for_each("code", BAD)
def test_a_wrong_page_is_detected(code: str, tmp_path: Path) -> None:
    """A snippet that fails, prints something else, or needs an earlier one, fails the test."""
    page = tmp_path / "bad.md"
    page.write_text(f"# A page\n\n```python\n{code}\n```\n")
    with pytest.raises((Exception, SystemExit)):
        run_page(page, tmp_path)
