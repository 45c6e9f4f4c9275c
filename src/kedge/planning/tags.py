"""Find anchors by the tags of blocks, without records.

By its tags a response is a valid anchor if its blocks are present and contiguous and, where a record exists, the record
matches. Tags cannot reveal that a block was edited in place, so they are for display and for callers without records;
engines use records only.
"""

from collections.abc import Mapping
from math import inf

from kedge._internal.argument_types import checked
from kedge.observe import get_logger
from kedge.planning import anchors
from kedge.planning.anchors import AnchorRecord, Reason, get_state, select_matching
from kedge.planning.digests import get_prefix_index
from kedge.turns import Block, Turn

log = get_logger("kedge.planning")


def is_valid_anchor(turn: Turn, response_id: str) -> bool:
    """Return whether the blocks of a response are present, contiguous and, if recorded, unchanged.

    Args:
        turn: The Turn.
        response_id: The response.
    """
    return invalid_anchor_reason(turn, response_id) is None


def find_best_anchor(turn: Turn) -> str:
    """Return the newest response whose blocks form a valid anchor.

    Args:
        turn: The Turn.

    Returns:
        The id of the response, or an empty string.
    """
    indices = _group_by_response(turn)
    newest_first = sorted(indices, key=lambda response_id: indices[response_id][-1], reverse=True)
    log.trace("responses in the Turn, newest first: %s", newest_first, turn_id=turn.id)
    for response_id in newest_first:
        if _check_anchor(turn, response_id, indices) is None:
            log.debug("best anchor by tags: %s", response_id, turn_id=turn.id)
            return response_id
    log.debug("no valid anchor by tags among %d responses", len(newest_first), turn_id=turn.id)
    return ""


@checked
def blocks_after_response(turn: Turn, response_id: str) -> list[Block]:
    """Return the blocks after the last one of a response.

    Args:
        turn: The Turn.
        response_id: The response.

    Returns:
        The blocks; none if the Turn has no block of the response.
    """
    indices = _group_by_response(turn).get(response_id)
    blocks: list[Block] = []
    if indices:
        blocks.extend(turn[indices[-1] + 1 :])
    log.debug("%d blocks after the response", len(blocks), response_id=response_id, turn_id=turn.id)
    return blocks


def invalid_anchor_reason(turn: Turn, response_id: str) -> Reason | None:
    """Return why a response is not a valid anchor by its tags.

    Args:
        turn: The Turn.
        response_id: The response.

    Returns:
        The reason, or None if it is a valid anchor.
    """
    return _check_anchor(turn, response_id, _group_by_response(turn))


def _check_anchor(turn: Turn, response_id: str, indices: Mapping[str, list[int]]) -> Reason | None:
    record = get_state(turn).anchor(response_id)
    problem = _find_problem(turn, indices.get(response_id, []), record)
    validity = f"not valid: {problem}" if problem else "valid"
    log.trace("anchor is %s", validity, response_id=response_id, turn_id=turn.id)
    return problem


def _find_problem(turn: Turn, indices: list[int], record: AnchorRecord | None) -> Reason | None:
    if not indices:
        return "unproven"
    if indices[-1] - indices[0] + 1 != len(indices):
        return "split"
    if record is None:
        return None
    # Whatever its scope and expiry.
    reason = anchors.unavailable_reason(record, record.scope, -inf)
    if reason:
        return reason
    end = get_prefix_index(turn).count(max(indices[-1] + 1 - turn.lead, 0))
    if end != record.block_count or not select_matching(turn, [record]):
        return "changed"
    return None


def _group_by_response(turn: Turn) -> dict[str, list[int]]:
    """Return the indices of the blocks of each response."""
    indices: dict[str, list[int]] = {}
    for index, block in enumerate(turn):
        if block.response_id:
            indices.setdefault(block.response_id, []).append(index)
    return indices
