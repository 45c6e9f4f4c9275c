"""Blocks and parts of every kind are immutable."""

import copy
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from msgspec import structs

from for_each import for_each
from kedge import turns
from kedge.errors import InvalidTurn
from kedge.turns import Block, FrozenMap, OpaquePart, UserBlock, user
from kedge.turns.blocks import BlockBase, cache_digest, get_cached_digest
from kedge.turns.json_codec import encode_block, parse_block
from strategies import blocks, sample_blocks

PARTS = [
    *(part for block in sample_blocks() for part in getattr(block, "parts", ())),
    OpaquePart(FrozenMap(a=1)),
]
VALUES = [*sample_blocks(), *PARTS]
each_value = for_each("value", VALUES)


def init_fields(value: Any) -> dict[str, Any]:
    return structs.asdict(value)


def mutation_attempts(value: Any) -> list[Callable[[], object]]:
    own, *_, name = value.__struct_fields__
    attempts: list[Callable[[], object]] = [
        lambda: setattr(value, name, "other"),
        lambda: setattr(value, own, "other"),
        lambda: setattr(value, "__class__", UserBlock),
        lambda: delattr(value, name),
        lambda: value.__setstate__(["other"] * 9),
        lambda: value.extra.__setitem__("a", 1),
    ]
    if sys.version_info < (3, 13):  # which does not check these calls for a Struct
        attempts += [
            lambda: value.__setattr__(own, "other"),
            lambda: object.__setattr__(value, own, "other"),
            lambda: value.__delattr__(own),
        ]
    return attempts


@each_value
def test_value_cannot_be_modified(value: Any) -> None:
    """Assignment, deletion, changing the class and setting the state raise an error."""
    before = init_fields(value)
    for attempt in mutation_attempts(value):
        with pytest.raises((AttributeError, TypeError)):
            attempt()
    assert init_fields(value) == before


@each_value
def test_copies_and_pickles_are_equal(value: Any) -> None:
    """Copying a value returns the value itself, and pickling preserves all its fields."""
    assert copy.copy(value) is value
    assert copy.deepcopy(value) is value
    assert copy.deepcopy([value])[0] is value
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        unpickled = pickle.loads(pickle.dumps(value, protocol))  # noqa: S301 - our own bytes
        assert type(unpickled) is type(value)
        assert init_fields(unpickled) == init_fields(value)


def test_pickle_has_no_cached_values() -> None:
    """A pickle has no cached values, because another version may compute them differently."""
    block = user("hello")
    cache_digest(block, b"derived")
    assert get_cached_digest(pickle.loads(pickle.dumps(block))) is None  # noqa: S301
    assert get_cached_digest(structs.replace(block, origin="x")) is None


@each_value
def test_replace_validates_the_new_value(value: Any) -> None:
    """``msgspec.structs.replace`` creates a new value with the same validation as the constructor."""
    other = structs.replace(value)
    assert other == value
    assert other is not value
    if isinstance(value, Block):
        metadata = {"a": [1]}
        tagged = structs.replace(value, metadata=metadata)  # pyright: ignore[reportArgumentType]
        metadata["a"].append(2)
        assert tagged.metadata == {"a": [1]}
        assert value.metadata == {}
        with pytest.raises(InvalidTurn):
            structs.replace(value, id="\ud800")


@each_value
def test_classes_cannot_be_subclassed(value: Any) -> None:
    """Blocks and parts cannot be subclassed, because a subclass could be mutable or of an unknown kind."""
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (type(value),), {})
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (BlockBase,), {})


@for_each("value", [each for each in VALUES if type(each).__name__ != "UnknownBlock"])
def test_extra_cannot_contain_a_member_name(value: Any) -> None:
    """``extra`` cannot contain a member's name, because both are written to the same JSON object."""
    tag = "kind" if isinstance(value, Block) else "type"
    own = [name for name in value.__struct_fields__ if name != "extra"]
    for name in (tag, *own):
        with pytest.raises(InvalidTurn, match=f"extra holds '{name}'"):
            structs.replace(value, extra={name: 1})
    retained = structs.replace(value, extra={"new": 1, "extra": 2, "leaf": 3})
    assert retained.extra == {"new": 1, "extra": 2, "leaf": 3}
    assert retained == value


def rebuilt_copies(block: Block) -> list[Block]:
    """Return blocks with equal fields that were made in other ways: pickled, decoded, replaced and constructed."""
    text = encode_block(block)
    members = structs.asdict(block)
    origin = "".join(list(members.pop("origin")))  # an equal text that is another object
    return [
        pickle.loads(pickle.dumps(block)),  # noqa: S301 - our own bytes
        parse_block(text),
        turns.load_block(json.loads(text)),
        structs.replace(block, id=block.id),
        type(block)(**members, origin=origin),
    ]


@given(blocks())
def test_equal_blocks_have_equal_json(block: Block) -> None:
    """A block has the same JSON however it was made, because fields at their default are omitted by identity."""
    for copied in rebuilt_copies(block):
        assert encode_block(copied) == encode_block(block)
        assert not copied != block  # noqa: SIM202 - a Struct needs __ne__ for this
