"""Decide what to send for a Turn: digests, anchor records and request plans."""

from kedge.planning.added_results import check_added_results
from kedge.planning.anchors import (
    DEFAULT_RETENTION,
    REASONS,
    AnchorRecord,
    ConversationState,
    Mode,
    Reason,
    RejectedAnchor,
    Status,
    TokenCounts,
    drop_anchors,
    find_running,
    get_state,
    record_response,
    set_state,
    tag_blocks,
)
from kedge.planning.cache_plan import CachePlan, CacheRules
from kedge.planning.digests import Problem, canonical, covered_count, prefix_digest
from kedge.planning.plan import RequestPlan, find_problems, plan_request
from kedge.planning.render import build_input_from_blocks, get_instructions, render
from kedge.planning.sent_request import SentRequest, record_running
from kedge.planning.tags import (
    blocks_after_response,
    find_best_anchor,
    invalid_anchor_reason,
    is_valid_anchor,
)

__all__ = [
    "DEFAULT_RETENTION",
    "REASONS",
    "AnchorRecord",
    "CachePlan",
    "CacheRules",
    "ConversationState",
    "Mode",
    "Problem",
    "Reason",
    "RejectedAnchor",
    "RequestPlan",
    "SentRequest",
    "Status",
    "TokenCounts",
    "blocks_after_response",
    "build_input_from_blocks",
    "canonical",
    "check_added_results",
    "covered_count",
    "drop_anchors",
    "find_best_anchor",
    "find_problems",
    "find_running",
    "get_instructions",
    "get_state",
    "invalid_anchor_reason",
    "is_valid_anchor",
    "plan_request",
    "prefix_digest",
    "record_response",
    "record_running",
    "render",
    "set_state",
    "tag_blocks",
]
