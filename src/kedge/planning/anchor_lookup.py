"""The structural view of anchors: tags on blocks, for people and tools that look at a Turn.

Blocks are tagged with the response that made them. A response can be an anchor, seen this way, if its
blocks are there, stand together with nothing in between, and, where a record exists, the record
proves. Tags alone cannot see an edit in place, so engines go by records alone; these
functions explain, and serve those who keep no records.
"""

from kedge.planning.anchors import AnchorRecord, Reason, matches_prefix
from kedge.planning.digests import get_prefix_index
from kedge.planning.state import get_state
from kedge.turns import Block, Turn


def is_valid_anchor(turn: Turn, response_id: str) -> bool:
    """Whether the blocks of this response stand together, unchanged as far as can be told."""
    return anchor_problem(turn, response_id) is None


def find_best_anchor(turn: Turn) -> str:
    """The newest response whose blocks form a valid anchor, or an empty string."""
    places: dict[str, list[int]] = {}
    for index, block in enumerate(turn.blocks):
        if block.response_id:
            places.setdefault(block.response_id, []).append(index)
    records = {record.response_id: record for record in get_state(turn).anchors}
    for response_id in sorted(places, key=lambda each: places[each][-1], reverse=True):
        if _find_problem(turn, places[response_id], records.get(response_id)) is None:
            return response_id
    return ""


def blocks_after_response(turn: Turn, response_id: str) -> list[Block]:
    """The blocks after the last one of this response; none if it made none."""
    places = _block_indices(turn, response_id)
    return list(turn.blocks[places[-1] + 1 :]) if places else []


def anchor_problem(turn: Turn, response_id: str) -> Reason | None:
    """Why this response cannot be an anchor, seen structurally; ``None`` if it can."""
    return _find_problem(
        turn, _block_indices(turn, response_id), get_state(turn).anchor(response_id)
    )


def _find_problem(turn: Turn, indices: list[int], record: AnchorRecord | None) -> Reason | None:
    if not indices:
        return "unproven"
    if indices[-1] - indices[0] + 1 != len(indices):
        return "split"
    if record is None:
        return None
    if record.status == "lost":
        return "lost"
    if record.status != "completed":
        return "incomplete"
    if not record.stored:
        return "unstored"
    ledger = get_prefix_index(turn)
    ends_there = ledger.count(max(indices[-1] + 1 - turn.lead, 0)) == record.block_count
    covered = ledger.count(len(turn.blocks) - turn.lead)
    return None if ends_there and matches_prefix(record, ledger, covered) else "changed"


def _block_indices(turn: Turn, response_id: str) -> list[int]:
    if not response_id:
        return []
    return [i for i, block in enumerate(turn.blocks) if block.response_id == response_id]
