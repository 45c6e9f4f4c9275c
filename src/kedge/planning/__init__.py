"""Digests, anchors and the plan: what to send, and why."""

from kedge.planning.anchors import REASONS, RETENTION, AnchorRecord, Reason, Rejected, Status
from kedge.planning.calls import Problem
from kedge.planning.canonical import canonical
from kedge.planning.ledger import covered_count, prefix_digest
from kedge.planning.plan import RequestPlan, find_problems, plan_request
from kedge.planning.record import record_response, tag_blocks
from kedge.planning.render import build_input_from_blocks, instructions_of, render
from kedge.planning.state import (
    MODES,
    ConversationState,
    Mode,
    dump_record,
    get_state,
    load_record,
    set_state,
)
from kedge.planning.structure import (
    anchor_problem,
    blocks_after_response,
    find_best_anchor,
    is_valid_anchor,
)

__all__ = [
    "MODES",
    "REASONS",
    "RETENTION",
    "AnchorRecord",
    "ConversationState",
    "Mode",
    "Problem",
    "Reason",
    "Rejected",
    "RequestPlan",
    "Status",
    "anchor_problem",
    "blocks_after_response",
    "build_input_from_blocks",
    "canonical",
    "covered_count",
    "dump_record",
    "find_best_anchor",
    "find_problems",
    "get_state",
    "instructions_of",
    "is_valid_anchor",
    "load_record",
    "plan_request",
    "prefix_digest",
    "record_response",
    "render",
    "set_state",
    "tag_blocks",
]
