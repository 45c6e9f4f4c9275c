"""The syntax trees of the package, which several tests examine: parsing and walking them takes seconds."""

import ast
import gc
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kedge"


@cache
def list_nodes() -> dict[Path, list[ast.AST]]:
    """Return all nodes of each module; the first one is the module."""
    gc.disable()  # it would visit all the nodes again and again, now and during later tests
    try:
        return {
            path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            for path in sorted(SOURCE.rglob("*.py"))
        }
    finally:
        gc.freeze()
        gc.enable()
