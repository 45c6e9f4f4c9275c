"""Validators with nested values: arrays, objects, unions, and nullable values.

An object is checked in the order observed at the live API: missing members, then unknown ones, then
each member in the order of its table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.server import errors
from kedge.server.schema.base import (
    JsonPath,
    Validator,
    check_unicode,
    format_path,
    invalid_type_error,
    invalid_value_error,
    reject_or_remove_unknown,
)


@dataclass(frozen=True, slots=True)
class Array:
    """A list of values of one kind; ``of`` names them in the plural."""

    item: Validator
    of: str = "objects"
    min_length: int = 0
    max_length: int | None = None

    @property
    def expected(self) -> str:
        """For example ``an array of objects``."""
        return f"an array of {self.of}"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the length, each item."""
        if type(value) is not list:
            raise invalid_type_error(self, value, path)
        items = cast("list[Any]", value)
        if len(items) < self.min_length:
            raise errors.ARRAY_EMPTY(path=format_path(path), least=self.min_length)
        if self.max_length is not None and len(items) > self.max_length:
            raise errors.ARRAY_TOO_LONG(
                path=format_path(path), most=self.max_length, length=len(items)
            )
        check = self.item.check
        for index, item in enumerate(items):
            check(item, (path, index))


@dataclass(frozen=True, slots=True)
class Object:
    """An object with known members; those whose names end with ``!`` in the table are required."""

    members: Mapping[str, Validator]
    expected: str = "an object"
    required: tuple[str, ...] = field(init=False)
    order: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        members = {name.removesuffix("!"): validator for name, validator in self.members.items()}
        required = dict.fromkeys(name[:-1] for name in self.members if name.endswith("!"))
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "required", tuple(required))
        object.__setattr__(self, "order", {name: index for index, name in enumerate(members)})

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, then missing members, unknown members, each member."""
        if type(value) is not dict:
            raise invalid_type_error(self, value, path)
        members = cast("dict[str, Any]", value)
        for name in self.required:
            if name not in members:
                raise errors.MISSING_PARAMETER(path=format_path((path, name)))
        if not members.keys() <= self.members.keys():
            reject_or_remove_unknown(members, self.members, path)
        for name in sorted(members, key=self.order.__getitem__):
            self.members[name].check(members[name], (path, name))


@dataclass(frozen=True, slots=True)
class Map:
    """An object with keys chosen by the client and values of one kind."""

    value: Validator
    max_properties: int | None = None
    max_key_length: int | None = None
    expected: str = "an object"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the number of properties, each key and value."""
        if type(value) is not dict:
            raise invalid_type_error(self, value, path)
        members = cast("dict[str, Any]", value)
        if self.max_properties is not None and len(members) > self.max_properties:
            raise errors.OBJECT_TOO_LARGE(
                path=format_path(path), most=self.max_properties, length=len(members)
            )
        for key, member in members.items():
            check_unicode(key, path)
            if self.max_key_length is not None and len(key) > self.max_key_length:
                raise errors.STRING_TOO_LONG(
                    path=format_path((path, key)), most=self.max_key_length, length=len(key)
                )
            self.value.check(member, (path, key))


@dataclass(frozen=True, slots=True)
class TaggedUnion:
    """One of several objects, distinguished by the string in one of their members.

    The error of an unknown tag names the tag (``tools[0].type``, as almost everywhere) or, with
    ``error_on_object``, the object itself (``input[0]``). If the same tags are used in several unions,
    ``all_tags`` lists them: the error of a tag that is valid elsewhere names the object. ``unlisted``
    tags are accepted but not listed in errors.
    """

    variants: Mapping[str, Validator]
    tag: str = "type"
    error_on_object: bool = False
    all_tags: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    expected: str = "an object"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, find the tag, check the object that it selects."""
        if type(value) is not dict:
            raise invalid_type_error(self, value, path)
        members = cast("dict[str, Any]", value)
        tag = members.get(self.tag)
        variant = self.variants.get(tag) if type(tag) is str else None
        if variant is None:
            raise self._tag_error(members, path)
        variant.check(members, path)

    def _tag_error(self, value: Mapping[str, Any], path: JsonPath) -> errors.ApiError:
        tag = value.get(self.tag)
        belonging = tuple(name for name in self.variants if name not in self.unlisted)
        if self.error_on_object or tag in self.all_tags:
            return invalid_value_error(tag, belonging, path)
        if self.tag not in value:
            return errors.MISSING_PARAMETER(path=format_path((path, self.tag)))
        return invalid_value_error(tag, self.all_tags or belonging, (path, self.tag))


@dataclass(frozen=True, slots=True)
class TypeUnion:
    """A value of one of several JSON types, each with its own validator."""

    expected: str
    string: Validator | None = None
    array: Validator | None = None
    record: Validator | None = None
    number: Validator | None = None
    boolean: Validator | None = None
    by_type: Mapping[type, Validator] = field(init=False)

    def __post_init__(self) -> None:
        validators = {
            str: self.string,
            list: self.array,
            dict: self.record,
            int: self.number,
            float: self.number,
            bool: self.boolean,
        }
        by_type = {kind: validator for kind, validator in validators.items() if validator}
        object.__setattr__(self, "by_type", by_type)

    def check(self, value: object, path: JsonPath) -> None:
        """Check the value with the validator of its JSON type."""
        validator = self.by_type.get(type(value))
        if validator is None:
            raise invalid_type_error(self, value, path)
        validator.check(value, path)


@dataclass(frozen=True, slots=True)
class Nullable:
    """A value of some kind, or null."""

    inner: Validator

    @property
    def expected(self) -> str:
        """That of the inner validator, because the API does not mention null."""
        return self.inner.expected

    def check(self, value: Any, path: JsonPath) -> None:
        """Check a value that is not null."""
        if value is not None:
            self.inner.check(value, path)


@dataclass(frozen=True, slots=True)
class NonNull:
    """A value that must not be null; the live API has a special message for two parameters."""

    inner: Validator

    @property
    def expected(self) -> str:
        """That of the inner validator."""
        return self.inner.expected

    def check(self, value: Any, path: JsonPath) -> None:
        """Reject null as the live API does, and check everything else."""
        if value is None:
            raise errors.INVALID_TYPE(path=format_path(path), expected="a string", got="an object")
        self.inner.check(value, path)
