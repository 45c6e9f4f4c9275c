"""A conversation looked at as the planner sees it: blocks, tokens, the plan."""

from dataclasses import dataclass
from typing import Any

from kedge.compaction.counting import DEFAULT_BLOCK_COUNTER
from kedge.config import mask_url
from kedge.conversation import find_anchors
from kedge.planning import REASONS, RequestPlan
from kedge.providers import connect
from kedge.store import ConversationRow, Store
from kedge.turns import Turn, user
from kedge.turns.show import describe


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found."""

    row: ConversationRow
    node: int
    model: str
    turn: Turn
    tokens: tuple[int, ...]
    plan: RequestPlan

    @property
    def sent(self) -> set[str]:
        """The ids of the blocks that would be sent; leading system text goes with every request."""
        lead = {block.id for block in self.turn.blocks[: self.turn.lead]}
        left_out = {block.id for block in self.plan.left_out}
        return (lead | {block.id for block in self.plan.delta}) - left_out

    @property
    def full_tokens(self) -> int:
        """The tokens of a full send."""
        return sum(self.tokens)

    @property
    def saved_tokens(self) -> int:
        """The tokens of the blocks that are not sent."""
        sent = self.sent
        pairs = zip(self.turn.blocks, self.tokens, strict=True)
        return sum(tokens for block, tokens in pairs if block.id not in sent)

    def report(self) -> dict[str, Any]:
        """All of it as JSON."""
        plan, sent = self.plan, self.sent
        return {
            "conversation": self.row.id,
            "node": self.node,
            "model": mask_url(self.model),
            "blocks": [
                {
                    "id": block.id,
                    "kind": block.kind,
                    "origin": block.origin,
                    "response": block.response_id or None,
                    "tokens": tokens,
                    "sent": block.id in sent,
                    "content": describe(block, 200),
                }
                for block, tokens in zip(self.turn.blocks, self.tokens, strict=True)
            ],
            "plan": {
                "mode": plan.mode,
                "anchor": plan.anchor.response_id if plan.anchor else None,
                "sent_blocks": plan.delta_blocks,
                "full_blocks": plan.full_blocks,
                "sent_bytes": plan.delta_bytes,
                "full_bytes": plan.full_bytes,
                "saved_bytes": plan.full_bytes - plan.delta_bytes,
                "saved_tokens": self.saved_tokens,
                "fallback": plan.fallback,
                "rejected": [
                    {"response": r.response_id, "reason": r.reason, "words": REASONS[r.reason]}
                    for r in plan.rejected
                ],
                "problems": [str(problem) for problem in plan.problems],
                "explanation": plan.explain(),
            },
        }


async def inspect(
    store: Store, row: ConversationRow, node: int, model: str, said: str = ""
) -> Inspection:
    """Look at a conversation up to a node, as a request to this model would."""
    turn = (await store.load(row, node)).turn(row.id)
    if said:
        turn = turn.append(user(said))
    async with connect(model, **({"mode": row.mode} if row.mode else {})) as engine:
        scope: str = getattr(engine, "scope", "")
        found = await find_anchors(store, turn, scope)
        plan = engine.plan(turn, candidates=tuple(found))
    counted = tuple(DEFAULT_BLOCK_COUNTER.count_block(block) for block in turn.blocks)
    return Inspection(row, node, model, turn, counted, plan)
