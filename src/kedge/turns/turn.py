"""Turn: an immutable sequence of the blocks of a conversation.

Every operation returns a new Turn. Turns share the values derived from their common blocks, so that extending a
conversation of n blocks by k costs O(k).

Blocks shared along a Turn's lineage: a Turn and its continuations share one list, of which each Turn has the first
``length`` blocks, so ``append`` copies nothing. Only one continuation can extend the list: the first one removes
the only member of ``unclaimed``, which is atomic and therefore needs no lock, and every other one copies its part of
the list. So does one that makes the list twice as long as it was at first, because an old Turn, such as a template of
many conversations, would otherwise retain everything that was appended to it. Elements of the list are never
changed, and ``blocks`` is a tuple that is created when it is read.

Ids shared along a Turn's lineage: block ids must be unique within a Turn, and checking that with a new set for
each ``append`` would cost O(n). So a Turn and its continuations share one *mutable* set of ids. The invariant is
that the set has *at least* the ids of each Turn that shares it; it may have more, namely those of other
continuations. New ids that are not in the set are therefore unique, and are added to it. This does not affect the
old Turn, because the set is never used as the exact ids of a Turn. If a new id is in the set, it may belong to a
sibling only, so the exact ids are collected again before a duplicate is reported. A set that is twice as large
as the Turn, as after many forks from one Turn, is replaced as well, and operations other than ``append`` always
create a new set.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter, is_, is_not
from operator import index as op_index
from typing import Any, NoReturn, final, overload

import msgspec

from kedge._internal.argument_types import checked
from kedge.errors import InvalidTurn, describe_type
from kedge.turns.blocks import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    SystemBlock,
    build_replacement,
    new_id,
)
from kedge.turns.frozen_json import EMPTY, FrozenMap, Immutable, check_text, freeze_map
from kedge.turns.parts import FilePart, ImagePart, OpaquePart
from kedge.turns.server_fields import select_members
from kedge.turns.text_format import DEFAULT_WIDTH, format_table, shorten

TURN_MEMBERS = frozenset({"format", "version", "id", "data", "blocks"})
"""The fields of a Turn's JSON form; others are stored in ``extra``."""

_BLOCK_TYPES = frozenset[type[Any]](Block.__args__)
_set_field = object.__setattr__
_get_id: Callable[[Block], str] = attrgetter("id")
_CLAIM = 0
_MIN_LIMIT = 16
"""The maximum number of blocks in the shared list of a short Turn."""


class _Lineage(msgspec.Struct):
    """The data that a Turn and its continuations share.

    Attributes:
        blocks: A list that starts with the blocks of each of these Turns.
        limit: The maximum number of blocks in the list.
        entry: A value that planning derived from the body (the blocks after the leading system ones), and the
            number of the first blocks of the body that it describes. The value may describe more, because
            another lineage shares it. Both are in one field, so that threads always read a matching pair.
    """

    blocks: list[Block]
    limit: int
    entry: tuple[object, int]


class _Memo(msgspec.Struct):
    """The blocks of a Turn; Turns that differ only in their data share it.

    Attributes:
        lineage: The data shared with the continuations of the Turn.
        length: The number of blocks of the shared list that belong to the Turn.
        ids: At least the ids of these blocks.
        unclaimed: One member until a continuation extends the shared list.
        blocks: The blocks as a tuple, once that was read.
    """

    lineage: _Lineage
    length: int
    ids: set[str]
    unclaimed: dict[int, bool]
    blocks: tuple[Block, ...] | None = None


@final
class Turn(Immutable):
    """The blocks of a conversation so far, plus data. Immutable; equal if the blocks are.

    A Turn cannot have subclasses; store further values of a conversation in ``data``.

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
        lead: The number of leading system blocks.
        body_length: The number of blocks after them.

    Raises:
        InvalidTurn: If two blocks have the same id, or a value has the wrong type.

    Example:
        >>> turn = Turn([system("Be brief."), user("Hi")])
        >>> turn = turn.append(assistant("Hello!"))
    """

    __slots__ = ("_memo", "body_length", "data", "extra", "id", "lead")
    _remedy = "a Turn is immutable; its methods return a new one"

    id: str
    data: FrozenMap
    extra: FrozenMap
    lead: int
    body_length: int
    _memo: "_Memo"

    # Members are set in __new__, because a second call of __init__ would change the Turn in place.
    def __new__(
        cls,
        blocks: Iterable[Block] = (),
        *,
        id: str = "",  # noqa: A002 - the name in the public contract
        data: Mapping[str, Any] = EMPTY,
        extra: Mapping[str, Any] = EMPTY,
    ) -> "Turn":
        """Construct a Turn; see the class docstring."""
        if not isinstance(blocks, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(
                f"a Turn must have blocks, not {describe_type(blocks)}; use Turn([user(...)])"
            )
        blocks = tuple(blocks)
        _check_blocks(blocks)
        id = new_id("turn") if id == "" else check_text(id, "id")  # noqa: A001
        frozen = freeze_map(extra, "extra")
        if own_fields := TURN_MEMBERS & frozen.keys():
            raise InvalidTurn(
                f"extra holds {min(own_fields)!r}, which is a field of its own; set that instead"
            )
        memo = _build_memo(list(blocks), _collect_unique_ids(blocks))
        return _build_turn(memo, count_leading(blocks), id, freeze_map(data, "data"), frozen)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Turn cannot have subclasses; store what belongs to it in its data")

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks."""
        memo = self._memo
        blocks = memo.blocks
        if blocks is None:
            blocks = memo.blocks = tuple(memo.lineage.blocks[: memo.length])
        return blocks

    @property
    def text(self) -> str:
        """The text of the answer at the end; empty if the Turn ends with another message."""
        return "\n\n".join(block.text for block in find_answer_blocks(self) if block.text)

    @property
    def leading(self) -> tuple[Block, ...]:
        """The leading system blocks, which are sent with every request and are not part of a digest."""
        return tuple(self._memo.lineage.blocks[: self.lead])

    @property
    def body(self) -> tuple[Block, ...]:
        """The blocks after the leading system ones."""
        return self[self.lead :]

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
        memo = self._memo
        length, added, ids = memo.length + len(blocks), set(map(_get_id, blocks)), memo.ids
        bounded = len(ids) <= 2 * length  # otherwise many forks would fill it
        if bounded and len(added) == len(blocks) and ids.isdisjoint(added):
            ids |= added  # the set may have ids of other continuations as well
        else:
            ids = _collect_unique_ids(self.blocks + blocks)
        lead = self.lead
        if lead == memo.length:
            lead += count_leading(blocks)
        lineage = memo.lineage
        if length <= lineage.limit and memo.unclaimed.pop(_CLAIM, False):
            lineage.blocks.extend(blocks)
            grown = _Memo(lineage, length, ids, {_CLAIM: True})
        else:
            together = [*lineage.blocks[: memo.length], *blocks]
            value, described = lineage.entry
            grown = _build_memo(together, ids, (value, min(described, self.body_length)))
        return _build_turn(grown, lead, self.id, self.data, self.extra)

    @checked
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
        index = slice(op_index(index), None).indices(len(self))[0]
        return self._splice(index, index, *blocks)

    @checked
    def edit(self, old: Block | str, new: Block | str) -> "Turn":
        """Return the Turn with a block replaced; the blocks after it remain.

        Args:
            old: The block to replace, or its id.
            new: The new block, or the text of a user block.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If there is no such block, or another block has the id of the new one.
            InvalidSetting: If ``new`` is a text and the block is not a user block.
        """
        index = self.index(old)
        return self._splice(index, index + 1, build_replacement(self[index], new))

    @checked
    def remove(self, *blocks: Block | str) -> "Turn":
        """Return the Turn without these blocks.

        Args:
            *blocks: The blocks to remove, or their ids.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If there is no such block.
        """
        turn = self
        for index in sorted({self.index(block) for block in blocks}, reverse=True):
            turn = turn._splice(index, index + 1)
        return turn

    @checked
    def truncate(self, length: int | Block | str) -> "Turn":
        """Return the Turn without the blocks after its first ones.

        Args:
            length: The number of blocks to retain, negative to count from the end; or the last block to
                retain, or its id.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If there is no such block.
        """
        stop = length if isinstance(length, int) else self.index(length) + 1
        return self.take(len(range(len(self))[:stop]))

    @checked
    def take(self, count: int) -> "Turn":
        """Return the Turn with only its first blocks.

        Args:
            count: The number of blocks to retain.

        Returns:
            The new Turn.

        Raises:
            InvalidTurn: If the count is negative.
        """
        if count < 0:
            raise InvalidTurn(f"cannot take {count} blocks")
        return self._splice(min(count, len(self)), len(self))

    def with_blocks(self, blocks: Iterable[Block]) -> "Turn":
        """Return the Turn with other blocks, which costs as much as one change.

        Args:
            blocks: All blocks of the new Turn.

        Returns:
            The new Turn, with the same id and data.

        Raises:
            InvalidTurn: If two blocks have the same id.
        """
        if not isinstance(blocks, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(f"blocks must be a list of blocks, not {describe_type(blocks)}")
        fresh = tuple(blocks)
        same = count_common_blocks(self, fresh)
        common = self if same == len(self) else self.take(same)
        return common.append(*fresh[same:])

    @checked
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
        return replace_data(self, self.data.with_members({**(members or {}), **more}))

    def index(self, block: Block | str) -> int:
        """Return the index of a block, which is found by its id.

        Args:
            block: The block, or its id.

        Returns:
            Its index in ``blocks``.

        Raises:
            InvalidTurn: If there is no such block.
        """
        if not isinstance(block, Block | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(f"a block or its id is needed, not {describe_type(block)}")
        block_id = block if isinstance(block, str) else block.id
        for index, each in enumerate(self):
            if each.id == block_id:
                return index
        raise InvalidTurn(f"no block with the id {block_id!r} in {self.id}")

    def _splice(self, start: int, stop: int, *blocks: Block) -> "Turn":
        _check_blocks(blocks)
        old = self.blocks
        spliced = [*old[:start], *blocks, *old[stop:]]
        ids = _collect_unique_ids(spliced)
        lead = count_leading(spliced)
        value, described = get_cached_index(self)
        entry = value, min(described, self._count_unchanged(start, lead, len(spliced)))
        return _build_turn(_build_memo(spliced, ids, entry), lead, self.id, self.data, self.extra)

    def _count_unchanged(self, start: int, lead: int, length: int) -> int:
        """Return the number of blocks of the body that a Turn shares if it differs from index ``start`` on."""
        unchanged = start - self.lead
        if unchanged < 0 or (unchanged == 0 and lead != self.lead):
            # The change is among the leading system blocks. One that affects the body makes it longer or
            # shorter, so a body of the same length is the same.
            return self.body_length if length - lead == self.body_length else 0
        return unchanged

    def __len__(self) -> int:
        return self._memo.length

    def __iter__(self) -> Iterator[Block]:
        return islice(self._memo.lineage.blocks, self._memo.length)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, index: int | slice) -> Block | tuple[Block, ...]:
        blocks, length = self._memo.lineage.blocks, self._memo.length
        if isinstance(index, slice):
            start, stop, step = index.indices(length)
            # A slice of the list and not of the tuple, which may not exist yet.
            return tuple(blocks[start : max(start, stop)]) if step == 1 else self.blocks[index]
        return blocks[range(length)[index]]

    def __eq__(self, other: object) -> bool:
        return self.blocks == other.blocks if isinstance(other, Turn) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Turn, id=self.id, data=self.data, extra=self.extra), (self.blocks,)

    def __str__(self) -> str:
        return f"{self!r}\n{format_table(self.blocks)}" if len(self) else repr(self)

    def __repr__(self) -> str:
        count = len(self)
        return f"<Turn {shorten(self.id, DEFAULT_WIDTH)}, {count} block{'' if count == 1 else 's'}>"


@checked
def snapshot_block_ids(turn: Turn) -> frozenset[str]:
    """Return the ids of the blocks of a Turn, to compare with later.

    Args:
        turn: The Turn.

    Returns:
        The ids, for ``new_blocks_not_in``.
    """
    return frozenset(block.id for block in turn.blocks)


@checked
def new_blocks_not_in(turn: Turn, ids: Iterable[str]) -> list[Block]:
    """Return the blocks of a Turn that an earlier Turn did not have.

    Args:
        turn: The Turn.
        ids: The ids of the earlier Turn, from ``snapshot_block_ids``.

    Returns:
        The blocks with other ids, in order.
    """
    known = frozenset(ids)
    return [block for block in turn.blocks if block.id not in known]


def rename_turn(turn: Turn, id: str) -> Turn:  # noqa: A002
    """Return the Turn with another id, and with its cached values."""
    if turn.id == id:
        return turn
    return _build_turn(turn._memo, turn.lead, id, turn.data, turn.extra)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def replace_data(turn: Turn, data: FrozenMap) -> Turn:
    """Return the Turn with other data, and with its cached values."""
    return _build_turn(turn._memo, turn.lead, turn.id, data, turn.extra)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def has_prefix(turn: Turn, earlier: Turn) -> bool:
    """Return whether a Turn begins with the identical blocks of another; O(1) if it was appended to."""
    memo, before = turn._memo, earlier._memo  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    if before.length > memo.length:
        return False
    return memo.lineage is before.lineage or all(map(is_, earlier.blocks, turn.blocks))


def count_common_blocks(old: Turn, new: Turn | Sequence[Block]) -> int:
    """Return the number of identical blocks at the start of both."""
    if isinstance(new, Turn) and has_prefix(new, old):
        return len(old)
    different = enumerate(map(is_not, old, new))
    return next((index for index, differs in different if differs), min(len(old), len(new)))


get_cached_index: Callable[[Turn], tuple[object, int]] = attrgetter("_memo.lineage.entry")
"""Return the value cached for this Turn's body, and the number of blocks that it describes; it may be more."""


def cache_index(turn: Turn, value: object, count: int) -> None:
    """Cache a value that was derived from the first ``count`` blocks of this Turn's body.

    Turns that are derived from this one share it, as far as their bodies start with the same blocks.
    """
    turn._memo.lineage.entry = value, count  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def find_answer_blocks(turn: Turn, sent: Turn | None = None) -> list[AssistantBlock]:
    """Return the assistant blocks at the end of a Turn; blocks of ``sent`` are not part of the answer."""
    start, known = 0, frozenset[str]()
    if sent is not None and has_prefix(turn, sent):
        start = len(sent)
    elif sent is not None:
        known = snapshot_block_ids(sent)
    found: list[AssistantBlock] = []
    for block in reversed(turn[start:]):
        if block.id in known:
            break
        if isinstance(block, AssistantBlock):
            found.append(block)
        elif not isinstance(block, ReasoningBlock | OpaqueBlock):
            break
    return found[::-1]


def count_leading(blocks: Sequence[Block]) -> int:
    """Return the number of system blocks at the start."""
    for index, block in enumerate(blocks):
        if type(block) is not SystemBlock:
            return index
    return len(blocks)


def _check_blocks(blocks: Sequence[object]) -> None:
    # isinstance is several times slower for a Struct.
    for block in blocks if not _BLOCK_TYPES.issuperset(map(type, blocks)) else ():
        if type(block) not in _BLOCK_TYPES:
            kind = describe_type(block)
            match block:
                case ImagePart() | FilePart() | OpaquePart():
                    remedy = 'put it into a message: user(["text", part])'
                case dict():
                    remedy = "use kedge.wire.blocks_from_messages(...)"
                case _:
                    remedy = "use kedge.user(...)"
            raise InvalidTurn(f"a Turn must have blocks, not {kind}; {remedy}")


def _collect_unique_ids(blocks: Sequence[Block]) -> set[str]:
    ids = set(map(_get_id, blocks))
    if len(ids) != len(blocks):
        seen: set[str] = set()
        twice = next(block.id for block in blocks if block.id in seen or seen.add(block.id))
        raise InvalidTurn(f"two blocks have the id {twice!r}")
    return ids


def _build_memo(blocks: list[Block], ids: set[str], entry: tuple[object, int] = (None, 0)) -> _Memo:
    lineage = _Lineage(blocks, max(2 * len(blocks), _MIN_LIMIT), entry)
    return _Memo(lineage, len(blocks), ids, {_CLAIM: True})


def _build_turn(memo: _Memo, lead: int, name: str, data: FrozenMap, extra: FrozenMap) -> Turn:
    turn = object.__new__(Turn)
    _set_field(turn, "_memo", memo)
    _set_field(turn, "lead", lead)
    _set_field(turn, "body_length", memo.length - lead)
    _set_field(turn, "id", name)
    _set_field(turn, "data", data)
    _set_field(turn, "extra", extra)
    return turn


class TurnDiff(msgspec.Struct, frozen=True):
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


@checked
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
    if has_prefix(new, old):
        return TurnDiff(new[len(old) :])
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


def check_turn(turn: Turn) -> None:
    """Raise ``InvalidTurn`` if an argument is not a Turn."""
    if not isinstance(turn, Turn):  # pyright: ignore[reportUnnecessaryIsInstance]
        problem = f"an engine sends a Turn, not {describe_type(turn)}"
        raise InvalidTurn(f'{problem}; write Turn([user("…")])')
