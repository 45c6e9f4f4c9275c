"""Triggers made of triggers: any of them, or all of them."""

from kedge.compaction.protocol import CompactionRequest, CompactionTrigger, resolved


class AnyTrigger:
    """Compacts when one of its triggers would; the later ones are asked only if needed."""

    def __init__(self, *triggers: CompactionTrigger) -> None:
        self.triggers = triggers

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Whether one of them says so."""
        for trigger in self.triggers:
            if await resolved(trigger.should_compact(request)):
                return True
        return False


class AllTriggers:
    """Compacts when all of its triggers would; without any, never."""

    def __init__(self, *triggers: CompactionTrigger) -> None:
        self.triggers = triggers

    async def should_compact(self, request: CompactionRequest) -> bool:
        """Whether all of them say so."""
        for trigger in self.triggers:
            if not await resolved(trigger.should_compact(request)):
                return False
        return bool(self.triggers)
