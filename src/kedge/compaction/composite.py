"""``CompositeCompactor``: several compactors, one after the other."""

from dataclasses import replace

from kedge.compaction.protocol import CompactionRequest, CompactionResult, Compactor, unchanged
from kedge.compaction.running import attempt
from kedge.events import Usage
from kedge.turns import Turn, diff


class CompositeCompactor:
    """Runs compactors in order; each sees what the one before has left.

    One that fails is passed over, with a note.
    """

    name = "CompositeCompactor"

    def __init__(self, *compactors: Compactor) -> None:
        self.compactors = compactors

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Let each compactor do its part."""
        result, step = unchanged(request, self.name), request
        for compactor in self.compactors:
            done = await attempt(compactor, step)
            step = step.followed_by(done)
            result = _joined(result, done)
        changes = diff(Turn(request.blocks), Turn(result.blocks))
        return replace(result, changes=changes)


def _joined(first: CompactionResult, second: CompactionResult) -> CompactionResult:
    """Both results as one; the changes are those of the second, and are worked out anew later."""
    together = replace(
        second,
        notes=(*first.notes, *second.notes),
        usage=_sum(first.usage, second.usage),
    )
    if first.changed and second.changed:
        return replace(together, by=f"{first.by}, {second.by}", tokens_before=first.tokens_before)
    if second.changed:
        return together
    return replace(first, notes=together.notes, usage=together.usage)


def _sum(one: Usage | None, other: Usage | None) -> Usage | None:
    return one + other if one and other else one or other
