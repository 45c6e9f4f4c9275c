"""Compaction: replacing old blocks by fewer. Triggers say when, strategies how, compactors both."""

from kedge.compaction.boundaries import advance_to_first_user_message, cut_points
from kedge.compaction.composite import CompositeCompactor
from kedge.compaction.counting import BlockCounter
from kedge.compaction.message_limit import MessageLimitCompactor
from kedge.compaction.protocol import (
    CompactionRequest,
    CompactionResult,
    CompactionStrategy,
    CompactionTrigger,
    Compactor,
    Occasion,
    Replacement,
    TurnCompacted,
)
from kedge.compaction.provider_counter import ProviderCounter
from kedge.compaction.running import attempt, compacted
from kedge.compaction.server import ServerCompactor
from kedge.compaction.split import SplitCompactor
from kedge.compaction.summarising import SummarisingCompactor, is_summary
from kedge.compaction.token_limit import TokenLimitCompactor
from kedge.compaction.tool_exchange import ToolExchangeCompactor
from kedge.compaction.triggers import AllTriggers, AnyTrigger

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
    "SummarisingCompactor",
    "TokenLimitCompactor",
    "ToolExchangeCompactor",
    "TurnCompacted",
    "advance_to_first_user_message",
    "attempt",
    "compacted",
    "cut_points",
    "is_summary",
]
