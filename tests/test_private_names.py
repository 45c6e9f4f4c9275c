"""Names of other packages that start with an underscore are not used: they can change with every release."""

import ast
import re
from collections import defaultdict
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
    "_client": "openai==3.49.0, anthropic==2.8.0",  # nor has its HTTP client
    "_connection": "openai==3.49.0",  # nor the WebSocket below its layer that parses every message
}
"""Names that cannot be avoided, with the version of the package that they were checked against."""
PUBLIC = {"_replace", "_asdict", "_exit"}
"""Names of the standard library that are documented."""
SHARED = {"_target"}
"""Names of Kedge that a module uses of an object of another module."""


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


def list_inherited_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private names that a module uses of its own objects, which may be those of a base."""
    for node in nodes:
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name) and is_self(value):
                yield name
            case _:
                pass


def is_self(node: ast.expr) -> bool:
    """Return whether an expression is the object or the class of a method."""
    return ast.unparse(node) in {"self", "cls", "super()"}


def list_used_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private modules and names that a module uses of others."""
    for node in nodes:
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name) and not is_self(value):
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
    """A private name of an object is defined in the package that uses it, or is an exception with a reason."""
    packages: dict[Path, list[ast.AST]] = defaultdict(list)
    for path, nodes in list_nodes().items():
        packages[path.parent] += nodes
    own = {name for nodes in packages.values() for name in list_own_names(nodes)}
    inherited = {name for nodes in packages.values() for name in list_inherited_names(nodes)}
    used: set[str] = set()
    for nodes in packages.values():
        used |= {*list_used_names(nodes)} - {*list_own_names(nodes)}
    assert (inherited - own) | (used - PUBLIC - SHARED) == EXCEPTIONS.keys()


@pytest.mark.parametrize(("name", "packages"), EXCEPTIONS.items())
def test_exceptions_were_checked_against_the_current_version(name: str, packages: str) -> None:
    """A new version of a package requires that its private names are checked again."""
    pinned = re.findall(r"^[\w.-]+==[\w.]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(packages.split(", ")) <= set(pinned), f"check {name}"
