"""Incremental requests for programs that are not written for Kedge: `chain` a client, or run `kedge proxy`."""

from kedge.chaining.client import chain, chain_report, unchain
from kedge.chaining.index import AnchorIndex, IndexedResponse, MemoryIndex, StoreIndex
from kedge.chaining.report import ChainedRequest, ChainReport
from kedge.chaining.rewrite import PASS_THROUGH_REASONS

__all__ = [
    "PASS_THROUGH_REASONS",
    "AnchorIndex",
    "ChainReport",
    "ChainedRequest",
    "IndexedResponse",
    "MemoryIndex",
    "StoreIndex",
    "chain",
    "chain_report",
    "unchain",
]
