"""Promises that the repository as a whole keeps."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_says_in_one_line_what_it_shows() -> None:
    """A test function has a docstring: the sentence a reader would want to be true."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_every_link_of_the_documents_leads_somewhere() -> None:
    """Links to files of the repository name files that are there."""
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_readme_is_short() -> None:
    """The README stays under 150 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
