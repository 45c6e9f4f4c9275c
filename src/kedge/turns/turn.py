"""Turn: the ordered blocks of a conversation so far, immutable.

Every operation returns a new Turn. Turns that grew from one another share what was derived from their
common blocks: the set of ids, and a ``Memo`` in which planning keeps its digests. A Turn that
appends to the newest one extends what is shared; any other gets its own copy. So a conversation of n
blocks that grows by k pays for k, and an old Turn never notices that it was continued.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self, overload

from kedge.errors import InvalidTurn
from kedge.turns.blocks import Block, SystemBlock
from kedge.turns.frozen import EMPTY, FrozenMap
from kedge.turns.ids import new_id
from kedge.turns.show import table


@dataclass(slots=True)
class Memo:
    """What a higher layer derived from a Turn's body (its blocks after the leading system ones).

    ``value`` describes at least the first ``kept`` blocks of the body. It may know more, because
    a longer Turn shares it.
    """

    value: object = None
    kept: int = 0


class Turn:
    """The blocks of a conversation so far, plus data. Immutable; equal when its blocks are."""

    __slots__ = ("_ids", "blocks", "data", "extra", "id", "lead", "memo")

    blocks: tuple[Block, ...]
    id: str
    data: FrozenMap
    extra: FrozenMap
    lead: int
    memo: Memo
    _ids: set[str]

    def __init__(
        self,
        blocks: Iterable[Block] = (),
        *,
        id: str = "",  # noqa: A002 - the word of the contract
        data: Mapping[str, Any] = EMPTY,
        extra: Mapping[str, Any] = EMPTY,
    ) -> None:
        blocks = tuple(blocks)
        _check_blocks(blocks)
        ids = {block.id for block in blocks}
        if len(ids) != len(blocks):
            raise InvalidTurn(f"two blocks have the id {_first_twice(blocks)!r}")
        self._fill(blocks, id or new_id("turn"), FrozenMap(data), FrozenMap(extra), ids, Memo())

    def _fill(
        self,
        blocks: tuple[Block, ...],
        id: str,  # noqa: A002
        data: FrozenMap,
        extra: FrozenMap,
        ids: set[str],
        memo: Memo,
    ) -> None:
        for name, value in (
            ("blocks", blocks),
            ("id", id),
            ("data", data),
            ("extra", extra),
            ("lead", count_leading(blocks)),
            ("memo", memo),
            ("_ids", ids),
        ):
            object.__setattr__(self, name, value)

    @property
    def leading(self) -> tuple[Block, ...]:
        """The leading system blocks: sent afresh with every request, part of no digest."""
        return self.blocks[: self.lead]

    @property
    def body(self) -> tuple[Block, ...]:
        """The blocks after the leading system ones."""
        return self.blocks[self.lead :]

    def append(self, *blocks: Block) -> Self:
        """Add blocks at the end."""
        if not blocks:
            return self
        _check_blocks(blocks)
        new_ids = {block.id for block in blocks}
        known = self._own_ids()
        if len(new_ids) != len(blocks) or not known.isdisjoint(new_ids):
            raise InvalidTurn(f"two blocks have the id {_first_twice((*self.blocks, *blocks))!r}")
        known |= new_ids
        return self._derive((*self.blocks, *blocks), known, len(self.blocks))

    def insert(self, index: int, block: Block) -> Self:
        """Add a block before the one at ``index``; negative indices count from the end."""
        index = range(len(self.blocks) + 1)[slice(index, None)].start
        return self._splice(index, index, block)

    def replace(self, block_id: str, block: Block) -> Self:
        """Put ``block`` in the place of the one with this id."""
        index = self.index(block_id)
        return self._splice(index, index + 1, block)

    def remove(self, block_id: str) -> Self:
        """Leave out the block with this id."""
        index = self.index(block_id)
        return self._splice(index, index + 1)

    def take(self, count: int) -> Self:
        """Keep the first ``count`` blocks."""
        if count < 0:
            raise InvalidTurn(f"cannot take {count} blocks")
        return self._splice(min(count, len(self.blocks)), len(self.blocks))

    def with_data(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Return this Turn with further data; a member set to ``None`` is removed."""
        merged = {**self.data, **(members or {}), **more}
        data = FrozenMap({key: value for key, value in merged.items() if value is not None})
        return self._copy(self.blocks, data, self._ids, self.memo)

    def index(self, block_id: str) -> int:
        """The place of the block with this id."""
        for index, block in enumerate(self.blocks):
            if block.id == block_id:
                return index
        raise InvalidTurn(f"no block with the id {block_id!r} in {self.id}")

    def _splice(self, start: int, stop: int, *blocks: Block) -> Self:
        _check_blocks(blocks)
        ids = set(self._own_ids())
        ids.difference_update(block.id for block in self.blocks[start:stop])
        for block in blocks:
            if block.id in ids:
                raise InvalidTurn(f"two blocks have the id {block.id!r}")
            ids.add(block.id)
        return self._derive((*self.blocks[:start], *blocks, *self.blocks[stop:]), ids, start)

    def _own_ids(self) -> set[str]:
        """The ids of this very Turn: the shared set, unless a longer Turn has added to it."""
        if len(self._ids) == len(self.blocks):
            return self._ids
        return {block.id for block in self.blocks}

    def _derive(self, blocks: tuple[Block, ...], ids: set[str], same: int) -> Self:
        """Make the Turn whose first ``same`` blocks are ours, sharing what still holds."""
        kept = same - self.lead
        if kept < 0 or (kept == 0 and count_leading(blocks) != self.lead):
            # The change is among the leading system blocks: the body may be untouched.
            untouched = blocks[count_leading(blocks) :] == self.body
            kept = len(self.body) if untouched else 0
        return self._copy(blocks, self.data, ids, Memo(self.memo.value, min(self.memo.kept, kept)))

    def _copy(self, blocks: tuple[Block, ...], data: FrozenMap, ids: set[str], memo: Memo) -> Self:
        turn = object.__new__(type(self))
        turn._fill(blocks, self.id, data, self.extra, ids, memo)
        return turn

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, index: int | slice) -> Block | tuple[Block, ...]:
        return self.blocks[index]

    def __eq__(self, other: object) -> bool:
        return self.blocks == other.blocks if isinstance(other, Turn) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.blocks)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Turn cannot change; its operations return a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Turn cannot change; its operations return a new one")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.blocks, self.id, self.data, self.extra)

    def __str__(self) -> str:
        return f"{self!r}\n{table(self.blocks)}" if self.blocks else repr(self)

    def __repr__(self) -> str:
        count = len(self.blocks)
        return f"<Turn {self.id}, {count} block{'' if count == 1 else 's'}>"


def snapshot_block_ids(turn: Turn) -> frozenset[str]:
    """The ids of the blocks in the Turn now, to compare with later."""
    return frozenset(block.id for block in turn.blocks)


def new_blocks_not_in(turn: Turn, ids: Iterable[str]) -> list[Block]:
    """The blocks whose ids are not among ``ids``, in order."""
    known = frozenset(ids)
    return [block for block in turn.blocks if block.id not in known]


def count_leading(blocks: tuple[Block, ...]) -> int:
    """How many system blocks stand at the front."""
    for index, block in enumerate(blocks):
        if not isinstance(block, SystemBlock):
            return index
    return len(blocks)


def _check_blocks(blocks: Iterable[object]) -> None:
    for block in blocks:
        if not isinstance(block, Block):
            raise InvalidTurn(f"a Turn holds blocks, not {type(block).__name__}; see kedge.user")


def _first_twice(blocks: Iterable[Block]) -> str:
    seen: set[str] = set()
    return next(block.id for block in blocks if block.id in seen or seen.add(block.id))


def _rebuild(
    blocks: tuple[Block, ...],
    id: str,  # noqa: A002
    data: FrozenMap,
    extra: FrozenMap,
) -> Turn:
    return Turn(blocks, id=id, data=data, extra=extra)
