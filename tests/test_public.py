"""Tests of the names in the ``kedge`` package and of the cost of its import."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, TypeGuard, assert_type, cast

from msgspec import Struct

import kedge
from for_each import for_each
from kedge import turns
from kedge.batch.files import BatchLine, LineResult, summarize_results
from kedge.batch.run import BatchJob
from kedge.chaining.report import ReportBuilder
from kedge.conversation.chat_state import build_report
from kedge.engines import Request, to_output_schema
from kedge.events import ItemCompleted, OpaqueEvent
from kedge.providers import Models
from kedge.server import faults
from kedge.tools import Edit
from kedge.wire import ResponsesDecoder

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
    """Return the imports under ``TYPE_CHECKING``: name -> module."""
    tree = ast.parse(Path(str(kedge.__file__)).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": str(node.module) for node in imports for alias in node.names}


def run_python(code: str) -> str:
    """Run code in a new interpreter and return its output."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_the_public_names_match_those_for_type_checkers() -> None:
    """``HOMES``, ``__all__`` and the imports for type checkers contain the same names."""
    assert type_checking_imports() == kedge.HOMES
    assert kedge.__all__ == list(kedge.HOMES)
    assert len(set(kedge.__all__)) == len(kedge.__all__)


@for_each("name", list(kedge.HOMES))
def test_every_name_is_that_of_its_module(name: str) -> None:
    """A root name is the same object as in its module, which lists it as public."""
    home = import_module(kedge.HOMES[name])
    assert getattr(kedge, name) is getattr(home, name)
    assert name in getattr(home, "__all__", vars(home))
    assert name in dir(kedge)


def test_lazy_names_are_typed() -> None:
    """A lazily imported name has its real type; ``make check`` type-checks this test."""
    turn = kedge.Turn([kedge.user("hi")])
    assert_type(turn.append(kedge.assistant("ho")), kedge.Turn)
    assert_type(kedge.tool_call("f", {}), turns.ToolCallBlock)
    assert_type(kedge.image("https://kedge.example/a.png"), turns.ImagePart)
    assert_type(kedge.diff(turn, turn).moved, tuple[turns.Block, ...])
    assert_type(kedge.InvalidJSON("$", "x").path, str)


def test_importing_the_root_loads_nothing_else() -> None:
    """``import kedge`` loads no other module of Kedge, no SDK and no event loop."""
    loaded = run_python("import kedge, sys; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("kedge")] == ["kedge"]
    assert not set(HEAVY_MODULES) & set(loaded)


UNUSED_PACKAGES = (
    *("batch", "chaining", "cli", "config", "conversation", "mcp", "middleware", "server", "store"),
    *(
        "tools.run",
        "tools.toolbox",
        "usage.prices",
        "web",
        "workflows",
        "wire.anthropic",
        "wire.chat_completions",
    ),
    *("engines.anthropic", "engines.chat_completions", "engines.websocket"),
)
"""Packages and modules that an engine of the Responses API does not need before its first request."""


def test_an_engine_loads_the_modules_of_its_api_only() -> None:
    """An engine is ready without those of other APIs, the practice model, the store and an SDK."""
    code = "import kedge, sys; kedge.connect('openai:gpt-5.1', api_key='k'); print(*sys.modules)"
    loaded = set(run_python(code).split())
    unused = {f"kedge.{name}" for name in UNUSED_PACKAGES}
    assert [name for name in sorted(unused) if find_spec(name) is None] == []
    assert {"kedge.engines", "kedge.engines.responses"} <= loaded
    assert not unused & loaded
    assert not {"openai", "aiohttp", "pydantic", "html", "importlib.metadata"} & loaded


def is_frozen(value: object) -> TypeGuard[type[Any]]:
    """Return whether a value is a frozen Struct or a frozen dataclass."""
    if not isinstance(value, type):
        return False
    if issubclass(value, Struct):
        return value.__struct_config__.frozen
    return is_dataclass(value) and "__delattr__" in vars(value)


def list_fields(cls: type[Any]) -> dict[str, str]:
    """Return the names and the types, as they are written, of the fields of a class."""
    written = {
        name: kind if isinstance(kind, str) else str(kind)
        for base in reversed(cls.__mro__)
        for name, kind in vars(base).get("__annotations__", {}).items()
    }
    names = getattr(cls, "__struct_fields__", ()) or getattr(cls, "__dataclass_fields__", ())
    return {name: written[name] for name in names if not name.startswith("_")}


def list_frozen_classes() -> list[type[Any]]:
    """Return the frozen classes that Kedge and its packages export."""
    packages = [
        import_module(module.name)
        for module in walk_packages(kedge.__path__, "kedge.")
        if module.ispkg
    ]
    exported = [
        getattr(package, name)
        for package in (kedge, *packages)
        for name in getattr(package, "__all__", ())
    ]
    return list(dict.fromkeys(filter(is_frozen, exported)))


MUTABLE_TYPES = r"(dict|list|set|bytearray|deque|Counter|Mutable\w+)\b"


def test_frozen_classes_declare_no_mutable_members() -> None:
    """No public field of a frozen class is a ``dict``, ``list`` or ``set``, of an exported one at any depth."""
    modules = [import_module(each.name) for each in walk_packages(kedge.__path__, "kedge.")]
    values = [value for module in modules for value in vars(module).values()]
    classes = set(filter(is_frozen, values))
    mutable = re.compile(r"(<class ')?((collections|typing)\.)?" + MUTABLE_TYPES)
    nested = re.compile(r"\b" + MUTABLE_TYPES)
    exported = set(list_frozen_classes())
    found = [
        f"{each.__module__}.{each.__name__}.{name}: {kind}"
        for each in classes | exported
        for name, kind in list_fields(each).items()
        if mutable.match(kind) or (each in exported and nested.search(kind))
    ]
    assert found == []


NESTED: dict[str, Any] = {"a": {"b": [{"c": 1}], "d": {"e": 1}}}
FAILED_LINE = LineResult("1", "failed", error_class="RateLimited")
FROZEN_VALUES = (
    Models({}),
    BatchJob("b", "sqlite:///x.db", "practice", params={"n": 1}),
    BatchLine("1", ("Hello",), params={"n": 1}, schema={"type": "object"}),
    summarize_results([FAILED_LINE], total=1, skipped=0, seconds=1),
    build_report(b"", None, None),
    ReportBuilder().build(),
    Edit(NESTED),
    faults.parse("status=429,retry_after=1"),
    to_output_schema(int),
    Request(tools=(NESTED,), params=NESTED),
    Request(tools=(NESTED,)),
    Request.of(tools=[NESTED], extra_body=NESTED),
    ItemCompleted(NESTED),
    OpaqueEvent("a", NESTED),
    *ResponsesDecoder().feed_whole({"id": "a", "status": "completed", "output": [{"id": "b"}]}),
    *ResponsesDecoder().feed_whole({"id": "a", "status": "incomplete", "output": [{"id": "b"}]}),
    *ResponsesDecoder().feed_whole({"id": "a", "status": "failed"}),
    *ResponsesDecoder().feed_message(
        {"type": "response.output_text.delta", "delta": "a", "logprobs": [{"token": "a"}]}
    ),
)
BORROWED = {"PracticeRequest", "Settings"}
"""Classes whose values share their collections with the server, which may be too large to copy for each request."""


def find_mutable(value: object) -> list[object]:
    """Return the mutable collections in a value: its fields, their elements, and the elements of these."""
    if is_frozen(type(value)):
        names = list_fields(type(value))
        return [found for name in names for found in find_mutable(getattr(value, name))]
    if isinstance(value, Mapping):
        members = list(cast("Mapping[str, object]", value).values())
    elif isinstance(value, tuple | list):
        members = list(cast("tuple[object, ...]", value))
    else:
        members = []
    is_mutable = isinstance(value, MutableMapping | MutableSequence | MutableSet)
    return [value] * is_mutable + [found for each in members for found in find_mutable(each)]


@for_each("value", FROZEN_VALUES)
def test_collections_of_frozen_values_are_read_only(value: Any) -> None:
    """A collection in a frozen value cannot be changed in place, whichever type the caller passed."""
    assert find_mutable(value) == []


def test_every_frozen_class_with_collections_is_tested() -> None:
    """Every public frozen class with a field of an abstract collection type is among the values above."""
    abstract = re.compile(r"\b(Mapping|Sequence|Collection|Iterable)\b")
    found = {
        each.__name__
        for each in list_frozen_classes()
        for kind in list_fields(each).values()
        if abstract.search(kind)
    }
    assert found <= {type(value).__name__ for value in FROZEN_VALUES} | BORROWED
