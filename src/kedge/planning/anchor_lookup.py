"""Find anchors by the tags of blocks, for display and for callers without records.

Blocks are tagged with the response that produced them. By its tags a response is a valid anchor if its blocks are
present and contiguous and, where a record exists, the record matches. Tags cannot reveal that a block was
edited in place, so engines use records only.
"""

from msgspec.structs import replace

from kedge.observe import get_logger
from kedge.planning.anchors import AnchorRecord, Reason, matches_prefix
from kedge.planning.digests import covered_count, get_prefix_index
from kedge.planning.state import get_state, set_state
from kedge.turns import Block, Turn

log = get_logger("kedge.planning")


def is_valid_anchor(turn: Turn, response_id: str) -> bool:
    """Return whether the blocks of a response are present, contiguous and, if recorded, unchanged.

    Args:
        turn: The Turn.
        response_id: The response.
    """
    return anchor_problem(turn, response_id) is None


def find_best_anchor(turn: Turn) -> str:
    """Return the newest response whose blocks form a valid anchor.

    Args:
        turn: The Turn.

    Returns:
        The id of the response, or an empty string.
    """
    indices: dict[str, list[int]] = {}
    for index, block in enumerate(turn.blocks):
        if block.response_id:
            indices.setdefault(block.response_id, []).append(index)
    records = {record.response_id: record for record in get_state(turn).anchors}
    newest_first = sorted(indices, key=lambda each: indices[each][-1], reverse=True)
    log.trace("responses in the Turn, newest first: %s", newest_first, turn_id=turn.id)
    for response_id in newest_first:
        problem = _find_problem(turn, indices[response_id], records.get(response_id))
        _log_check(turn, response_id, problem)
        if problem is None:
            log.debug("best anchor by tags: %s", response_id, turn_id=turn.id)
            return response_id
    log.debug("no valid anchor by tags among %d responses", len(newest_first), turn_id=turn.id)
    return ""


def drop_changed_anchors(turn: Turn) -> Turn:
    """Return the Turn without the anchor records that no longer match its blocks.

    Args:
        turn: A Turn whose blocks were edited.

    Returns:
        The Turn with the records of responses whose context is a prefix of it. Unless the newest response is
        one of them, the Turn is also detached from its conversation object, which has more items.
    """
    state = get_state(turn)
    index, covered = get_prefix_index(turn), covered_count(turn)
    matching = [record for record in state.anchors if matches_prefix(record, index, covered)]
    if len(matching) == len(state.anchors):
        return turn
    newest = max(matching, key=lambda record: record.block_count, default=None)
    previous = newest.response_id if newest else ""
    state = replace(state, anchors=tuple(matching))
    if previous != state.previous_response_id:
        state = replace(state, previous_response_id=previous, conversation_id="")
    return set_state(turn, state)


def blocks_after_response(turn: Turn, response_id: str) -> list[Block]:
    """Return the blocks after the last one of a response.

    Args:
        turn: The Turn.
        response_id: The response.

    Returns:
        The blocks; none if the Turn has no block of the response.
    """
    indices = _block_indices(turn, response_id)
    blocks = list(turn.blocks[indices[-1] + 1 :]) if indices else []
    log.debug("%d blocks after the response", len(blocks), response_id=response_id, turn_id=turn.id)
    return blocks


def anchor_problem(turn: Turn, response_id: str) -> Reason | None:
    """Return why a response is not a valid anchor by its tags.

    Args:
        turn: The Turn.
        response_id: The response.

    Returns:
        The reason, or None if it is a valid anchor.
    """
    problem = _find_problem(
        turn, _block_indices(turn, response_id), get_state(turn).anchor(response_id)
    )
    _log_check(turn, response_id, problem)
    return problem


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
    index = get_prefix_index(turn)
    ends_there = index.count(max(indices[-1] + 1 - turn.lead, 0)) == record.block_count
    covered = index.count(len(turn) - turn.lead)
    return None if ends_there and matches_prefix(record, index, covered) else "changed"


def _log_check(turn: Turn, response_id: str, problem: Reason | None) -> None:
    log.trace(
        "anchor is %s",
        f"not valid: {problem}" if problem else "valid",
        response_id=response_id,
        turn_id=turn.id,
    )


def _block_indices(turn: Turn, response_id: str) -> list[int]:
    if not response_id:
        return []
    return [i for i, block in enumerate(turn.blocks) if block.response_id == response_id]
