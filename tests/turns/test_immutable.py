"""Blocks and parts cannot change: every way that Python offers is tried on every kind."""

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
def test_every_way_to_change_a_value_fails(value: Any) -> None:
    """Assignment, deletion, another class, another state: all are refused."""
    before = init_fields(value)
    for attempt in mutation_attempts(value):
        with pytest.raises((AttributeError, TypeError)):
            attempt()
    assert init_fields(value) == before


@each_value
def test_a_second_init_changes_nothing(value: Any) -> None:
    """``__init__`` is not where the members are set, neither its own nor an inherited one."""
    before = init_fields(value)
    value.__init__()
    value.__init__("other")
    for cls in type(value).__mro__[:-1]:
        cls.__init__(value, *["other"] * 3)
    assert init_fields(value) == before


@each_value
def test_copies_are_the_value_and_pickles_are_equal_to_it(value: Any) -> None:
    """Nothing is lost on the way through a pickle, identity included."""
    assert copy.copy(value) is value
    assert copy.deepcopy(value) is value
    assert copy.deepcopy([value])[0] is value
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))  # noqa: S301 - our own bytes
        assert type(again) is type(value)
        assert init_fields(again) == init_fields(value)


@given(blocks())
def test_any_block_survives_a_pickle(block: Block) -> None:
    """A pickled block has the same JSON form, and is as frozen as before."""
    again = pickle.loads(pickle.dumps(block))  # noqa: S301 - our own bytes
    assert again == block
    assert dump_block(again) == dump_block(block)
    assert isinstance(again.metadata, FrozenMap)


def test_a_pickle_carries_no_derived_values() -> None:
    """What planning derived stays behind: another version may derive it in another way."""
    block = user("hello")
    cache_digest(block, b"derived")
    assert get_cached_digest(pickle.loads(pickle.dumps(block))) is None  # noqa: S301
    assert get_cached_digest(dataclasses.replace(block, origin="x")) is None


@each_value
def test_the_signature_is_that_of_the_dataclass(value: Any) -> None:
    """Members keep their order, their defaults, and which of them go by keyword only."""
    parameters = inspect.signature(type(value)).parameters
    for each in (each for each in dataclasses.fields(value) if each.init):
        parameter = parameters[each.name]
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert parameter.default is default
        assert (parameter.kind is parameter.KEYWORD_ONLY) == each.kw_only
    again = type(value)(**init_fields(value))
    assert again == value


@each_value
def test_replace_makes_a_new_value_and_checks_it(value: Any) -> None:
    """dataclasses.replace goes through the same door as making a value."""
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
def test_the_classes_are_a_closed_set(value: Any) -> None:
    """A subclass could change, and nobody who matches on the kinds would know it."""
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (type(value),), {})
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (Block,), {})


@pytest.mark.parametrize(
    "value",
    [each for each in VALUES if type(each).__name__ != "UnknownBlock"],
    ids=lambda value: type(value).__name__,
)
def test_extra_cannot_hide_a_member(value: Any) -> None:
    """``extra`` shares a JSON object with the members, so it may not hold one of their names."""
    tag = "kind" if isinstance(value, Block) else "type"
    own = [each.name for each in dataclasses.fields(value) if each.init and each.name != "extra"]
    for name in (tag, *own):
        with pytest.raises(InvalidTurn, match=f"extra holds '{name}'"):
            dataclasses.replace(value, extra={name: 1})
    retained = dataclasses.replace(value, extra={"new": 1, "extra": 2, "leaf": 3})
    assert retained.extra == {"new": 1, "extra": 2, "leaf": 3}
    assert retained == value


def test_a_part_in_use_cannot_be_reached_through_what_was_passed_in() -> None:
    """Lists of parts and dicts of metadata are copied when the block is made."""
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
