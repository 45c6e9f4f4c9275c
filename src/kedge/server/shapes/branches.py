"""Shapes that hold others: arrays, objects, unions, and what may be null.

An object is judged in the order that the live API has been seen to follow: missing members, then
unknown ones, then each member in the order of its table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.server import errors
from kedge.server.shapes.language import At, Shape, check_unicode, spell, wrong_type, wrong_value


@dataclass(frozen=True, slots=True)
class Array:
    """A list of values of one shape; ``of`` names them in the plural."""

    item: Shape
    of: str = "objects"
    least: int = 0
    most: int | None = None

    @property
    def expected(self) -> str:
        """Name the items: ``an array of objects``."""
        return f"an array of {self.of}"

    def check(self, value: Any, at: At) -> None:
        """Check the type, the length, each item."""
        if type(value) is not list:
            raise wrong_type(self, value, at)
        items = cast("list[Any]", value)
        if len(items) < self.least:
            raise errors.ARRAY_EMPTY(path=spell(at), least=self.least)
        if self.most is not None and len(items) > self.most:
            raise errors.ARRAY_TOO_LONG(path=spell(at), most=self.most, length=len(items))
        check = self.item.check
        for index, item in enumerate(items):
            check(item, (at, index))


@dataclass(frozen=True, slots=True)
class Object:
    """An object of known members, some of them required."""

    members: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    expected: str = "an object"
    checks: tuple[tuple[str, Any], ...] = field(init=False)

    def __post_init__(self) -> None:
        checks = tuple((name, shape.check) for name, shape in self.members.items())
        object.__setattr__(self, "checks", checks)

    def check(self, value: Any, at: At) -> None:
        """Check the type, then missing members, unknown members, each member."""
        if type(value) is not dict:
            raise wrong_type(self, value, at)
        held = cast("dict[str, Any]", value)
        for name in self.required:
            if name not in held:
                raise errors.MISSING(path=spell((at, name)))
        if not held.keys() <= self.members.keys():
            unknown = next(name for name in held if name not in self.members)
            raise errors.UNKNOWN(path=spell((at, unknown)))
        for name, check in self.checks:
            if name in held:
                check(held[name], (at, name))


@dataclass(frozen=True, slots=True)
class Dictionary:
    """An object of the client's own keys, all of whose values have one shape."""

    value: Shape
    most: int | None = None
    longest_key: int | None = None
    expected: str = "an object"

    def check(self, value: Any, at: At) -> None:
        """Check the type, the number of properties, each key and value."""
        if type(value) is not dict:
            raise wrong_type(self, value, at)
        held = cast("dict[str, Any]", value)
        if self.most is not None and len(held) > self.most:
            raise errors.OBJECT_TOO_LARGE(path=spell(at), most=self.most, length=len(held))
        for key, one in held.items():
            check_unicode(key, at)
            if self.longest_key is not None and len(key) > self.longest_key:
                raise errors.STRING_TOO_LONG(
                    path=spell((at, key)), most=self.longest_key, length=len(key)
                )
            self.value.check(one, (at, key))


@dataclass(frozen=True, slots=True)
class Tagged:
    """One of several objects, told apart by the string in one of their members.

    An unknown tag is blamed on the tag (``tools[0].type``, as almost everywhere) or, with
    ``blames_whole``, on the object itself (``input[0]``). Where the same tags are used in several
    places, ``elsewhere`` lists them all: one that exists but does not belong here is then blamed
    on the object. ``also`` holds tags that are taken but not advertised.
    """

    choices: Mapping[str, Shape]
    tag: str = "type"
    blames_whole: bool = False
    elsewhere: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    expected: str = "an object"

    def check(self, value: Any, at: At) -> None:
        """Check the type, find the tag, check the object it chooses."""
        if type(value) is not dict:
            raise wrong_type(self, value, at)
        held = cast("dict[str, Any]", value)
        tag = held.get(self.tag)
        chosen = self.choices.get(tag) if type(tag) is str else None
        if chosen is None:
            raise self._untagged(held, at)
        chosen.check(held, at)

    def _untagged(self, held: Mapping[str, Any], at: At) -> errors.ApiError:
        tag = held.get(self.tag)
        belonging = tuple(name for name in self.choices if name not in self.also)
        if self.blames_whole or tag in self.elsewhere:
            return wrong_value(tag, belonging, at)
        if self.tag not in held:
            return errors.MISSING(path=spell((at, self.tag)))
        return wrong_value(tag, self.elsewhere or belonging, (at, self.tag))


@dataclass(frozen=True, slots=True)
class Either:
    """A value of one of several JSON types, each with a shape of its own."""

    expected: str
    text: Shape | None = None
    array: Shape | None = None
    record: Shape | None = None
    number: Shape | None = None
    flag: Shape | None = None
    by_type: Mapping[type, Shape] = field(init=False)

    def __post_init__(self) -> None:
        given = {
            str: self.text,
            list: self.array,
            dict: self.record,
            int: self.number,
            float: self.number,
            bool: self.flag,
        }
        by_type = {kind: shape for kind, shape in given.items() if shape is not None}
        object.__setattr__(self, "by_type", by_type)

    def check(self, value: object, at: At) -> None:
        """Find the shape for the value's JSON type and check it."""
        shape = self.by_type.get(type(value))
        if shape is None:
            raise wrong_type(self, value, at)
        shape.check(value, at)


@dataclass(frozen=True, slots=True)
class Nullable:
    """A value of some shape, or null."""

    shape: Shape

    @property
    def expected(self) -> str:
        """Say what the shape says: the API does not mention null."""
        return self.shape.expected

    def check(self, value: Any, at: At) -> None:
        """Check a value that is not null."""
        if value is not None:
            self.shape.check(value, at)


@dataclass(frozen=True, slots=True)
class Present:
    """A value that must not be null; the live API says so in its own way for two parameters."""

    shape: Shape

    @property
    def expected(self) -> str:
        """Say what the shape says."""
        return self.shape.expected

    def check(self, value: Any, at: At) -> None:
        """Refuse null as the live API does, and check everything else."""
        if value is None:
            raise errors.WRONG_TYPE(path=spell(at), expected="a string", got="an object")
        self.shape.check(value, at)
