"""What changed between two Turns, block by block, followed by local id."""

from bisect import bisect_left
from dataclasses import dataclass

from kedge.turns.blocks import Block
from kedge.turns.turn import Turn


@dataclass(frozen=True, slots=True)
class TurnDiff:
    """The difference between two Turns.

    ``modified`` pairs the old and the new block of one id whose content differs; ``moved`` are blocks
    of the new Turn that stand in another order among those that both Turns have.
    """

    added: tuple[Block, ...] = ()
    removed: tuple[Block, ...] = ()
    modified: tuple[tuple[Block, Block], ...] = ()
    moved: tuple[Block, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.modified or self.moved)

    def __str__(self) -> str:
        lines = [
            *(f"+ {block!r}" for block in self.added),
            *(f"- {block!r}" for block in self.removed),
            *(f"~ {old!r} -> {new!r}" for old, new in self.modified),
            *(f"> {block!r}" for block in self.moved),
        ]
        return "\n".join(lines) or "no difference"


def diff(old: Turn, new: Turn) -> TurnDiff:
    """Tell which blocks were added, removed, edited in place or moved from ``old`` to ``new``."""
    before = {block.id: block for block in old.blocks}
    after = {block.id: block for block in new.blocks}
    stayed = [block for block in new.blocks if block.id in before]
    return TurnDiff(
        added=tuple(block for block in new.blocks if block.id not in before),
        removed=tuple(block for block in old.blocks if block.id not in after),
        modified=tuple((before[b.id], b) for b in stayed if before[b.id] != b),
        moved=_find_moved(old, stayed),
    )


def _find_moved(old: Turn, common: list[Block]) -> tuple[Block, ...]:
    """The fewest blocks that explain a new order: all but a longest run that kept its order."""
    place = {block.id: index for index, block in enumerate(old.blocks)}
    kept = _longest_increasing_indices([place[block.id] for block in common])
    return tuple(block for index, block in enumerate(common) if index not in kept)


def _longest_increasing_indices(values: list[int]) -> set[int]:
    """The indices of a longest increasing subsequence of distinct values (patience sorting)."""
    tops: list[int] = []
    top_indices: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        pile = bisect_left(tops, value)
        before.append(top_indices[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(value)
            top_indices.append(index)
        else:
            tops[pile] = value
            top_indices[pile] = index
    kept: set[int] = set()
    index = top_indices[-1] if top_indices else -1
    while index >= 0:
        kept.add(index)
        index = before[index]
    return kept
