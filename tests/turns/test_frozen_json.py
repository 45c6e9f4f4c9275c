"""FrozenMap, freeze and thaw: immutable JSON values."""

import copy
import json
import pickle
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given

from for_each import for_each
from kedge.errors import InvalidJSON
from kedge.turns import FrozenMap, frozen_json
from kedge.turns.frozen_json import MAX_DEPTH, freeze, json_equal, thaw, wrap
from strategies import json_objects, json_values

LARGEST = (1 << frozen_json.MAX_INTEGER_BITS) - 1


def sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def make_nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@given(json_values())
def test_freeze_and_thaw_round_trip(value: Any) -> None:
    """Freezing and thawing returns the same JSON, and distinguishes 1, 1.0 and true."""
    assert sorted_json(thaw(freeze(value))) == sorted_json(value)


@given(json_objects(), json_objects())
def test_maps_are_equal_if_their_json_is(one: Any, other: Any) -> None:
    """Maps are equal exactly if they are equal as JSON objects, and equal maps have the same hash."""
    assert (FrozenMap(one) == FrozenMap(other)) == (sorted_json(one) == sorted_json(other))
    assert FrozenMap(one) == FrozenMap(one) == one
    assert hash(FrozenMap(one)) == hash(FrozenMap(json.loads(sorted_json(one))))


DISTINCT_VALUES: list[Any] = [
    *(True, 1, 1.0, "1", None, False, 0, 0.0, -0.0, "", [], {}),
    *([1], [True], {"a": 1}, {"a": True}),
]


@for_each("one", DISTINCT_VALUES)
@for_each("other", DISTINCT_VALUES)
def test_different_json_values_are_not_equal(one: Any, other: Any) -> None:
    """True and 1, 1 and 1.0, 0.0 and -0.0 are different, at any depth and in both directions."""
    for nest in (lambda x: x, lambda x: [x], lambda x: {"b": [x]}):
        left, right = FrozenMap(a=nest(one)), FrozenMap(a=nest(other))
        assert (left == right) == (sorted_json(one) == sorted_json(other))
        assert (left == {"a": nest(other)}) == (sorted_json(one) == sorted_json(other))


def test_a_map_is_compared_with_mappings() -> None:
    """A map equals the dict it was created from, in both directions, and no mapping that is not JSON."""
    plain = {"a": [1, {"b": [True, None]}], "c": "x"}
    assert FrozenMap(plain) == plain
    assert plain == FrozenMap(plain)
    for other in ({**plain, "c": "y"}, [plain], {"a": object()}, {1: 1}, {"a": "\ud800"}):
        assert FrozenMap(plain) != other
    assert FrozenMap(a=1.5) != {"a": float("nan")}


REJECTED: list[tuple[Any, str, str]] = [
    (float("nan"), "$.a", "nan is not a JSON number"),
    ([1, -float("inf")], "$.a[1]", "-inf is not a JSON number"),
    ("x\ud800", "$.a", "lone surrogate at character 1"),
    ({"\udc00": 1}, '$.a["\\udc00"]', "lone surrogate at character 0"),
    ({"two words": {"": object()}}, '$.a["two words"][""]', "a value of type object is not JSON"),
    ({1, 2}, "$.a", "a value of type set is not JSON"),
    ({1: 2}, "$.a", "the key 1 is not a string"),
    (LARGEST + 1, "$.a", "an integer of more than 2048 bits"),
    (dict, "$.a", "a value of type type is not JSON"),
]


@for_each(("value", "path", "problem"), REJECTED)
def test_values_without_a_json_form_are_rejected_with_their_path(
    value: Any, path: str, problem: str
) -> None:
    """NaN, lone surrogates, objects and very large integers are rejected."""
    with pytest.raises(InvalidJSON) as error:
        FrozenMap({"fine": 0, "a": value})
    assert (error.value.path, error.value.problem) == (path, problem)
    assert str(error.value) == f"{path}: {problem}"


def test_depth_is_limited() -> None:
    """The maximum depth applies to plain values, nested maps and cycles."""
    deepest = FrozenMap(make_nested(MAX_DEPTH))
    assert deepest.depth == MAX_DEPTH
    assert thaw(deepest) == make_nested(MAX_DEPTH)
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    for value in (make_nested(MAX_DEPTH + 1), {"a": deepest}, {"a": [deepest]}, cycle):
        with pytest.raises(InvalidJSON, match="nested more than 100 levels deep"):
            FrozenMap(value)
    with pytest.raises(InvalidJSON, match="nested more than 100"):
        deepest.with_members({"b": deepest})
    with pytest.raises(InvalidJSON, match="nested more than 100"):
        freeze([deepest])


def test_frozen_value_is_a_copy() -> None:
    """Later changes to the lists and dicts passed in do not change the frozen value."""
    inner: list[Any] = [1]
    outer: dict[str, Any] = {"inner": inner, "deep": {"inner": inner}}
    frozen = FrozenMap(outer)
    proxied = FrozenMap(MappingProxyType(outer))
    inner.append(2)
    outer["more"] = 1
    outer["deep"]["inner"] = None
    assert frozen == proxied == {"inner": [1], "deep": {"inner": [1]}}
    thaw(frozen)["inner"].append(3)
    assert frozen["inner"] == (1,)


def test_map_cannot_be_modified() -> None:
    """Assignment, deletion, a second ``__init__`` and in-place operators do not change a map."""
    frozen = FrozenMap(a=[1], b={"c": 2})
    attempts: list[Any] = [
        lambda: frozen.__setitem__("a", 1),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: frozen.__delitem__("a"),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: frozen["a"].append(2),
        lambda: setattr(frozen, "_members", {}),
        lambda: frozen._members.__setitem__("a", 1),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: frozen.items().mapping.__setitem__("a", 1),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: frozen.__setstate__({}),  # pyright: ignore[reportAttributeAccessIssue]
    ]
    for attempt in attempts:
        with pytest.raises((AttributeError, TypeError)):
            attempt()
    frozen.__init__({"a": 2})  # pyright: ignore[reportCallIssue]
    merged = frozen
    merged |= {"a": 9}
    assert merged == {"a": 9, "b": {"c": 2}}
    assert frozen == {"a": [1], "b": {"c": 2}}
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Loose", (FrozenMap,), {})


def test_subclasses_of_json_types_become_plain_types() -> None:
    """Values of subclasses such as StrEnum or IntEnum are converted to plain JSON types."""

    class Size(IntEnum):
        BIG = 3

    class Word(StrEnum):
        HI = "hi"

    class Half(float):
        pass

    class Row(list[int]):
        pass

    frozen = FrozenMap(size=Size.BIG, word=Word.HI, half=Half(0.5), row=Row([1]))
    assert {type(value) for value in frozen.values()} == {int, str, float, tuple}
    assert frozen == {"size": 3, "word": "hi", "half": 0.5, "row": [1]}
    assert {type(key) for key in FrozenMap({Word.HI: 1})} == {str}


class State(msgspec.Struct, frozen=True):
    anchors: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"anchors": list(self.anchors)}


class Loose(msgspec.Struct):
    def to_json(self) -> dict[str, Any]:
        return {}


def test_struct_with_to_json_is_stored() -> None:
    """A frozen Struct with ``to_json`` is stored as an object and equals its JSON form."""
    frozen = FrozenMap(state=State((1, 2)), listed=[State()])
    assert frozen["state"] == State((1, 2))
    assert thaw(frozen) == {"state": {"anchors": [1, 2]}, "listed": [{"anchors": []}]}
    assert frozen == FrozenMap(thaw(frozen)) == frozen
    assert FrozenMap(thaw(frozen)) == frozen
    assert hash(frozen) == hash(FrozenMap(thaw(frozen)))
    assert frozen != FrozenMap(state=State((1, 3)), listed=[State()])
    assert FrozenMap(state=State()) != FrozenMap(state=[])
    with pytest.raises(InvalidJSON, match="a value of type Loose is not JSON"):
        FrozenMap(state=Loose())


@given(json_values(), json_values())
def test_json_equal_is_symmetric(one: Any, other: Any) -> None:
    """``json_equal`` does not depend on the order of its arguments."""
    expected = sorted_json(one) == sorted_json(other)
    assert json_equal(one, other) == json_equal(other, one) == expected
    assert json_equal(freeze(one), other) == json_equal(other, freeze(one))


def test_wrapped_members_are_checked_when_they_are_frozen() -> None:
    """A wrapped map may have any values and is read-only; freezing it checks them like those of a dict."""
    value = object()
    wrapped = wrap({"a": [{"b": (1, value)}], "c": {"d": 2}})
    assert wrapped["a"][0]["b"] == (1, value)
    assert type(wrapped["c"]) is FrozenMap
    assert frozen_json.get_wrapped(wrapped)["c"] == {"d": 2} == thaw(wrapped["c"])
    with pytest.raises(InvalidJSON, match="object is not JSON") as caught:
        freeze({"x": wrapped})
    assert caught.value.path == "$.x.a[0].b[1]"
    with pytest.raises(InvalidJSON, match="nested"):
        frozen_json.freeze_map(wrap({"a": make_nested(200)}), "$")


@for_each("combine", [lambda m: m | {"x": 1}, lambda m: m.with_members({"x": 1})])
def test_maps_derived_from_wrapped_ones_are_checked(combine: Any) -> None:
    """A map with members added is checked, so that no block contains a value that is not JSON."""
    assert combine(wrap({"a": [{"b": 1}]})) == {"a": [{"b": 1}], "x": 1}
    with pytest.raises(InvalidJSON, match="nan is not a JSON number"):
        combine(wrap({"a": [{"b": float("nan")}]}))


@given(json_objects())
def test_wrapped_members_are_those_of_a_frozen_map(members: dict[str, Any]) -> None:
    """A wrapped object equals the frozen one, also when it is frozen, copied, pickled or thawed."""
    wrapped, frozen = wrap(members), freeze(members)
    assert copy.copy(frozen) is copy.deepcopy(frozen) is FrozenMap(frozen) is frozen
    for same in (wrapped, freeze(wrapped), copy.deepcopy(wrapped), frozen_json.wrap_copy(members)):
        assert same == frozen == pickle.loads(pickle.dumps(same))  # noqa: S301
        assert hash(same) == hash(frozen)
        assert json.dumps(thaw(same)) == json.dumps(members)
    assert wrapped.depth == frozen.depth


def test_a_copy_does_not_follow_its_original() -> None:
    """Changes of the original members after ``wrap_copy`` have no effect."""
    members = {"a": [{"b": 1}]}
    wrapped = frozen_json.wrap_copy(members)
    members["a"][0]["b"] = 2
    assert wrapped == {"a": [{"b": 1}]}
    assert frozen_json.wrap_copy(wrapped) is wrapped
