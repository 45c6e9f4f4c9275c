"""Reading a JSON schema: references followed, parts joined, types named.

Everything is lenient: what is no schema reads as the schema for anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

Schema = Mapping[str, Any]
KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
ANY = "any"
MOST_REFERENCES = 24


def kinds(rules: Schema) -> list[str]:
    """Name the types that a schema allows, as it orders them; guessed where it does not say."""
    stated = rules.get("type")
    listed = [stated] if isinstance(stated, str) else list(cast("Sequence[str]", stated or ()))
    known = [kind for kind in listed if kind in KINDS]
    if known:
        return known
    for word, kind in (
        ("properties", "object"),
        ("required", "object"),
        ("items", "array"),
        ("minimum", "number"),
    ):
        if word in rules:
            return [kind]
    return [ANY]


def resolved(root: Schema, schema: object, depth: int = 0) -> Schema:
    """Follow references and join ``allOf``; booleans are the schemas for anything and nothing."""
    rules = mapping(schema)
    if depth > MOST_REFERENCES:
        return {}
    if isinstance(reference := rules.get("$ref"), str):
        target = resolved(root, _target(root, reference), depth + 1)
        return merged(target, {key: rules[key] for key in rules if key != "$ref"})
    if parts := rules.get("allOf"):
        joined: Schema = {key: rules[key] for key in rules if key != "allOf"}
        for part in parts:
            joined = merged(joined, resolved(root, part, depth + 1))
        return joined
    return rules


def _target(root: Schema, reference: str) -> Schema:
    """Find what a reference like ``#/$defs/place`` points to; anything where it leads nowhere."""
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            listed = cast("list[Any]", place)
            place = listed[int(key)] if key.isdecimal() and int(key) < len(listed) else None
        else:
            place = mapping(place).get(key)
    return mapping(place) if reference.startswith("#") else {}


def merged(left: Schema, right: Schema) -> Schema:
    """Join two schemas that both hold; where they differ the right one wins."""
    both = {**left, **right}
    if "properties" in left and "properties" in right:
        both["properties"] = {**mapping(left["properties"]), **mapping(right["properties"])}
    if "required" in left and "required" in right:
        both["required"] = [*left["required"], *right["required"]]
    return both


def mapping(value: object) -> Schema:
    """Read a value as a schema."""
    return cast("Schema", value) if isinstance(value, Mapping) else {}
