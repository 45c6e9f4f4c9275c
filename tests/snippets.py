"""The Python snippets of the documentation: run those of a page, or write all of them for the type checker.

Each ``python`` block runs on its own: in a new namespace and in an empty directory. A page whose programs use
files of earlier ones states it (``IN_ORDER``); they share a directory. A snippet may ``await`` at top level;
its page then links to the explanation. A ``text`` block after a snippet is its expected output.

    python tests/snippets.py build/snippets    write every snippet as a notebook, as make types does
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
IN_ORDER = "Run the programs of this page in order, in one folder"
SHARED_FOLDER = "shared"
EXPLAINED = "index.md#run-the-examples"


def run_page(page: Path, folder: Path, *, in_order: bool = False) -> int:
    """Run the snippets of a page, and return their number.

    Args:
        page: The page.
        folder: The folder in which directories are created.
        in_order: Whether the snippets share a directory; otherwise they do if the page states it.
    """
    text = page.read_text(encoding="utf-8")
    shares = in_order or IN_ORDER in text
    snippets = list(SNIPPET.finditer(text))
    with asyncio.Runner() as runner:
        for number, snippet in enumerate(snippets):
            directory = folder / (SHARED_FOLDER if shares else str(number))
            directory.mkdir(exist_ok=True)
            printed = io.StringIO()
            with contextlib.chdir(directory), contextlib.redirect_stdout(printed):
                awaits = _run(snippet, page, runner)
            explained = EXPLAINED in text or page.name in ("index.md", "README.md")
            assert explained or not awaits, f"{page.name} uses await: link to {EXPLAINED}"
            if snippet["printed"] is not None:
                assert matches_page(printed.getvalue(), snippet["printed"]), printed.getvalue()
    return len(snippets)


def matches_page(printed: str, shown: str) -> bool:
    """Return whether a page shows what a program printed, where ``…`` stands for any text of a line."""
    return re.fullmatch(re.escape(shown).replace("…", ".*"), printed) is not None


def _run(snippet: re.Match[str], page: Path, runner: asyncio.Runner) -> bool:
    """Run a snippet and return whether it awaits at top level."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        code = compile(_read_source(snippet), str(page), "exec", flags)
        result = eval(code, names)  # noqa: S307 - our own page
        if not inspect.iscoroutine(result):
            return False
        runner.run(result)
        return True
    finally:
        for value in names.values():
            if type(value).__name__ in ("OpenAI", "Anthropic"):
                value.close()  # as the end of a program does


def _read_source(snippet: re.Match[str]) -> str:
    """Return the code after as many empty lines as make its line numbers those of the page."""
    return "\n" * snippet.string.count("\n", 0, snippet.start("code")) + snippet["code"]


def write_notebooks(folder: Path) -> int:
    """Write each snippet of the documentation to a notebook, where ``await`` is allowed at top level."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written = 0
    for page in PAGES:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
        for snippet in SNIPPET.finditer(page.read_text(encoding="utf-8")):
            written += 1
            source = _read_source(snippet) + "# pyright: reportPossiblyUnboundVariable=false\n"
            cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": source}
            notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
            (folder / f"{name}_{written}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return written


if __name__ == "__main__":
    write_notebooks(Path(sys.argv[1]))
