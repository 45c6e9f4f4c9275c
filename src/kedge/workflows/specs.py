"""Workflow specifications: from a TOML file, from command-line options, or from the store.

The specification is stored with the workflow as plain data, so that it can be resumed by its id alone. A function
is named as ``module:function``; its module is searched next to the file, then on the import path.
"""

import importlib
import importlib.util
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec

from kedge._internal.event_loops import await_value
from kedge.errors import InvalidWorkflow, KedgeError, find_similar
from kedge.middleware.compose import Tools
from kedge.store import Store
from kedge.workflows.judges import debate, refine
from kedge.workflows.results import (
    DebateResult,
    RefineResult,
    Side,
    Step,
    StepsResult,
    WorkflowCallback,
    WorkflowKind,
    ignore_event,
)
from kedge.workflows.roles import ModelJudge
from kedge.workflows.steps import steps

WorkflowSpec = dict[str, Any]
WorkflowResult = RefineResult | DebateResult | StepsResult

_JUDGE_KEYS = ("function", "schema", "rubric", "model")
_KEYS: Mapping[WorkflowKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "refine": (("task", "judge"), ("model", "rounds", "folder")),
    "debate": (("question", "sides", "judge"), ("model", "rounds", "folder")),
    "steps": (("steps",), ("model", "inputs", "folder")),
}
"""The members that a specification must have, and those that it may have."""
_MEMBER_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("rounds", "attempts"), (int, "a whole number")),
    **dict.fromkeys(("judge", "inputs"), (dict, "a table")),
    **dict.fromkeys(("sides", "steps"), (list, "a list")),
    "schema": ((str, dict), "a table or the name of a file"),
}
"""The types of the members that are not text."""


def read_spec(path: str | Path) -> WorkflowSpec:
    """Load a workflow from a TOML file."""
    parsed = _read_file(Path(path), tomllib.loads, "TOML")
    data: WorkflowSpec = msgspec.to_builtins(parsed)  # dates as text, because it is stored as JSON
    data.pop("kind", None)
    return {**data, "folder": str(Path(path).absolute().parent)}


def _read_file(path: Path, parse: Callable[[str], Any], form: str) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidWorkflow(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidWorkflow(f"{path} is not valid {form}: {error}") from error


async def run_spec(
    kind: WorkflowKind,
    spec: WorkflowSpec,
    store: Store,
    *,
    workflow: str = "",
    on_event: WorkflowCallback = ignore_event,
    tools: Tools = (),
) -> WorkflowResult:
    """Run a workflow from its specification, which never contains tools because it may be from a store."""
    required, optional = _KEYS[kind]
    _check_table(spec, kind, (*required, *optional), ())
    for key in required:
        if not spec.get(key):
            raise InvalidWorkflow(f"{kind}: {key!r} is missing; set it in the file or as an option")
    model = spec.get("model", "practice")
    common: dict[str, Any] = {
        "store": store,
        "workflow": workflow,
        "on_event": on_event,
        "spec": {"file": spec},
        "tools": tools,
    }
    if kind == "steps":
        inputs = spec.get("inputs", {})
        return await steps(list(_iter_steps(spec)), inputs=inputs, engine=model, **common)
    common["judge"] = _build_judge(kind, spec, model)
    if "rounds" in spec:
        common["rounds"] = spec["rounds"]
    if kind == "refine":
        return await refine(spec["task"], engine=model, **common)
    return await debate(spec["question"], list(_iter_sides(spec, model)), **common)


def _iter_sides(spec: WorkflowSpec, model: str) -> Iterator[Side]:
    for index, entry in enumerate(cast("list[object]", spec["sides"])):
        side = _check_table(entry, f"sides[{index}]", ("name", "model", "brief"), ("name",))
        yield Side(side["name"], side.get("model") or model, side.get("brief", ""))


def _iter_steps(spec: WorkflowSpec) -> Iterator[Step]:
    for index, entry in enumerate(cast("list[object]", spec["steps"])):
        keys = ("name", "prompt", "schema", "attempts")
        step = _check_table(entry, f"steps[{index}]", keys, ("name", "prompt"))
        form = _load_schema(step["schema"], spec) if "schema" in step else None
        yield Step(step["name"], step["prompt"], form, step.get("attempts", 3))


def _build_judge(kind: WorkflowKind, spec: WorkflowSpec, model: str) -> Any:
    table = _check_table(spec["judge"], "judge", _JUDGE_KEYS, ())
    kinds = [key for key in ("function", "schema", "rubric") if table.get(key)]
    if len(kinds) != 1:
        raise InvalidWorkflow("a judge needs one of function, schema or rubric")
    match kinds[0]:
        case "function":
            function = load_function(table["function"], spec.get("folder", ""))
            return _report_failures(function, table["function"])
        case "schema" if kind == "debate":
            raise InvalidWorkflow("the judge of a debate must be a function or a rubric")
        case "schema":
            return _load_schema(table["schema"], spec)
        case _:
            return ModelJudge(table.get("model") or model, table["rubric"])


def _report_failures(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Return the function of a judge with its exceptions raised as ``InvalidWorkflow``."""

    async def judge(subject: Any) -> Any:
        try:
            return await await_value(function(subject))
        except KedgeError:
            raise
        except Exception as error:
            problem = f"the judge {path!r} failed: {type(error).__name__}: {error}; correct it"
            raise InvalidWorkflow(problem) from error

    return judge


def _load_schema(schema: object, spec: WorkflowSpec) -> Any:
    """Return a schema from a table or from the name of a JSON file."""
    if not isinstance(schema, str):
        return schema
    return _read_file(Path(spec.get("folder", ""), schema), json.loads, "JSON")


def _check_table(
    data: object, location: str, keys: tuple[str, ...], required: tuple[str, ...]
) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidWorkflow(f"{location} must be a table")
    table = cast("dict[str, Any]", data)
    unknown = sorted(set(table) - set(keys))
    if unknown:
        allowed = ", ".join(key for key in keys if key != "folder")
        raise InvalidWorkflow(
            f"{location} has the unknown member {unknown[0]!r}; it may have {allowed}"
        )
    for key in required:
        if not isinstance(table.get(key), str) or not table[key]:
            raise InvalidWorkflow(f"{location} needs {key!r}, a text")
    for key, value in table.items():
        types, expected = _MEMBER_TYPES.get(key, (str, "a text"))
        if not isinstance(value, types) or isinstance(value, bool):
            raise InvalidWorkflow(f"{location}.{key} must be {expected}")
    return table


def load_function(path: str, folder: str | None = None) -> Callable[..., Any]:
    """Import the function at ``module:function``; a module in the folder comes before installed ones."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise InvalidWorkflow(f"a function is named as module:function, not {path!r}")
    try:
        module = _import_module(module_name, folder)
    except Exception as error:
        problem = f"cannot import {module_name!r} for {path!r}: {type(error).__name__}: {error}"
        raise InvalidWorkflow(problem) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        problem = f"{module_name!r} has no function named {name!r}"
        similar = find_similar(name, names)
        if similar:
            problem = f"{problem}; did you mean {similar!r}?"
        raise InvalidWorkflow(problem)
    return function


def _import_module(name: str, folder: str | None) -> ModuleType:
    file = Path(folder or "", f"{name}.py")
    if folder is None or not name.isidentifier() or not file.is_file():
        return importlib.import_module(name)
    module_spec = importlib.util.spec_from_file_location(f"kedge_workflow_{name}", file)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{file} is not a module")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up the module of their fields
    module_spec.loader.exec_module(module)
    return module
