"""Recorded Turns and random anchor records for the tests of planning."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from kedge import planning
from kedge.turns import Block, Turn, assistant, block_from_item, tool_result, user
from strategies import texts

SCOPE = "here"
NOW = 1_000.0


def make_plan(turn: Turn, **options: Any) -> planning.RequestPlan:
    """Plan a request to the default server at the default time."""
    return planning.plan_request(turn, **{"scope": SCOPE, "now": NOW, **options})


def add_response(
    turn: Turn, response_id: str, *blocks: Block, scope: str = SCOPE, **facts: Any
) -> Turn:
    """Return the Turn after it was sent and answered with these blocks."""
    planned = make_plan(turn, scope=scope, mode=facts.pop("mode", "chained"))
    facts.setdefault("created_at", NOW)
    blocks = blocks or (assistant(f"answer of {response_id}"),)
    return planning.record_response(turn, blocks, response_id=response_id, plan=planned, **facts)


def make_exchanges(count: int, **facts: Any) -> Turn:
    """Return a Turn with this many questions and answers, with response ids R1, R2 and so on."""
    turn = Turn()
    for number in range(1, count + 1):
        turn = add_response(turn.append(user(f"question {number}")), f"R{number}", **facts)
    return turn


def reasoning_block(name: str, *, summary: str = "", encrypted: str | None = None) -> Block:
    """Return a reasoning block as received from a server."""
    return block_from_item(
        {
            "type": "reasoning",
            "id": f"rs_{name}",
            "summary": [{"type": "summary_text", "text": summary}] if summary else [],
            "encrypted_content": f"sealed {name}" if encrypted is None else encrypted,
        }
    )


def message_block(name: str) -> Block:
    """Return an assistant message as received from a server."""
    content = [{"type": "output_text", "text": f"answer {name}", "annotations": []}]
    item = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content}
    return block_from_item(item)


def call_block(name: str) -> Block:
    """Return a tool call as received from a server."""
    item = {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}", "name": "f"}
    return block_from_item({**item, "arguments": "{}"})


def compaction_block(name: str, **identity: Any) -> Block:
    """Return a compaction item as received from a server."""
    item = {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": f"folded {name}"}
    return block_from_item(item, **identity)


def item_ids(items: Sequence[dict[str, Any]]) -> list[str]:
    """Return the ids of items, with an empty string for an item without one."""
    return [item.get("id", "") for item in items]


def item_types(items: list[dict[str, Any]]) -> list[str]:
    """Return the type of each item, or the role of a message."""
    return [item["role"] if item["type"] == "message" else item["type"] for item in items]


def render_full(turn: Turn, scope: str = SCOPE) -> list[dict[str, Any]]:
    """Return the items of a full send to the default server."""
    return planning.render(turn, scope=scope)


def make_reasoning_turn() -> Turn:
    """Return a Turn with reasoning before a call, its result, and reasoning before the answer."""
    turn = add_response(Turn([user("u")]), "R1", reasoning_block("a"), call_block("a"))
    turn = turn.append(tool_result("call_a", "1"))
    return add_response(turn, "R2", reasoning_block("b"), message_block("b"))


times = st.floats(0, 1e10)


def records() -> st.SearchStrategy[planning.AnchorRecord]:
    """Return a strategy for anchor records with arbitrary values."""
    return st.builds(
        planning.AnchorRecord,
        response_id=st.sampled_from(["R1", "R2", "R3"]),
        scope=st.sampled_from(["a", "b"]),
        digest=texts(),
        block_count=st.integers(-1, 4),
        depth=st.integers(0, 9),
        root_created_at=times,
        status=st.sampled_from(["completed", "incomplete", "failed", "cancelled", "lost"]),
        stored=st.booleans(),
        created_at=st.sampled_from([0.0, 1.0, 2.0]) | times,
        expires_at=st.none() | times,
        barrier=st.none() | st.integers(0, 4),
        derived=st.lists(texts(), max_size=2).map(tuple),
        counted=st.none() | st.builds(planning.TokenCounts, *[st.integers(0, 9)] * 6),
    )
