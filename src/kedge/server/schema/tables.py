"""Build schemas from the types of the openai and anthropic packages, with the rules of the live API.

``sdk_types.json`` has the members of every object, as the packages declare them; ``make schema`` writes it. What
the packages do not declare are ``Rules``: the order in which members are checked, bounds, prefixes of ids and wording.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, TypeVar

from msgspec import Struct

from kedge._internal.json_text import decode
from kedge.server.schema import validators as v

STRING = v.String()
BOOLEAN = v.Boolean()
ANY_OBJECT = v.AnyJson(only_objects=True)
SCALARS: Mapping[str, v.Validator] = {
    "string": STRING,
    "boolean": BOOLEAN,
    "integer": v.Integer(),
    "number": v.Number(),
    "json": v.AnyJson(),
    "object": ANY_OBJECT,
}
PLURALS: Mapping[type, str] = {v.String: "strings", v.StringEnum: "strings", v.Integer: "integers"}
"""The names of the items of an array in errors, by their validator; others are objects."""

Tables = dict[str, v.Members]
T = TypeVar("T")

_TYPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = decode(
    files("kedge.server.schema").joinpath("sdk_types.json").read_bytes()
)


class Rules(Struct, frozen=True):
    """What the packages do not declare about the members of their types.

    A path is the name of a table, followed by the names of members and the tags of unions: ``shell_call.action``.
    A path that starts with ``*`` applies to every table of a section.

    Args:
        order: The first members of a table in the order of their checks, or the first variants of a union in the
            order of errors, by path. Those that are not listed follow. Marks after the name of a member replace those
            of the package; ``-`` means none. The path ``*`` has the first members of every other table that has them.
        types: Validators by the path of a member. A member with the tables of another section needs one.
        expected: The expected value of a member of several types for an error message, by path.
    """

    order: Mapping[str, str] = {}
    types: Mapping[str, v.Validator | v.Members] = {}
    expected: Mapping[str, str] = {}

    def build(self, api: str, section: str) -> Tables:
        """Build the tables of a section of an API."""
        tables = _TYPES[api][section]
        return {
            name: self._build_members(table, name)
            for name, table in tables.items()
            if table != "object"
        }

    def _build_members(self, table: Mapping[str, Any], path: str) -> v.Members:
        # Names with their marks, by the names without them.
        declared = {name.rstrip("!?"): name for name in table}
        ordered = {name.rstrip("!?~-"): name for name in self._list_first(path, declared)}
        members: v.Members = {}
        for name in dict.fromkeys((*ordered, *declared)):
            declared_name = declared.get(name, name)
            member_name = declared_name
            if ordered.get(name, name) != name:
                member_name = ordered[name].removesuffix("-")
            member_path = f"{path}.{name}"
            validator = _find(self.types, member_path)
            if validator is None:
                validator = self._build_type(table.get(declared_name), member_path)
            members[member_name] = validator
        return members

    def _list_first(self, path: str, declared: Mapping[str, str]) -> list[str]:
        """Return the first members of a table, with their marks."""
        order = _find(self.order, path)
        if order is not None:
            return order.split()
        return [name for name in self.order.get("*", "").split() if name in declared]

    def _build_type(self, value: Any, path: str) -> v.Validator | v.Members:
        match value:
            case str():
                return SCALARS[value]
            case ["enum", *values]:
                return v.StringEnum(*values)
            case ["array", item]:
                validator = v.as_validator(self._build_type(item, path))
                return v.Array(validator, of=PLURALS.get(type(validator), "objects"))
            case ["map", item]:
                return v.Map(v.as_validator(self._build_type(item, path)))
            case ["union", variants]:
                tags = dict.fromkeys((*(_find(self.order, path) or "").split(), *variants))
                return v.TaggedUnion(
                    {tag: self._build_members(variants[tag], f"{path}.{tag}") for tag in tags}
                )
            case ["any", *alternatives]:
                return self._build_alternatives(alternatives, path)
            case _:
                return self._build_members(value, path)

    def _build_alternatives(self, alternatives: list[Any], path: str) -> v.TypeUnion:
        by_type: dict[type, v.Validator] = {}
        for alternative in alternatives:
            validator = self._build_type(alternative, path)
            by_type[_get_json_type(validator)] = v.as_validator(validator)
        return v.TypeUnion(self.expected[path], by_type)


def _get_json_type(validator: v.Validator | v.Members) -> type:
    """Return the type of the JSON values that a validator may accept."""
    match validator:
        case v.String() | v.StringEnum():
            return str
        case v.Array():
            return list
        case _:
            return dict


def list_opaque(api: str, section: str) -> tuple[str, ...]:
    """Return the names of the objects of a section whose members are not checked."""
    return tuple(name for name, table in _TYPES[api][section].items() if table == "object")


def _find(rules: Mapping[str, T], path: str) -> T | None:
    return rules.get(path) or rules.get("*." + path.partition(".")[2])
