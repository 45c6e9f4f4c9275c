"""Strict schemas: the part of JSON schema that a server can force a model to keep to.

In strict mode every object is closed and every property is required, so what may be left out is
written as ``null``. The rules are the two tables below. What strict mode has no words for is either
left unsaid (Kedge checks it when the call comes) or, where that would change what may be written,
refused.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

JSONSchema = dict[str, Any]

LEFT_UNSAID = frozenset(
    {"default", "discriminator", "examples", "maxLength", "minLength", "uniqueItems"}
)
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid"}
)
REFUSED = {
    "allOf": "an intersection of types",
    "contains": "an array that must contain something",
    "if": "a condition",
    "not": "a type by what it is not",
    "patternProperties": "property names by pattern",
    "prefixItems": "a tuple of different types; a dataclass says the same",
}
ONE = ("items", "additionalProperties", "not", "contains", "propertyNames")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "$defs", "patternProperties")

Refuse = Callable[[str, str], Exception]


def subschemas(schema: JSONSchema) -> Iterator[JSONSchema]:
    """The schemas directly inside a schema."""
    for key in ONE:
        if isinstance(schema.get(key), dict):
            yield schema[key]
    for key in MANY:
        yield from schema.get(key, ())
    for key in NAMED:
        yield from schema.get(key, {}).values()


def strict_schema(schema: JSONSchema, refuse: Refuse) -> JSONSchema:
    """The schema in strict form; ``refuse(path, problem)`` makes the error where there is none."""
    return _Strict(schema.get("$defs", {}), refuse).closed(schema, "arguments", ())


class _Strict:
    def __init__(self, definitions: JSONSchema, refuse: Refuse) -> None:
        self.definitions = definitions
        self.refuse = refuse

    def closed(self, schema: JSONSchema, path: str, seen: tuple[str, ...]) -> JSONSchema:
        if "$ref" in schema:
            return self._reference(schema, path, seen)
        if found := next((key for key in REFUSED if key in schema), None):
            raise self.refuse(path, f"strict mode cannot say {REFUSED[found]}")
        if not schema.keys() & {"type", "anyOf", "oneOf", "enum", "const"}:
            raise self.refuse(path, "strict mode needs a type here, not Any")
        kept = {key: value for key, value in schema.items() if key not in LEFT_UNSAID}
        if kept.get("format") not in FORMATS:
            kept.pop("format", None)
        if "oneOf" in kept:
            kept["anyOf"] = kept.pop("oneOf")
        return self._inside(kept, path, seen)

    def _inside(self, schema: JSONSchema, path: str, seen: tuple[str, ...]) -> JSONSchema:
        if schema.get("type") == "object":
            self._close(schema, path)
        if isinstance(schema.get("items"), dict):
            schema["items"] = self.closed(schema["items"], f"{path}[]", seen)
        if "anyOf" in schema:
            choices = cast("list[JSONSchema]", schema["anyOf"])
            schema["anyOf"] = [self.closed(choice, path, seen) for choice in choices]
        for key in ("properties", "$defs"):
            if key in schema:
                members = cast("JSONSchema", schema[key])
                schema[key] = {
                    name: self.closed(member, name if key == "$defs" else f"{path}.{name}", seen)
                    for name, member in members.items()
                }
        return schema

    def _close(self, schema: JSONSchema, path: str) -> None:
        open_ended = "properties" not in schema and "additionalProperties" not in schema
        if open_ended or schema.get("additionalProperties", False) is not False:
            raise self.refuse(path, "strict mode knows no object with free keys; use a dataclass")
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
        schema["required"] = list(schema["properties"])

    def _reference(self, schema: JSONSchema, path: str, seen: tuple[str, ...]) -> JSONSchema:
        """A reference may have no members beside it: put the definition in its place then."""
        reference: str = schema["$ref"]
        beside = {k: v for k, v in schema.items() if k != "$ref" and k not in LEFT_UNSAID}
        if not beside or reference in seen:
            return {"$ref": reference}
        definition = self.definitions[reference.rpartition("/")[2]]
        return self.closed({**definition, **beside}, path, (*seen, reference))
