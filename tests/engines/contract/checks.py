"""Checks and tools shared by the contract tests of every engine."""

import json
from typing import Any

from engines.runs import last_context
from kedge.testing import TestServer
from kedge.turns import Turn
from normalization import expected_context, normalize_items

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


def flatten(items: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return one entry per message part, with parsed arguments, so that all APIs compare equal."""
    events: list[tuple[Any, ...]] = []
    for kind, *rest in items:
        if kind == "function call":
            call_id, name, arguments = rest
            events.append((kind, call_id, name, json.loads(arguments)))
        elif kind in ("user", "assistant", "system", "developer"):
            events += [(kind, *part) for part in rest]
        else:
            events.append((kind, *rest))
    return events


def check_law(server: TestServer, turn: Turn) -> None:
    """Check that the model's context equals the Turn without its last answer and leading system text."""
    saw = flatten(normalize_items(last_context(server)))
    while saw and saw[0][0] == "system":
        saw.pop(0)
    assert saw == flatten(expected_context(turn))
