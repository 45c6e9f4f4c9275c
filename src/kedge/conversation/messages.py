"""The messages of a caller: as blocks, at the end of a Turn, and after the guards of an engine."""

from collections.abc import Iterable

from kedge.engines import Engine, find_filters
from kedge.errors import InvalidTurn, describe_type
from kedge.planning import check_added_results
from kedge.turns import Block, Turn, user


def as_block(message: Block | str) -> Block:
    """Return a message as a block; a text is a user block."""
    return user(message) if isinstance(message, str) else message


def as_turn(messages: Block | str | Iterable[Block | str]) -> Turn:
    """Return the Turn of these messages; a Turn itself has data and anchors, too."""
    if isinstance(messages, Turn):
        return messages
    if isinstance(messages, str | Block):
        return Turn([as_block(messages)])
    if not isinstance(messages, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTurn(f"blocks must be blocks or texts, not {describe_type(messages)}")
    return Turn(map(as_block, messages))  # the constructor checks that they are blocks


def append_blocks(turn: Turn, blocks: Iterable[Block]) -> Turn:
    """Return a Turn with blocks of the caller at its end.

    Raises:
        UnmatchedResult: A result among them belongs to no open call.
    """
    extended = turn.append(*blocks)
    check_added_results(turn, extended)
    return extended


def filter_blocks(engine: Engine, blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return blocks after the guards of an engine, as they may be stored."""
    filters = find_filters(engine)
    return tuple(filters.apply(block, ("input",)) for block in blocks)
