"""The syntax trees of the package, which several tests examine: parsing and walking them takes seconds."""

import ast
import gc
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kedge"


@cache
def list_nodes() -> dict[Path, list[ast.AST]]:
    """Return the nodes of each module, of which the first is the module; contexts of names are left out."""
    gc.disable()  # it would visit all the nodes again and again, now and during later tests
    try:
        trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
        return {
            path: [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
            for path, tree in trees.items()
        }
    finally:
        gc.freeze()
        gc.enable()
