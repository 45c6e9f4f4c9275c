"""What strictness costs: checking a request against parsing it, and a turn against its chain."""

import json
from typing import Any

from benchmarks.table import Row, compare_cpu
from kedge.server.coherence import EMPTY_COHERENCE, Coherence, check_request
from kedge.server.schema.requests import check_create, parse_body

BASELINE = "parsing the body"
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Good morning.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
]
NEW_ITEMS = [{"role": "user", "content": "And now?", "id": "msg_new"}]


class NoItems:
    """A server without stored items."""

    def find_item(self, id: str) -> None:  # noqa: A002 - the name in the protocol
        """Return None."""

    def find_reasoning_before(self, id: str) -> None:  # noqa: A002
        """Return None."""


NO_ITEMS = NoItems()


def run() -> list[Row]:
    return [*measure_checks(), *measure_chains()]


def measure_checks() -> list[Row]:
    """Check a body of 200 items, beside reading it from JSON."""
    body: Any = {"model": "practice", "input": ITEMS * 50}
    raw = json.dumps(body).encode()
    check, parse = compare_cpu(lambda: check_create(body), lambda: parse_body(raw), number=20)
    return [
        Row("checking an item", check / 200 * 1e6, limit=20, unit="µs", detail="of 200 in a body"),
        Row("checking a body / parsing it", check / parse, detail=f"{len(raw)} bytes"),
    ]


def measure_chains() -> list[Row]:
    """Judge and extend a turn at the end of a long chain, beside a short one."""
    short, long = build_chain(5), build_chain(2_000)
    near, far = compare_cpu(lambda: check_turn(short), lambda: check_turn(long), number=2_000)
    return [
        Row("a turn's coherence at depth 2,000", far / near, limit=3, baseline="depth 5"),
        Row("a turn's coherence at depth 2,000", far * 1e6, unit="µs"),
    ]


def build_chain(depth: int) -> Coherence:
    state = EMPTY_COHERENCE
    for number in range(depth):
        call_id = f"call_{number}"
        state = state.extend(
            [
                {"id": f"msg_{number}", "role": "user", "content": "Hello."},
                {"id": f"fc_{number}", "type": "function_call", "call_id": call_id},
                {"id": f"fco_{number}", "type": "function_call_output", "call_id": call_id},
            ]
        )
    return state


def check_turn(state: Coherence) -> None:
    check_request(state, NEW_ITEMS, NO_ITEMS)
    state.extend(NEW_ITEMS)
