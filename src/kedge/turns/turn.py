"""Turn: an immutable sequence of the blocks of a conversation.

Every operation returns a new Turn. Turns share what was derived from their common blocks, so that a conversation of n
blocks that grows by k costs O(k), apart from copying references.

Ids shared along a Turn's lineage: block ids must be unique within a Turn, and checking that with a new set for
each ``append`` would cost O(n). So a Turn and its continuations share one *mutable* set of ids. The invariant is
that the set has *at least* the ids of each Turn that shares it; it may have more, namely those of other
continuations. New ids that are not in the set are therefore unique, and are added to it: the old Turn does not
notice, because nothing reads the set as the exact ids of a Turn. If a new id is in the set, it may belong to a
sibling only, so the exact ids are collected again before a duplicate is reported. A set that is twice as large
as the Turn, as after many forks from one Turn, is replaced as well, and operations other than ``append`` always
make a set of their own.
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
"""The fields of a Turn's JSON form; others are stored in ``extra``."""


@dataclass(slots=True)
class _Memo:
    """A value that planning derived from a Turn's body (its blocks after the leading system ones).

    ``entry`` is the value, and how many of the first blocks of the body it describes. The value may describe
    more, because a longer Turn shares it. Both are in one field, so that threads always see a matching pair.
    """

    entry: tuple[object, int] = (None, 0)


@final
class Turn:
    """The blocks of a conversation so far, plus data. Immutable; equal if the blocks are.

    A Turn cannot have subclasses; store what belongs to a conversation in ``data``.

    Args:
        blocks: The blocks; no two may have the same id.
        id: The id of the Turn, for logs; generated if it is empty.
        data: JSON values of the application and of Kedge's packages.
        extra: Fields that Kedge does not interpret.

    Attributes:
        blocks: The blocks.
        id: The id of the Turn.
        data: The data, as an immutable mapping.
        extra: Fields that Kedge does not interpret.
        lead: How many leading system blocks there are.

    Raises:
        InvalidTurn: If two blocks have the same id, or a value has the wrong type.

    Example:
        >>> turn = Turn([system("Be brief."), user("Hi")])
        >>> turn = turn.append(assistant("Hello!"))
    """

    __slots__ = ("_ids", "_memo", "blocks", "data", "extra", "id", "lead")

    blocks: tuple[Block, ...]
    id: str
    data: FrozenMap
    extra: FrozenMap
    lead: int
    _ids: set[str]
    _memo: "_Memo"

    # Done in __new__, because a second call of __init__ would change the Turn in place.
    def __new__(
        cls,
        blocks: Iterable[Block] = (),
        *,
        id: str = "",  # noqa: A002 - the name of the contract
        data: Mapping[str, Any] = EMPTY,
        extra: Mapping[str, Any] = EMPTY,
    ) -> "Turn":
        """Construct a Turn; see the class."""
        if not isinstance(blocks, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(
                f"a Turn must have blocks, not {type(blocks).__name__}; use Turn([user(...)])"
            )
        blocks = tuple(blocks)
        _check_blocks(blocks)
        id = new_id("turn") if id == "" else check_text(id, "id")  # noqa: A001
        frozen = freeze_map(extra, "extra")
        if taken := TURN_MEMBERS & frozen.keys():
            raise InvalidTurn(
                f"extra holds {min(taken)!r}, which is a field of its own; set that instead"
            )
        ids = _collect_unique_ids(blocks)
        return _build_turn(blocks, id, freeze_map(data, "data"), frozen, ids, _Memo())

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Turn cannot have subclasses; store what belongs to it in its data")

    @property
    def leading(self) -> tuple[Block, ...]:
        """The leading system blocks, which are sent with every request and are part of no digest."""
        return self.blocks[: self.lead]

    @property
    def body(self) -> tuple[Block, ...]:
        """The blocks after the leading system ones."""
        return self.blocks[self.lead :]

    def append(self, *blocks: Block) -> "Turn":
        """Return the Turn with blocks added at the end.

        Args:
            *blocks: The blocks.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If two blocks have the same id.
        """
        if not blocks:
            return self
        _check_blocks(blocks)
        together = self.blocks + blocks
        added = {block.id for block in blocks}
        ids = self._ids
        bounded = len(ids) <= 2 * len(together)  # or many forks would fill it
        if bounded and len(added) == len(blocks) and ids.isdisjoint(added):
            ids |= added  # the set may have ids of other continuations as well
        else:
            ids = _collect_unique_ids(together)
        return self._derive(together, ids, len(self.blocks))

    def insert(self, index: int, *blocks: Block) -> "Turn":
        """Return the Turn with blocks inserted.

        Args:
            index: The index of the first new block, as for ``list.insert``.
            *blocks: The blocks.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If another block has the same id.
        """
        index = slice(op_index(index), None).indices(len(self.blocks))[0]
        return self._splice(index, index, *blocks)

    def replace(self, block_id: str, block: Block) -> "Turn":
        """Return the Turn with a block replaced.

        Args:
            block_id: The id of the block to replace.
            block: The new block.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If there is no such block, or another block has the id of the new one.
        """
        index = self.index(block_id)
        return self._splice(index, index + 1, block)

    def remove(self, *block_ids: str) -> "Turn":
        """Return the Turn without these blocks.

        Args:
            *block_ids: The ids of the blocks to remove.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If there is no such block.
        """
        turn = self
        for index in sorted({self.index(block_id) for block_id in block_ids}, reverse=True):
            turn = turn._splice(index, index + 1)
        return turn

    def truncate(self, length: int | str) -> "Turn":
        """Return the Turn without the blocks after its first ones.

        Args:
            length: The number of blocks to retain, negative to count from the end; or the id of the last
                block to retain.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If there is no block with this id.
        """
        stop = self.index(length) + 1 if isinstance(length, str) else length
        return self.take(len(self.blocks[:stop]))

    def take(self, count: int) -> "Turn":
        """Return the Turn with only its first blocks.

        Args:
            count: How many blocks to retain.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If the count is negative.
        """
        if count < 0:
            raise InvalidTurn(f"cannot take {count} blocks")
        return self._splice(min(count, len(self.blocks)), len(self.blocks))

    def with_blocks(self, blocks: Iterable[Block]) -> "Turn":
        """Return the Turn with other blocks, which costs as much as one change.

        Args:
            blocks: All blocks of the new Turn.

        Returns:
            The new Turn, with the same id and data.

        Raises:
            InvalidTurn: If two blocks have the same id.
        """
        fresh = tuple(blocks)
        pairs = enumerate(zip(self.blocks, fresh, strict=False))
        shorter = min(len(self.blocks), len(fresh))
        same = next((index for index, (old, new) in pairs if old is not new), shorter)
        common = self if same == len(self.blocks) else self.take(same)
        return common.append(*fresh[same:])

    def with_data(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> "Turn":
        """Return the Turn with data added.

        Args:
            members: The values to add; None removes one.
            **more: Further values.

        Returns:
            The new Turn.

        Raises:
            InvalidJSON: If a value is not JSON.
        """
        data = self.data.with_members({**(members or {}), **more})
        return _build_turn(self.blocks, self.id, data, self.extra, self._ids, self._memo)

    def index(self, block_id: str) -> int:
        """Return the index of a block.

        Args:
            block_id: The id of the block.

        Returns:
            Its index in ``blocks``.

        Raises:
            InvalidTurn: If there is no such block.
        """
        for index, block in enumerate(self.blocks):
            if block.id == block_id:
                return index
        raise InvalidTurn(f"no block with the id {block_id!r} in {self.id}")

    def _splice(self, start: int, stop: int, *blocks: Block) -> "Turn":
        _check_blocks(blocks)
        ids = self._ids.copy()
        if len(ids) != len(self.blocks):  # another continuation has added to the shared set
            ids = {block.id for block in self.blocks}
        ids.difference_update(block.id for block in self.blocks[start:stop])
        for block in blocks:
            if block.id in ids:
                raise InvalidTurn(f"two blocks have the id {block.id!r}")
            ids.add(block.id)
        return self._derive((*self.blocks[:start], *blocks, *self.blocks[stop:]), ids, start)

    def _derive(self, blocks: tuple[Block, ...], ids: set[str], shared: int) -> "Turn":
        """Return a Turn that has its first ``shared`` blocks in common with this one."""
        unchanged = shared - self.lead
        lead = count_leading(blocks)
        if unchanged < 0 or (unchanged == 0 and lead != self.lead):
            # The change is among the leading system blocks. One that affects the body makes it longer or
            # shorter, so a body of the same length is the same.
            body = len(self.blocks) - self.lead
            unchanged = body if len(blocks) - lead == body else 0
        value, described = self._memo.entry
        memo = _Memo((value, min(described, unchanged)))
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
        raise AttributeError("a Turn is immutable; its methods return a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Turn is immutable; its methods return a new one")

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
    """Return the ids of the blocks of a Turn, to compare with later.

    Args:
        turn: The Turn.

    Returns:
        The ids, for ``new_blocks_not_in``.
    """
    return frozenset(block.id for block in turn.blocks)


def new_blocks_not_in(turn: Turn, ids: Iterable[str]) -> list[Block]:
    """Return the blocks of a Turn that were not there before.

    Args:
        turn: The Turn.
        ids: The ids of an earlier Turn, as ``snapshot_block_ids`` returns them.

    Returns:
        The blocks with other ids, in order.
    """
    known = frozenset(ids)
    return [block for block in turn.blocks if block.id not in known]


def rename_turn(turn: Turn, id: str) -> Turn:  # noqa: A002
    """Return the Turn with another id, and everything that was derived from it."""
    if turn.id == id:
        return turn
    return _build_turn(turn.blocks, id, turn.data, turn.extra, turn._ids, turn._memo)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def get_cached_index(turn: Turn) -> tuple[object, int]:
    """Return what was cached for this Turn's body, and how many of its first blocks it describes."""
    return turn._memo.entry  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def cache_index(turn: Turn, value: object, count: int) -> None:
    """Cache a value that was derived from the first ``count`` blocks of this Turn's body.

    Turns that are made from this one share it, as far as their bodies start with the same blocks.
    """
    turn._memo.entry = value, count  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def count_leading(blocks: tuple[Block, ...]) -> int:
    """Return how many system blocks are at the start."""
    for index, block in enumerate(blocks):
        if not isinstance(block, SystemBlock):
            return index
    return len(blocks)


def _check_blocks(blocks: Iterable[object]) -> None:
    for block in blocks:
        if not isinstance(block, Block):
            raise InvalidTurn(
                f"a Turn must have blocks, not {type(block).__name__}; use kedge.user(...)"
            )


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
