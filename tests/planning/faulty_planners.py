"""Intentionally incorrect planners, each with a plausible mistake.

They replace the real planner in the simulation, to show that the laws can fail.
"""

from typing import Any

from msgspec import structs

from kedge.planning import RequestPlan, blocks_after_response, get_state, plan_request
from kedge.planning.digests import is_compaction
from kedge.turns import ReasoningBlock, Turn


def contiguity_only(turn: Turn, **options: Any) -> RequestPlan:
    """Chain on the newest response whose tagged blocks are contiguous, without checking a digest."""
    positions: dict[str, list[int]] = {}
    for index, block in enumerate(turn.blocks):
        positions.setdefault(block.response_id, []).append(index)
    for name in sorted(positions, key=lambda each: positions[each][-1], reverse=True):
        indexes = positions[name]
        if name and indexes[-1] - indexes[0] + 1 == len(indexes):
            return _plan_chained(turn, name, options)
    return plan_request(turn, **options)


def resend_encrypted(turn: Turn, **options: Any) -> RequestPlan:
    """Send all encrypted content again, to any server."""
    plan = plan_request(turn, **options)
    encrypted = (b for b in plan.delta if isinstance(b, ReasoningBlock) or is_compaction(b))
    return structs.replace(plan, intact=frozenset(block.id for block in encrypted))


def _plan_chained(turn: Turn, response_id: str, options: dict[str, Any]) -> RequestPlan:
    """Return a plan that chains on this response without any check."""
    full = plan_request(turn, **{**options, "mode": "stateless"})
    record = get_state(turn).anchor(response_id)
    if record is None or options["mode"] != "chained":
        return full
    start = len(turn) - len(blocks_after_response(turn, response_id))
    return structs.replace(full, mode="chained", anchor=record, start=start, intact=frozenset())
