"""``SplitCompactor``: any trigger with any strategy."""

from kedge.compaction.protocol import (
    CompactionRequest,
    CompactionResult,
    CompactionStrategy,
    CompactionTrigger,
    compact_when,
    named,
)


class SplitCompactor:
    """Compacts by ``strategy`` when ``trigger`` says so."""

    def __init__(self, trigger: CompactionTrigger, strategy: CompactionStrategy) -> None:
        self.trigger = trigger
        self.strategy = strategy
        self.name = f"{named(trigger)}+{named(strategy)}"

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Compact, if it is time to."""
        return await compact_when(self.trigger, self.strategy, request, by=self.name)
