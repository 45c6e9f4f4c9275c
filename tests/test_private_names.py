"""Names of other packages that start with an underscore are not used: they can change with every release."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from source_trees import list_nodes

ROOT = Path(__file__).parents[1]

EXCEPTIONS = {
    "mcp.client._transport": "mcp==2.3.0",  # the types of a transport have no public module
    "_process": "anyio==4.16.0",  # the only way to close the pipes of a process that has ended
    "_transport": "anyio==4.16.0, httpx2==2.16.0",  # the transports of a client have no public name
    "_mounts": "httpx2==2.16.0",
    "_custom_headers": "openai==3.49.0",  # the headers of a client have no public name
}
"""Names that cannot be avoided, with the version of the package that they were checked against."""
PUBLIC = {"_replace", "_asdict", "_exit"}
"""Names of the standard library that are documented."""


def is_private(name: str) -> bool:
    """Return whether a name starts with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def list_own_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a module defines."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.attr
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.alias(asname=str(name)):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=names)):
                yield from (name.value for name in names if isinstance(name, ast.Constant))  # type: ignore[misc]
            case _:
                pass


def list_used_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private modules and names of other packages that a module may use."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(str(name)), *_]
            ):
                yield from (name for name in [name] if is_private(name))
            case ast.ImportFrom(module=str(module)) if not module.startswith("kedge"):
                yield from (module for part in module.split(".") if is_private(part))
                yield from (each.name for each in node.names if is_private(each.name))
            case _:
                pass


def test_private_names_of_other_packages_are_not_used() -> None:
    """Every private name is defined in Kedge, or is an exception with a reason."""
    modules = list_nodes().values()
    own = {name for nodes in modules for name in list_own_names(nodes)}
    used = {name for nodes in modules for name in list_used_names(nodes)}
    assert used - own - PUBLIC <= EXCEPTIONS.keys()


@pytest.mark.parametrize(("name", "packages"), EXCEPTIONS.items())
def test_exceptions_were_checked_against_the_current_version(name: str, packages: str) -> None:
    """A new version of a package requires that its private names are checked again."""
    pinned = re.findall(r"^[\w.-]+==[\w.]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(packages.split(", ")) <= set(pinned), f"check {name}"
