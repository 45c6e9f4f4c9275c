"""Incremental requests for programs that are not written for Kedge: `chain` a client, or run `kedge proxy`."""

from kedge.chaining.client import chain, chain_report, unchain
from kedge.chaining.index import MemoryIndex, ResponseIndex, StoreIndex
from kedge.chaining.report import ChainedRequest, ChainReport
from kedge.chaining.rewrite import PASS_THROUGH_REASONS
from kedge.planning.anchor_index import IndexedResponse

__all__ = [
    "PASS_THROUGH_REASONS",
    "ChainReport",
    "ChainedRequest",
    "IndexedResponse",
    "MemoryIndex",
    "ResponseIndex",
    "StoreIndex",
    "chain",
    "chain_report",
    "unchain",
]
