"""Blocks and parts of every kind are immutable."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from kedge.errors import InvalidTurn
from kedge.turns import Block, FrozenMap, OpaquePart, TextPart, UserBlock, dump_block, user
from kedge.turns.blocks import cache_digest, get_cached_digest
from strategies import blocks, sample_blocks

PARTS = [
    *(part for block in sample_blocks() for part in getattr(block, "parts", ())),
    OpaquePart(FrozenMap(a=1)),
]
VALUES = [*sample_blocks(), *PARTS]
each_value = pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)


def init_fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}


def mutation_attempts(value: Any) -> list[Callable[[], object]]:
    name = dataclasses.fields(value)[0].name
    own = dataclasses.fields(value)[-1].name
    return [
        lambda: setattr(value, name, "other"),
        lambda: setattr(value, own, "other"),
        lambda: setattr(value, "new", 1),
        lambda: setattr(value, "__class__", UserBlock),
        lambda: delattr(value, name),
        lambda: value.__setattr__(own, "other"),
        lambda: value.__delattr__(own),
        lambda: value.__setstate__(["other"] * 9),
        lambda: value.__setstate__({own: "other"}),
        lambda: value.__dict__,
        lambda: value.extra.update(a=1),
        lambda: value.extra.__setitem__("a", 1),
    ]


@each_value
def test_value_cannot_be_modified(value: Any) -> None:
    """Assignment, deletion, changing the class and setting the state raise an error."""
    before = init_fields(value)
    for attempt in mutation_attempts(value):
        with pytest.raises((AttributeError, TypeError)):
            attempt()
    assert init_fields(value) == before


@each_value
def test_calling_init_again_has_no_effect(value: Any) -> None:
    """Calling ``__init__`` again, its own or an inherited one, changes nothing."""
    before = init_fields(value)
    value.__init__()
    value.__init__("other")
    for cls in type(value).__mro__[:-1]:
        cls.__init__(value, *["other"] * 3)
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


@given(blocks())
def test_pickled_block_is_equal(block: Block) -> None:
    """A pickled block has the same JSON form and is still immutable."""
    unpickled = pickle.loads(pickle.dumps(block))  # noqa: S301 - our own bytes
    assert unpickled == block
    assert dump_block(unpickled) == dump_block(block)
    assert isinstance(unpickled.metadata, FrozenMap)


def test_pickle_has_no_cached_values() -> None:
    """A pickle has no cached values, because another version may compute them differently."""
    block = user("hello")
    cache_digest(block, b"derived")
    assert get_cached_digest(pickle.loads(pickle.dumps(block))) is None  # noqa: S301
    assert get_cached_digest(dataclasses.replace(block, origin="x")) is None


@each_value
def test_signature_matches_the_dataclass(value: Any) -> None:
    """The signature has the order, defaults and keyword-only markers of the dataclass fields."""
    parameters = inspect.signature(type(value)).parameters
    for each in (each for each in dataclasses.fields(value) if each.init):
        parameter = parameters[each.name]
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert parameter.default is default
        assert (parameter.kind is parameter.KEYWORD_ONLY) == each.kw_only
    rebuilt = type(value)(**init_fields(value))
    assert rebuilt == value


@each_value
def test_replace_validates_the_new_value(value: Any) -> None:
    """``dataclasses.replace`` creates a new value with the same validation as the constructor."""
    other = dataclasses.replace(value)
    assert other == value
    assert other is not value
    if isinstance(value, Block):
        metadata = {"a": [1]}
        tagged = dataclasses.replace(value, metadata=metadata)  # pyright: ignore[reportArgumentType]
        metadata["a"].append(2)
        assert tagged.metadata == {"a": [1]}
        assert value.metadata == {}
        with pytest.raises(InvalidTurn):
            dataclasses.replace(value, id="\ud800")


@each_value
def test_classes_cannot_be_subclassed(value: Any) -> None:
    """Blocks and parts cannot be subclassed, because a subclass could be mutable or of an unknown kind."""
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (type(value),), {})
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (Block,), {})


@pytest.mark.parametrize(
    "value",
    [each for each in VALUES if type(each).__name__ != "UnknownBlock"],
    ids=lambda value: type(value).__name__,
)
def test_extra_cannot_contain_a_member_name(value: Any) -> None:
    """``extra`` cannot contain a member's name, because both are written to the same JSON object."""
    tag = "kind" if isinstance(value, Block) else "type"
    own = [each.name for each in dataclasses.fields(value) if each.init and each.name != "extra"]
    for name in (tag, *own):
        with pytest.raises(InvalidTurn, match=f"extra holds '{name}'"):
            dataclasses.replace(value, extra={name: 1})
    retained = dataclasses.replace(value, extra={"new": 1, "extra": 2, "leaf": 3})
    assert retained.extra == {"new": 1, "extra": 2, "leaf": 3}
    assert retained == value


def test_arguments_are_copied() -> None:
    """Lists of parts and dicts of metadata are copied when a block is created."""
    parts: list[Any] = [TextPart("a")]
    metadata: dict[str, Any] = {"tags": ["x"]}
    extra: dict[str, Any] = {"new": {"deep": [1]}}
    block = UserBlock(parts, metadata=metadata, extra=extra)  # pyright: ignore[reportArgumentType]
    parts.append(TextPart("b"))
    metadata["tags"].append("y")
    extra["new"]["deep"].append(2)
    assert block.text == "a"
    assert block.metadata == {"tags": ["x"]}
    assert block.extra == {"new": {"deep": [1]}}
