"""Turn: an immutable sequence of the blocks of a conversation.

Every operation returns a new Turn with a tuple of its own, and checks that its ids are unique. Both cost O(n), which is
less than a millisecond for 10,000 blocks. Expensive is only what is derived from the content of blocks, the prefix
index of ``kedge.planning.digests``. A Turn passes the index on to Turns that are derived from it, with the number of
blocks that they have in common.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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

CachedIndex = tuple[object, int]
"""A value that planning derived from the body of a Turn (the blocks after the leading system ones), and the number of
the first blocks of the body that it describes.

It may describe more blocks than these, namely the blocks of the Turn from which this one was derived."""
_NO_INDEX: CachedIndex = (None, 0)


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

    __slots__ = ("_cached_index", "blocks", "body_length", "data", "extra", "id", "lead")
    _remedy = "a Turn is immutable; its methods return a new one"

    blocks: tuple[Block, ...]
    id: str
    data: FrozenMap
    extra: FrozenMap
    lead: int
    body_length: int
    _cached_index: CachedIndex

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
        _check_unique_ids(blocks)
        return _build_turn(blocks, count_leading(blocks), id, freeze_map(data, "data"), frozen)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Turn cannot have subclasses; store what belongs to it in its data")

    @property
    def text(self) -> str:
        """The text of the answer at the end; empty if the Turn ends with another message."""
        return "\n\n".join(block.text for block in find_answer_blocks(self) if block.text)

    @property
    def leading(self) -> tuple[Block, ...]:
        """The leading system blocks, which are sent with every request and are not part of a digest."""
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
        extended = self.blocks + blocks
        _check_unique_ids(extended)
        lead = self.lead
        if lead == len(self):
            lead += count_leading(blocks)
        return _build_turn(extended, lead, self.id, self.data, self.extra, self._cached_index)

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
            The new Turn, with the same id and data; the Turn itself if it has these blocks.

        Raises:
            InvalidTurn: If two blocks have the same id.
        """
        if not isinstance(blocks, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(f"blocks must be a list of blocks, not {describe_type(blocks)}")
        fresh = tuple(blocks)
        count = count_common_blocks(self, fresh)
        return self.take(count).append(*fresh[count:])

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
        for index, own_block in enumerate(self.blocks):
            if own_block.id == block_id:
                return index
        raise InvalidTurn(f"no block with the id {block_id!r} in {self.id}")

    def _splice(self, start: int, stop: int, *blocks: Block) -> "Turn":
        _check_blocks(blocks)
        if start == stop and not blocks:
            return self
        spliced = self.blocks[:start] + blocks + self.blocks[stop:]
        _check_unique_ids(spliced)
        lead = count_leading(spliced)
        index, described = self._cached_index
        described = min(described, self._count_unchanged(start, lead, len(spliced)))
        return _build_turn(spliced, lead, self.id, self.data, self.extra, (index, described))

    def _count_unchanged(self, start: int, lead: int, length: int) -> int:
        """Return the number of blocks of the body that a Turn shares if it differs from index ``start`` on."""
        unchanged = start - self.lead
        if unchanged < 0 or (unchanged == 0 and lead != self.lead):
            # The change is among the leading system blocks. One that affects the body makes it longer or
            # shorter, so a body of the same length is the same.
            if length - lead == self.body_length:
                return self.body_length
            return 0
        return unchanged

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
        if not isinstance(other, Turn):
            return NotImplemented
        return self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(self.blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Turn, id=self.id, data=self.data, extra=self.extra), (self.blocks,)

    def __str__(self) -> str:
        if not self.blocks:
            return repr(self)
        return f"{self!r}\n{format_table(self.blocks)}"

    def __repr__(self) -> str:
        noun = "block" if len(self) == 1 else "blocks"
        return f"<Turn {shorten(self.id, DEFAULT_WIDTH)}, {len(self)} {noun}>"


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
    earlier_ids = frozenset(ids)
    return [block for block in turn.blocks if block.id not in earlier_ids]


def rename_turn(turn: Turn, id: str) -> Turn:  # noqa: A002
    """Return the Turn with another id, and with its cached values."""
    if turn.id == id:
        return turn
    return _build_turn(turn.blocks, turn.lead, id, turn.data, turn.extra, get_cached_index(turn))


def replace_data(turn: Turn, data: FrozenMap) -> Turn:
    """Return the Turn with other data, and with its cached values."""
    return _build_turn(turn.blocks, turn.lead, turn.id, data, turn.extra, get_cached_index(turn))


def has_prefix(turn: Turn, earlier: Turn) -> bool:
    """Return whether a Turn begins with the identical blocks of another."""
    return len(earlier) <= len(turn) and all(map(is_, earlier.blocks, turn.blocks))


def count_common_blocks(old: Turn, new: Turn | Sequence[Block]) -> int:
    """Return the number of identical blocks at the start of both."""
    differences = map(is_not, old, new)
    return next(
        (index for index, differs in enumerate(differences) if differs), min(len(old), len(new))
    )


get_cached_index: Callable[[Turn], CachedIndex] = attrgetter("_cached_index")
"""Return the value that was cached for a Turn's body, and the number of its first blocks that the value describes."""


def cache_index(turn: Turn, value: object) -> None:
    """Cache a value that was derived from all blocks of a Turn's body."""
    _set_field(turn, "_cached_index", (value, turn.body_length))


def find_answer_blocks(turn: Turn, sent: Turn | None = None) -> list[AssistantBlock]:
    """Return the assistant blocks at the end of a Turn; blocks of ``sent`` are not part of the answer."""
    start = 0
    sent_ids = frozenset[str]()
    if sent is not None and has_prefix(turn, sent):
        start = len(sent)
    elif sent is not None:
        sent_ids = snapshot_block_ids(sent)

    answer: list[AssistantBlock] = []
    for block in reversed(turn[start:]):
        if block.id in sent_ids:
            break
        if isinstance(block, AssistantBlock):
            answer.append(block)
        elif not isinstance(block, ReasoningBlock | OpaqueBlock):
            break
    return answer[::-1]


def count_leading(blocks: Sequence[Block]) -> int:
    """Return the number of system blocks at the start."""
    for index, block in enumerate(blocks):
        if type(block) is not SystemBlock:
            return index
    return len(blocks)


def _check_blocks(blocks: Sequence[object]) -> None:
    # isinstance is several times slower for a Struct.
    if _BLOCK_TYPES.issuperset(map(type, blocks)):
        return
    wrong = next(value for value in blocks if type(value) not in _BLOCK_TYPES)
    kind = describe_type(wrong)
    match wrong:
        case ImagePart() | FilePart() | OpaquePart():
            remedy = 'put it into a message: user(["text", part])'
        case dict():
            remedy = "use kedge.wire.blocks_from_messages(...)"
        case _:
            remedy = "use kedge.user(...)"
    raise InvalidTurn(f"a Turn must have blocks, not {kind}; {remedy}")


def _check_unique_ids(blocks: Sequence[Block]) -> None:
    if len(set(map(_get_id, blocks))) == len(blocks):
        return
    seen: set[str] = set()
    for block in blocks:
        if block.id in seen:
            raise InvalidTurn(f"two blocks have the id {block.id!r}")
        seen.add(block.id)


def _build_turn(
    blocks: tuple[Block, ...],
    lead: int,
    name: str,
    data: FrozenMap,
    extra: FrozenMap,
    cached_index: CachedIndex = _NO_INDEX,
) -> Turn:
    turn = object.__new__(Turn)
    _set_field(turn, "blocks", blocks)
    _set_field(turn, "lead", lead)
    _set_field(turn, "body_length", len(blocks) - lead)
    _set_field(turn, "id", name)
    _set_field(turn, "data", data)
    _set_field(turn, "extra", extra)
    _set_field(turn, "_cached_index", cached_index)
    return turn


class TurnDiff(msgspec.Struct, frozen=True):
    """The difference between two Turns; false if there is none.

    Attributes:
        added: Blocks that only the new Turn has.
        removed: Blocks that only the old Turn has.
        modified: The old and the new block of each id whose content differs.
        moved: Blocks that both Turns have, and that are in another order in the new one.
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
