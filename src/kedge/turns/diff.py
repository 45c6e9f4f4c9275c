"""Compare two Turns block by block, matched by local id."""

from bisect import bisect_left
from dataclasses import dataclass

from kedge.turns.blocks import Block
from kedge.turns.server_fields import select_members
from kedge.turns.turn import Turn


@dataclass(frozen=True, slots=True)
class TurnDiff:
    """The difference between two Turns; false if there is none.

    Attributes:
        added: Blocks that only the new Turn has.
        removed: Blocks that only the old Turn has.
        modified: The old and the new block of each id whose content differs.
        moved: Blocks of the new Turn that are in another order among those that both Turns have.
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
    """Compare two Turns.

    Args:
        old: The Turn before.
        new: The Turn after.

    Returns:
        Which blocks were added, removed, modified and moved.

    Example:
        >>> diff(turn, turn.append(user("Hi"))).added
    """
    before = {block.id: block for block in old.blocks}
    after = {block.id: block for block in new.blocks}
    common = [block for block in new.blocks if block.id in before]
    return TurnDiff(
        added=tuple(block for block in new.blocks if block.id not in before),
        removed=tuple(block for block in old.blocks if block.id not in after),
        modified=tuple((before[b.id], b) for b in common if _is_modified(before[b.id], b)),
        moved=_find_moved(old, common),
    )


def _is_modified(old: Block, new: Block) -> bool:
    """Return whether the content differs, or members of the provider's item such as its ``phase``."""
    return old != new or select_members(old.extra) != select_members(new.extra)


def _find_moved(old: Turn, common: list[Block]) -> tuple[Block, ...]:
    """Return the fewest blocks that explain a new order: all but a longest ordered subsequence."""
    positions = {block.id: index for index, block in enumerate(old.blocks)}
    ordered = _longest_increasing_indices([positions[block.id] for block in common])
    return tuple(block for index, block in enumerate(common) if index not in ordered)


def _longest_increasing_indices(values: list[int]) -> set[int]:
    """Return the indices of a longest increasing subsequence of distinct values (patience sorting)."""
    tops: list[int] = []
    top_indices: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        pile = bisect_left(tops, value)
        before.append(top_indices[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [value]  # on top of its pile, or on a new one
        top_indices[pile : pile + 1] = [index]
    selected: set[int] = set()
    index = top_indices[-1] if top_indices else -1
    while index >= 0:
        selected.add(index)
        index = before[index]
    return selected
