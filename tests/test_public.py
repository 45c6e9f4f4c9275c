"""The root face: a short list of names that is what it says, and costs nothing to import."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, assert_type

import pytest

import kedge
from kedge import turns

HEAVY_MODULES = (
    "anyio",
    "anthropic",
    "asyncio",
    "httpx",
    "openai",
    "pydantic",
    "rich",
    "starlette",
    "tiktoken",
)


def type_checking_imports() -> dict[str, str]:
    """The imports under ``TYPE_CHECKING``: name -> module."""
    tree = ast.parse(Path(str(kedge.__file__)).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": str(node.module) for node in imports for alias in node.names}


def run_python(code: str) -> str:
    """What a new interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_the_list_is_what_type_checkers_see() -> None:
    """The table, ``__all__`` and the imports for type checkers name the same things."""
    assert type_checking_imports() == kedge.HOMES
    assert kedge.__all__ == list(kedge.HOMES)
    assert len(set(kedge.__all__)) == len(kedge.__all__)


@pytest.mark.parametrize("name", list(kedge.HOMES))
def test_every_name_resolves_to_what_its_home_has(name: str) -> None:
    """A name is the very object of its home, and its home lists it as public."""
    home = import_module(kedge.HOMES[name])
    assert getattr(kedge, name) is getattr(home, name)
    assert name in getattr(home, "__all__", vars(home))
    assert name in dir(kedge)


def test_nothing_else_is_public() -> None:
    """Whatever else the root holds is a submodule, its machinery, or private."""
    machinery = {"HOMES", "import_module", "Any", "TYPE_CHECKING"}
    others = {
        name
        for name, value in vars(kedge).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert others - machinery <= set(kedge.__all__)


def test_the_list_is_short() -> None:
    """About forty names at most: what an ordinary program needs."""
    assert len(kedge.__all__) <= 42


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As for any module, and so for ``from kedge import nothing``."""
    root: Any = kedge
    with pytest.raises(AttributeError, match="module 'kedge' has no attribute 'nothing'"):
        _ = root.nothing
    with pytest.raises(ImportError):
        exec("from kedge import nothing")  # noqa: S102 - that is the statement in question


def test_type_checkers_know_what_a_name_is() -> None:
    """A lazy name has the type of the thing: ``make check`` reads this test too."""
    turn = kedge.Turn([kedge.user("hi")])
    assert_type(turn.append(kedge.assistant("ho")), kedge.Turn)
    assert_type(kedge.tool_call("f", {}), turns.ToolCallBlock)
    assert_type(kedge.image("https://kedge.example/a.png"), turns.ImagePart)
    assert_type(kedge.diff(turn, turn).moved, tuple[turns.Block, ...])
    assert_type(kedge.InvalidJSON("$", "x").path, str)


def test_importing_the_root_loads_nothing_else() -> None:
    """``import kedge`` costs one small module: no layer, no SDK, no event loop."""
    loaded = run_python("import kedge, sys; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("kedge")] == ["kedge"]
    assert not set(HEAVY_MODULES) & set(loaded)


def test_the_pure_core_loads_no_sdk() -> None:
    """Making Turns needs neither an SDK nor an event loop."""
    loaded = run_python(
        "from kedge import Turn, user; Turn([user('hi')]); import sys; print(*sys.modules)"
    )
    assert not set(HEAVY_MODULES) & set(loaded.split())
