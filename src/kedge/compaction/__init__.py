"""Compaction: replace old blocks by fewer. Triggers decide when, strategies how, compactors both."""

from kedge.compaction.base import (
    AllTriggers,
    AnyTrigger,
    BlockCounter,
    CompactionRequest,
    CompactionResult,
    CompactionStrategy,
    CompactionTrigger,
    Compactor,
    Occasion,
    Replacement,
    TurnCompacted,
    advance_to_first_user_message,
    cut_points,
)
from kedge.compaction.compactors import (
    CompositeCompactor,
    MessageLimitCompactor,
    ProviderCounter,
    ServerCompactor,
    SplitCompactor,
    TokenLimitCompactor,
    compact_turn,
    run_compactor,
)
from kedge.compaction.summarize import SummarizingCompactor, is_summary
from kedge.compaction.tool_exchange import ToolExchangeCompactor

__all__ = [
    "AllTriggers",
    "AnyTrigger",
    "BlockCounter",
    "CompactionRequest",
    "CompactionResult",
    "CompactionStrategy",
    "CompactionTrigger",
    "Compactor",
    "CompositeCompactor",
    "MessageLimitCompactor",
    "Occasion",
    "ProviderCounter",
    "Replacement",
    "ServerCompactor",
    "SplitCompactor",
    "SummarizingCompactor",
    "TokenLimitCompactor",
    "ToolExchangeCompactor",
    "TurnCompacted",
    "advance_to_first_user_message",
    "compact_turn",
    "cut_points",
    "is_summary",
    "run_compactor",
]
