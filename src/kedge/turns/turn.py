"""Turn: the ordered blocks of a conversation so far, immutable.

Every operation returns a new Turn. Turns that grew from one another share what was derived from their
common blocks: a set of ids (at least those of its own blocks), and a ``Memo`` in which planning keeps
its digests. So a conversation of n blocks that grows by k pays for k (and for copying references), and
an old Turn never notices that it was continued.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import index as op_index
from typing import Any, NoReturn, final, overload

from kedge.errors import InvalidTurn
from kedge.turns.blocks import Block, SystemBlock
from kedge.turns.formatting import DEFAULT_WIDTH, format_table, shorten
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze_map
from kedge.turns.ids import new_id
from kedge.turns.immutable import set_field

TURN_MEMBERS = frozenset({"format", "version", "id", "data", "blocks"})
"""The members of a Turn's JSON form; ``extra`` keeps any others."""


@dataclass(slots=True)
class _Memo:
    """What a higher layer derived from a Turn's body (its blocks after the leading system ones).

    ``known`` is a value, and how many of the first blocks of the body it describes. It may describe
    more, because a longer Turn shares it. The two are one member so that threads see them together.
    """

    entry: tuple[object, int] = (None, 0)


@final
class Turn:
    """The blocks of a conversation so far, plus data. Immutable; equal when its blocks are.

    Made for a value, not for subclasses: what belongs to a conversation goes into ``data``.
    """

    __slots__ = ("_ids", "_memo", "blocks", "data", "extra", "id", "lead")

    blocks: tuple[Block, ...]
    id: str
    data: FrozenMap
    extra: FrozenMap
    lead: int
    _ids: set[str]
    _memo: "_Memo"

    # All is done in __new__: a second call of __init__ would change the Turn in place.
    def __new__(
        cls,
        blocks: Iterable[Block] = (),
        *,
        id: str = "",  # noqa: A002 - the word of the contract
        data: Mapping[str, Any] = EMPTY,
        extra: Mapping[str, Any] = EMPTY,
    ) -> "Turn":
        """Make a Turn of these blocks."""
        if not isinstance(blocks, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(f"a Turn is made of blocks, not of {type(blocks).__name__}")
        blocks = tuple(blocks)
        _check_blocks(blocks)
        id = new_id("turn") if id == "" else check_text(id, "id")  # noqa: A001
        kept = freeze_map(extra, "extra")
        if taken := TURN_MEMBERS & kept.keys():
            raise InvalidTurn(f"extra holds {min(taken)!r}, which is a member of its own")
        ids = _collect_unique_ids(blocks)
        return _build_turn(blocks, id, freeze_map(data, "data"), kept, ids, _Memo())

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Turn has no subclasses; keep what belongs to it in its data")

    @property
    def leading(self) -> tuple[Block, ...]:
        """The leading system blocks: sent afresh with every request, part of no digest."""
        return self.blocks[: self.lead]

    @property
    def body(self) -> tuple[Block, ...]:
        """The blocks after the leading system ones."""
        return self.blocks[self.lead :]

    def append(self, *blocks: Block) -> "Turn":
        """Add blocks at the end."""
        if not blocks:
            return self
        _check_blocks(blocks)
        together = (*self.blocks, *blocks)
        added = {block.id for block in blocks}
        ids = self._ids
        bounded = len(ids) <= 2 * len(together)  # or forks without end would fill it
        if bounded and len(added) == len(blocks) and ids.isdisjoint(added):
            ids |= added  # other continuations may be in it too: it need only know all of ours
        else:
            ids = _collect_unique_ids(together)
        return self._derive(together, ids, len(self.blocks))

    def insert(self, index: int, block: Block) -> "Turn":
        """Add a block before the one at ``index``, which means what it means to ``list.insert``."""
        index = slice(op_index(index), None).indices(len(self.blocks))[0]
        return self._splice(index, index, block)

    def replace(self, block_id: str, block: Block) -> "Turn":
        """Put ``block`` in the place of the one with this id."""
        index = self.index(block_id)
        return self._splice(index, index + 1, block)

    def remove(self, block_id: str) -> "Turn":
        """Leave out the block with this id."""
        index = self.index(block_id)
        return self._splice(index, index + 1)

    def take(self, count: int) -> "Turn":
        """Keep the first ``count`` blocks."""
        if count < 0:
            raise InvalidTurn(f"cannot take {count} blocks")
        return self._splice(min(count, len(self.blocks)), len(self.blocks))

    def with_blocks(self, blocks: Iterable[Block]) -> "Turn":
        """Put these in the place of all blocks: many changes at the price of one."""
        fresh = tuple(blocks)
        pairs = enumerate(zip(self.blocks, fresh, strict=False))
        shorter = min(len(self.blocks), len(fresh))
        same = next((index for index, (old, new) in pairs if old is not new), shorter)
        kept = self if same == len(self.blocks) else self.take(same)
        return kept.append(*fresh[same:])

    def with_data(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> "Turn":
        """Return this Turn with further data; a member set to ``None`` is removed."""
        data = self.data.with_members({**(members or {}), **more})
        return _build_turn(self.blocks, self.id, data, self.extra, self._ids, self._memo)

    def index(self, block_id: str) -> int:
        """The place of the block with this id."""
        for index, block in enumerate(self.blocks):
            if block.id == block_id:
                return index
        raise InvalidTurn(f"no block with the id {block_id!r} in {self.id}")

    def _splice(self, start: int, stop: int, *blocks: Block) -> "Turn":
        _check_blocks(blocks)
        ids = self._ids.copy()
        if len(ids) != len(self.blocks):  # a longer Turn has added to what we share
            ids = {block.id for block in self.blocks}
        ids.difference_update(block.id for block in self.blocks[start:stop])
        for block in blocks:
            if block.id in ids:
                raise InvalidTurn(f"two blocks have the id {block.id!r}")
            ids.add(block.id)
        return self._derive((*self.blocks[:start], *blocks, *self.blocks[stop:]), ids, start)

    def _derive(self, blocks: tuple[Block, ...], ids: set[str], shared: int) -> "Turn":
        """Make the Turn whose first ``same`` blocks are ours, sharing what still holds."""
        kept = shared - self.lead
        lead = count_leading(blocks)
        if kept < 0 or (kept == 0 and lead != self.lead):
            # The change is among the leading system blocks. Any that reaches into the body makes it
            # longer or shorter; a body of the same length is the same.
            body = len(self.blocks) - self.lead
            kept = body if len(blocks) - lead == body else 0
        value, described = self._memo.entry
        memo = _Memo((value, min(described, kept)))
        return _build_turn(blocks, self.id, self.data, self.extra, ids, memo)

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

    def __copy__(self) -> "Turn":
        return self

    def __deepcopy__(self, memo: object) -> "Turn":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.blocks, self.id, self.data, self.extra)

    def __str__(self) -> str:
        return f"{self!r}\n{format_table(self.blocks)}" if self.blocks else repr(self)

    def __repr__(self) -> str:
        count = len(self.blocks)
        return f"<Turn {shorten(self.id, DEFAULT_WIDTH)}, {count} block{'' if count == 1 else 's'}>"


def snapshot_block_ids(turn: Turn) -> frozenset[str]:
    """The ids of the blocks in the Turn now, to compare with later."""
    return frozenset(block.id for block in turn.blocks)


def new_blocks_not_in(turn: Turn, ids: Iterable[str]) -> list[Block]:
    """The blocks whose ids are not among ``ids``, in order."""
    known = frozenset(ids)
    return [block for block in turn.blocks if block.id not in known]


def get_cached_index(turn: Turn) -> tuple[object, int]:
    """Return what was cached for this Turn's body, and how many of its first blocks it describes."""
    return turn._memo.entry  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def cache_index(turn: Turn, value: object, count: int) -> None:
    """Cache a value that was derived from the first ``count`` blocks of this Turn's body.

    Turns that are made from this one share it, as far as their bodies start with the same blocks.
    """
    turn._memo.entry = value, count  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


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


def _collect_unique_ids(blocks: tuple[Block, ...]) -> set[str]:
    ids = {block.id for block in blocks}
    if len(ids) != len(blocks):
        seen: set[str] = set()
        twice = next(block.id for block in blocks if block.id in seen or seen.add(block.id))
        raise InvalidTurn(f"two blocks have the id {twice!r}")
    return ids


def _build_turn(
    blocks: tuple[Block, ...],
    id: str,  # noqa: A002
    data: FrozenMap,
    extra: FrozenMap,
    ids: set[str],
    memo: _Memo,
) -> Turn:
    turn = object.__new__(Turn)
    set_field(turn, "blocks", blocks)
    set_field(turn, "id", id)
    set_field(turn, "data", data)
    set_field(turn, "extra", extra)
    set_field(turn, "lead", count_leading(blocks))
    set_field(turn, "_memo", memo)
    set_field(turn, "_ids", ids)
    return turn


def _rebuild(
    blocks: tuple[Block, ...],
    id: str,  # noqa: A002
    data: FrozenMap,
    extra: FrozenMap,
) -> Turn:
    return Turn(blocks, id=id, data=data, extra=extra)
