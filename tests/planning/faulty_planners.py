"""Intentionally incorrect planners, each with a plausible mistake.

They replace the real planner in the simulation, to show that the laws can fail.
"""

from typing import Any

from msgspec import structs

from kedge.planning import RequestPlan, blocks_after_response, get_state, plan_request
from kedge.planning.digests import is_compaction
from kedge.turns import ReasoningBlock, Turn, dump_block


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


def latest_only(turn: Turn, **options: Any) -> RequestPlan:
    """Check the digest of the latest response only, and send everything if it does not match."""
    plan = plan_request(turn, **options)
    latest = get_state(turn).previous_response_id
    if not plan.anchor or plan.anchor.response_id == latest:
        return plan
    return structs.replace(plan_request(turn, **{**options, "mode": "stateless"}), mode=plan.mode)


def trust_latest(turn: Turn, **options: Any) -> RequestPlan:
    """Chain on the latest completed response without any check."""
    latest = get_state(turn).previous_response_id
    return _plan_chained(turn, latest, options) if latest else plan_request(turn, **options)


def resend_encrypted(turn: Turn, **options: Any) -> RequestPlan:
    """Send all encrypted content again, to any server."""
    plan = plan_request(turn, **options)
    encrypted = (b for b in plan.delta if isinstance(b, ReasoningBlock) or is_compaction(b))
    return structs.replace(plan, intact=frozenset(block.id for block in encrypted))


class RawDigests:
    """A planner that compares prefixes as they are stored, including ids and metadata."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[Any]] = {}

    def on_record(self, turn: Turn, response_id: str) -> None:
        """Store the JSON form of the Turn's blocks for a response."""
        self.recorded[response_id] = [dump_block(block) for block in turn.body]

    def __call__(self, turn: Turn, **options: Any) -> RequestPlan:
        """Chain only if no stored block has changed at all."""
        plan = plan_request(turn, **options)
        retained = self.recorded.get(plan.anchor.response_id, []) if plan.anchor else []
        if retained == [dump_block(block) for block in turn.body[: len(retained)]]:
            return plan
        return structs.replace(
            plan_request(turn, **{**options, "mode": "stateless"}), mode=plan.mode
        )


def _plan_chained(turn: Turn, response_id: str, options: dict[str, Any]) -> RequestPlan:
    """Return a plan that chains on this response without any check."""
    full = plan_request(turn, **{**options, "mode": "stateless"})
    record = get_state(turn).anchor(response_id)
    if record is None or options["mode"] != "chained":
        return full
    start = len(turn) - len(blocks_after_response(turn, response_id))
    return structs.replace(full, mode="chained", anchor=record, start=start, intact=frozenset())
