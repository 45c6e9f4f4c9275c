"""Promises that the repository as a whole keeps."""

import ast
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
