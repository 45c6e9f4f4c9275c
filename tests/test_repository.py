"""Tests of conventions that apply to the complete repository."""

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from source_trees import SOURCE, list_nodes

ROOT = Path(__file__).parent.parent
APPLICATIONS = {"cli", "proxy", "server", "web"}
"""Packages that are run and not imported; their options and routes are documented instead."""


def test_every_test_has_a_docstring(request: pytest.FixtureRequest) -> None:
    """Every test function that was collected has a docstring."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    named = [item for item in functions if item.function.__name__.startswith("test_")]
    assert [item.nodeid for item in named if not item.function.__doc__] == []


def test_every_link_in_the_documents_has_a_target() -> None:
    """Links to files of the repository refer to existing files."""
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_site_contains_every_page() -> None:
    """The navigation of the documentation site lists each page of ``docs`` once."""
    names = re.findall(r"^ +- .*?: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(names) == sorted(pages)


def test_every_public_package_has_a_reference_page() -> None:
    """The API reference covers every package that exports names, and the errors."""
    exporting = [
        path.parent.name
        for path in (ROOT / "src" / "kedge").glob("*/__init__.py")
        if re.search(r"^(__all__|class|def) ", path.read_text(), re.MULTILINE)
        and path.parent.name not in APPLICATIONS
    ]
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert sorted(pages - {"errors"}) == sorted(exporting)


def test_named_test_files_exist() -> None:
    """The files of tests that the Makefile, ``.ci/run`` and the workflow name exist."""
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")]
    named = {name for file in files for name in re.findall(r"\btests/[\w./-]*\w", file.read_text())}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_no_database_is_part_of_the_repository() -> None:
    """No file that Git tracks is a database, which a program run in this folder can leave behind."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert [
        name for name in listed.stdout.splitlines() if re.search(r"\.(db|sqlite3?)$", name)
    ] == []


def find_modules(matches: Callable[[ast.AST], bool]) -> set[str]:
    """Return the modules of the package with a matching node of their syntax tree."""
    return {
        path.relative_to(SOURCE).as_posix()
        for path, nodes in list_nodes().items()
        if any(map(matches, nodes))
    }


def assigns_class(node: ast.AST) -> bool:
    """Return whether a node assigns the class of an object."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "__class__"
        and isinstance(node.ctx, ast.Store)
    )


def test_no_code_is_generated_and_no_class_is_replaced() -> None:
    """No module uses ``exec`` or ``eval``, and only the listed ones assign ``__class__``."""
    generated = find_modules(
        lambda node: isinstance(node, ast.Name) and node.id in ("exec", "eval")
    )
    assert generated == set()
    assert find_modules(assigns_class) == set()
