"""Record a response: tag its blocks, append them, and add an anchor record; find anchors by these tags.

By its tags a response is a valid anchor if its blocks are present and contiguous and, where a record exists, the record
matches. Tags cannot reveal that a block was edited in place, so they are for display and for callers without records;
engines use records only.
"""

from collections.abc import Iterable, Mapping
from math import inf

from msgspec.structs import replace

from kedge.observe import get_logger
from kedge.planning import anchors
from kedge.planning.anchors import AnchorRecord, Reason, get_state, select_matching
from kedge.planning.digests import get_prefix_index, prefix_digest
from kedge.planning.plan import RequestPlan
from kedge.planning.render import ENGINE_ORIGIN, base_scope, conversation_scope, derived_digests
from kedge.turns import Block, Source, Turn

log = get_logger("kedge.planning")

MAX_STALE_ANCHORS = 64
"""The number of records that no longer match and are retained, in case an edit is undone."""


def tag_blocks(blocks: Iterable[Block], response_id: str) -> list[Block]:
    """Tag blocks with the response that produced them and their position in its output.

    Args:
        blocks: The blocks in output order.
        response_id: The response; may be empty.

    Returns:
        The tagged blocks.
    """
    tagged: list[Block] = []
    for position, block in enumerate(blocks):
        known = block.source or Source()
        is_placed = known.output_index is not None and response_id in ("", known.response_id)
        if block.origin != ENGINE_ORIGIN or not is_placed:
            index = position if known.output_index is None else known.output_index
            source = Source(response_id or known.response_id, known.item_id, index)
            block = replace(block, origin=ENGINE_ORIGIN, source=source)  # noqa: PLW2901
        tagged.append(block)
    return tagged


def record_response(
    turn: Turn,
    blocks: Iterable[Block],
    *,
    response_id: str,
    plan: RequestPlan,
    created_at: float,
    status: anchors.Status = "completed",
    stored: bool = True,
    retention: float | None = anchors.DEFAULT_RETENTION,
    conversation_id: str = "",
    head: bool = True,
    counted: anchors.TokenCounts | None = None,
) -> Turn:
    """Append the blocks of a response to the Turn that was sent, and record an anchor.

    No anchor is recorded for a response without an id, or if ``plan`` was made for another Turn, because the
    context of the response is then unknown.

    Args:
        turn: The Turn that was sent.
        blocks: The blocks of the response.
        response_id: The id of the response; may be empty.
        plan: The plan that the request was built from.
        created_at: When the response was created, in seconds since the epoch.
        status: The status of the response.
        stored: Whether the server was asked to store it.
        retention: Seconds for which the server stores it; None if it does not expire.
        conversation_id: The server-side conversation object that was used, if any.
        head: Whether the response becomes the state's ``previous_response_id``; false for an API that
            stores nothing.
        counted: The tokens that the server counted for the request.

    Returns:
        The Turn with the blocks and the record.
    """
    was_sent = turn is plan.source or prefix_digest(turn) == plan.digest
    output = tag_blocks(blocks, response_id)
    turn = turn.append(*output)
    log.debug("tagged %d blocks", len(output), response_id=response_id, turn_id=turn.id)
    if not response_id or not was_sent:
        log.debug("no anchor: the response has no id, or another Turn was sent", turn_id=turn.id)
        return turn
    parent, index = plan.anchor, get_prefix_index(turn)
    covered, start = index.count(turn.body_length), turn.body_length - len(output)
    derived = derived_digests(output)
    # The server's memory starts at a compaction in the output, or as planned.
    compactions = [at for at in index.barriers if start <= at < turn.body_length] if derived else ()
    record = AnchorRecord(
        response_id=response_id,
        scope=conversation_scope(plan.scope, conversation_id) if conversation_id else plan.scope,
        digest=index.digest(covered),
        block_count=covered,
        depth=parent.depth + 1 if parent else 1,
        root_created_at=parent.root_created_at or parent.created_at if parent else created_at,
        status=status,
        stored=stored,
        created_at=created_at,
        expires_at=None if retention is None else created_at + retention,
        barrier=index.count(compactions[-1]) if compactions else plan.barrier,
        derived=derived,
        counted=counted,
    )
    state = prune_anchors(get_state(turn).with_anchor(record), turn)
    if status == "completed" and head:
        state = replace(state, previous_response_id=response_id, conversation_id=conversation_id)
    return anchors.set_state(turn, state)


def find_running(turn: Turn, scope: str | None = None) -> AnchorRecord | None:
    """Return the record of the response that answers a Turn and is still generated in the background.

    Args:
        turn: The Turn as it was sent.
        scope: The provider, endpoint and account; any by default.

    Returns:
        The record, or None if there is no such response, or if the Turn was changed since.
    """
    for record in reversed(get_state(turn).anchors):
        if record.status != "running" or not record.block_count:
            continue
        is_known = scope is None or base_scope(record.scope) == base_scope(scope)
        if is_known and record.digest == prefix_digest(turn):
            return record
    return None


def prune_anchors(state: anchors.ConversationState, turn: Turn) -> anchors.ConversationState:
    """Drop the oldest records that no longer match, once there are more of them than of others.

    A conversation that is edited or compacted again and again would otherwise accumulate them.
    """
    if len(state.anchors) <= 2 * (turn.body_length + MAX_STALE_ANCHORS):
        return state
    matching = {id(record) for record in select_matching(turn, state.anchors)}
    stale = [record for record in state.anchors if id(record) not in matching]
    dropped = sorted(stale, key=lambda record: record.created_at)[:-MAX_STALE_ANCHORS]
    kept = {id(record) for record in state.anchors} - {id(record) for record in dropped}
    return replace(state, anchors=tuple(each for each in state.anchors if id(each) in kept))


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
    indices = _group_by_response(turn)
    newest_first = sorted(indices, key=lambda each: indices[each][-1], reverse=True)
    log.trace("responses in the Turn, newest first: %s", newest_first, turn_id=turn.id)
    found = next((each for each in newest_first if not _check_anchor(turn, each, indices)), "")
    if found:
        log.debug("best anchor by tags: %s", found, turn_id=turn.id)
    else:
        log.debug("no valid anchor by tags among %d responses", len(newest_first), turn_id=turn.id)
    return found


def drop_changed_anchors(turn: Turn) -> Turn:
    """Return the Turn without the anchor records that no longer match its blocks, except the newest of these.

    That one is the reason why the next request is sent in full.

    Args:
        turn: A Turn whose blocks were edited.

    Returns:
        The Turn. Unless the context of the newest response is a prefix of it, the Turn is also detached from its
        conversation object, which has more items.
    """
    state = get_state(turn)
    matching = select_matching(turn, state.anchors)
    if len(matching) == len(state.anchors):
        return turn
    newest = max(matching, key=lambda record: record.block_count, default=None)
    previous = newest.response_id if newest else ""
    changed = [record for record in state.anchors if record not in matching]
    last_changed = max(changed, key=lambda record: (record.created_at, record.block_count))
    state = replace(state, anchors=(*matching, last_changed))
    if previous != state.previous_response_id:
        state = replace(state, previous_response_id=previous, conversation_id="")
    return anchors.set_state(turn, state)


def blocks_after_response(turn: Turn, response_id: str) -> list[Block]:
    """Return the blocks after the last one of a response.

    Args:
        turn: The Turn.
        response_id: The response.

    Returns:
        The blocks; none if the Turn has no block of the response.
    """
    indices = _group_by_response(turn).get(response_id)
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
    if reason := anchors.unavailable_reason(record, record.scope, -inf):
        return reason
    end = get_prefix_index(turn).count(max(indices[-1] + 1 - turn.lead, 0))
    is_unchanged = end == record.block_count and select_matching(turn, [record])
    return None if is_unchanged else "changed"


def _group_by_response(turn: Turn) -> dict[str, list[int]]:
    """Return the indices of the blocks of each response."""
    indices: dict[str, list[int]] = {}
    for index, block in enumerate(turn):
        if block.response_id:
            indices.setdefault(block.response_id, []).append(index)
    return indices
