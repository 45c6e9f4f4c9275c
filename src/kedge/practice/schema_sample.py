"""Generate a value that satisfies a JSON schema, using the values of a sentence where they fit.

Used for the arguments of a tool and for answers in a ``json_schema`` format. Supports types (also
several), const, enum, required and optional members, nested objects, arrays and tuples, bounds,
lengths, the formats of ``FORMATS``, ``$ref`` into the same document, ``anyOf``, ``oneOf`` and ``allOf``.
Other keywords (``multipleOf``, ``uniqueItems``, ``minProperties``) are ignored.

A ``pattern`` is not evaluated, because it is part of a request and a malicious one can make ``re`` run
without end. The text is a value of the sentence, the schema's default or example, or any other text.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any, TypeGuard, cast
from uuid import UUID

from kedge.practice.sentence_values import BOOLEAN_WORDS, SentenceValues

JsonSchema = Mapping[str, Any]
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ANY_TYPE = "any"
SCALAR_TYPES = (ANY_TYPE, "string", "number", "integer", "boolean")
TYPE_HINTS = {"properties": "object", "required": "object", "items": "array", "minimum": "number"}
"""The type of a schema that states none, by a keyword that it has."""

MAX_REFERENCES = 24
MAX_STEPS = 4_000
MAX_DEPTH = 24
MAX_ITEMS = 1_000
MAX_TEXT_LENGTH = 10_000
SHORTEST_BRANCH_DEPTH = 3

NO_VALUE: Any = object()


def sample_value(schema: object, hints: SentenceValues, fallback_text: Callable[[str], str]) -> Any:
    """Return a value for a schema.

    Args:
        schema: The JSON schema; a malformed one is tolerated.
        hints: The values of the sentence; one without a name is used for the first member that it fits.
        fallback_text: Returns a text for a member's name, where no other value fits.

    Returns:
        The value, or None if the schema is malformed.
    """
    root = as_schema(schema)
    try:
        return _Sampler(root, hints, fallback_text).sample(root, "", 0)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return None


def as_schema(value: object) -> JsonSchema:
    """Return the value if it is an object, else the schema that allows anything."""
    return cast("JsonSchema", value) if isinstance(value, Mapping) else {}


def list_types(rules: JsonSchema) -> list[str]:
    """List the types that a schema allows, in its order; guessed if it states none."""
    declared = rules.get("type")
    listed = (
        [declared] if isinstance(declared, str) else list(cast("Sequence[str]", declared or ()))
    )
    known = [kind for kind in listed if kind in JSON_TYPES]
    return known or [kind for word, kind in TYPE_HINTS.items() if word in rules][:1] or [ANY_TYPE]


def resolve_schema(root: JsonSchema, schema: object, depth: int = 0) -> JsonSchema:
    """Follow references and merge the parts of ``allOf``."""
    rules = as_schema(schema)
    if depth > MAX_REFERENCES:
        return {}
    if isinstance(reference := rules.get("$ref"), str):
        target = resolve_schema(root, _find_reference(root, reference), depth + 1)
        return _merge_schemas(target, {key: rules[key] for key in rules if key != "$ref"})
    merged: JsonSchema = {key: rules[key] for key in rules if key != "allOf"}
    for part in rules.get("allOf", ()):
        merged = _merge_schemas(merged, resolve_schema(root, part, depth + 1))
    return merged


def _find_reference(root: JsonSchema, reference: str) -> object:
    """Return the target of a reference like ``#/$defs/place``; None if there is none."""
    node: Any = root if reference.startswith("#") else None
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        node = as_schema(node).get(key)
    return node


def _merge_schemas(left: JsonSchema, right: JsonSchema) -> JsonSchema:
    """Merge two schemas that both apply; where they differ, the right one has precedence."""
    both = {**left, **right}
    if "properties" in left and "properties" in right:
        both["properties"] = {**as_schema(left["properties"]), **as_schema(right["properties"])}
    if "required" in left and "required" in right:
        both["required"] = [*left["required"], *right["required"]]
    return both


_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A format of strings: a pattern that finds one, an example, and a check that raises ValueError."""

    pattern: str
    example: str
    check: Callable[[str], object] = str

    def matches(self, value: str) -> bool:
        """Return whether a text has the format."""
        try:
            self.check(value)
        except ValueError:
            return False
        return bool(re.fullmatch(self.pattern, value, re.IGNORECASE))


FORMATS: Mapping[str, TextFormat] = {
    "date": TextFormat(_DATE, "2025-01-31", date.fromisoformat),
    "time": TextFormat(rf"(?<!\S){_TIME}", "12:00:00Z", time.fromisoformat),
    "date-time": TextFormat(rf"{_DATE}T{_TIME}", "2025-01-31T12:00:00Z", datetime.fromisoformat),
    "email": TextFormat(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+", "ada@example.com"),
    "uuid": TextFormat(
        r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", str(UUID(int=1 << 78, version=4)), UUID
    ),
    "uri": TextFormat(r"\bhttps?://[^\s\"'<>]+", "https://example.com/"),
}


def text_fits(value: str, rules: JsonSchema) -> bool:
    """Return whether a text has the length and the format of the schema."""
    text_format = FORMATS.get(str(rules.get("format")))
    return fit_length(value, rules) == value and (text_format is None or text_format.matches(value))


def fit_length(value: str, rules: JsonSchema) -> str:
    """Repeat or truncate a text to a length that the schema allows."""
    minimum, maximum = rules.get("minLength"), rules.get("maxLength")
    if isinstance(minimum, int) and len(value) < min(minimum, MAX_TEXT_LENGTH):
        filler = value or "text "
        value = (filler * (min(minimum, MAX_TEXT_LENGTH) // len(filler) + 1))[:minimum]
    return value[:maximum] if isinstance(maximum, int) and maximum >= 0 else value


BOUND_CHECKS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


def number_fits(value: object, rules: JsonSchema, kind: str) -> bool:
    """Return whether a value is a number within the bounds of the schema."""
    if not _is_number(value) or (kind == "integer" and value % 1):
        return False
    return all(check(value, limit) for check, limit in _list_bounds(rules))


def _find_number(rules: JsonSchema, kind: str) -> float:
    """Find a number within the bounds: 1, 0, one near a bound, or the one in the middle."""
    limits = [limit for _, limit in _list_bounds(rules)]
    for start in (1, 0, *limits):
        for value in (start, math.floor(start) + 1, math.ceil(start) - 1):
            if number_fits(value, rules, kind):
                return value if value % 1 else int(value)
    middle = sum(limits) / (len(limits) or 1)
    return middle if number_fits(middle, rules, kind) else 1


def _list_bounds(rules: JsonSchema) -> list[tuple[Callable[[float, float], bool], float]]:
    bounds = ((check, rules.get(word)) for word, check in BOUND_CHECKS.items())
    return [(check, limit) for check, limit in bounds if _is_number(limit)]


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def value_fits(value: Any, rules: JsonSchema, kind: str) -> bool:
    """Return whether a value, other than an object, is allowed by a schema of this type."""
    match kind:
        case "string":
            return isinstance(value, str) and text_fits(value, rules)
        case "integer" | "number":
            return number_fits(value, rules, kind)
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list) and _items_fit(cast("list[Any]", value), rules)
        case _:
            return kind == ANY_TYPE


def coerce_value(value: Any, rules: JsonSchema, kind: str) -> Any:
    """Convert a named value to one of this type, or return NO_VALUE if it does not fit."""
    if kind == "string" and (isinstance(value, str) or _is_number(value)):
        value = fit_length(str(value), rules)
    elif kind == "boolean":
        value = BOOLEAN_WORDS.get(str(value).lower())
    return value if value_fits(value, rules, kind) else NO_VALUE


def _items_fit(values: list[Any], rules: JsonSchema) -> bool:
    items = as_schema(rules.get("items"))
    kind = items.get("type", ANY_TYPE)
    if kind not in SCALAR_TYPES or not {"enum", "const", "$ref", "anyOf"}.isdisjoint(items):
        return False
    minimum, maximum = rules.get("minItems", 0), rules.get("maxItems", MAX_ITEMS)
    return minimum <= len(values) <= maximum and all(
        value_fits(value, items, kind) for value in values
    )


class _Sampler:
    """A generator of the value of one schema, with a limited number of steps."""

    def __init__(
        self, root: JsonSchema, hints: SentenceValues, fallback_text: Callable[[str], str]
    ) -> None:
        self._root = root
        self._hints = hints
        self._fallback_text = fallback_text
        self._steps = 0

    def sample(self, schema: object, name: str, depth: int) -> Any:
        """Return a value for a part of the schema; ``name`` is the name of the member, or empty."""
        self._steps += 1
        if self._steps > MAX_STEPS or depth > MAX_DEPTH:
            return None
        rules = resolve_schema(self._root, schema)
        if "const" in rules:
            return rules["const"]
        if rules.get("enum"):
            return self._choose_enum_value(rules, name)
        types = list_types(rules)
        branches = rules.get("anyOf") or rules.get("oneOf")
        if branches or len(types) > 1:
            others = {key: rules[key] for key in rules if key not in ("anyOf", "oneOf", "type")}
            alternatives = [resolve_schema(self._root, branch) for branch in branches or ()]
            branch = self._choose_branch(
                alternatives or [{"type": kind} for kind in types], name, depth
            )
            kind = {"type": rules["type"]} if "type" in rules and "type" not in branch else {}
            return self.sample(_merge_schemas({**kind, **others}, branch), name, depth + 1)
        value = self._find_value(rules, types[0], name)
        if value is not NO_VALUE:
            return value
        match types[0]:
            case "object":
                return self._sample_object(rules, depth)
            case "array":
                return self._sample_array(rules, name, depth)
            case "number" | "integer":
                default = rules.get("default")
                fits = number_fits(default, rules, types[0])
                return default if fits else _find_number(rules, types[0])
            case "boolean":
                return rules.get("default", True) is True
            case "null":
                return None
            case _:
                return self._sample_text(rules, name)

    def _find_value(self, rules: JsonSchema, kind: str, name: str) -> Any:
        """Return the value of this name in the sentence, or one without a name that fits, or NO_VALUE."""
        named = self._hints.find_named(name)
        if named is not None and (value := coerce_value(named, rules, kind)) is not NO_VALUE:
            return value
        value = self._hints.pop_unnamed(lambda value: value_fits(value, rules, kind))
        return NO_VALUE if value is None else value

    def _has_value(self, rules: JsonSchema, name: str, *, is_named: bool = False) -> bool:
        """Return whether the sentence has a value of this type; one without a name unless ``is_named``."""
        kind = list_types(rules)[0]
        named = self._hints.find_named(name)
        if named is not None:
            return kind == "object" or coerce_value(named, rules, kind) is not NO_VALUE
        if self._hints.find_mentioned(rules.get("enum", ())) is not None:
            return True
        values = () if is_named else self._hints.unnamed_values
        return any(value_fits(value, rules, kind) for value in values)

    def _choose_enum_value(self, rules: JsonSchema, name: str) -> Any:
        """Choose the named value, else one that the sentence contains, else the default or the first."""
        choices = {str(choice).lower(): choice for choice in rules["enum"]}
        mentioned = self._hints.find_mentioned(choices.values())
        wanted = (self._hints.find_named(name), mentioned, *self._hints.unnamed_values)
        for value in wanted:
            if value is not None and str(value).lower() in choices:
                return choices[str(value).lower()]
        return rules.get("default", rules["enum"][0])

    def _choose_branch(self, branches: Sequence[JsonSchema], name: str, depth: int) -> JsonSchema:
        """Choose the branch that the sentence has a value for, else null, else the first.

        Below a depth the smallest branch is chosen, because a recursive schema would never end.
        """
        if depth >= SHORTEST_BRANCH_DEPTH:
            return min(branches, key=_estimate_size)
        for branch in branches:
            if branch.get("type") != "null" and self._has_value(branch, name):
                return branch
        nulls = [branch for branch in branches if branch.get("type") == "null"]
        return nulls[0] if nulls and name else branches[0]

    def _sample_object(self, rules: JsonSchema, depth: int) -> dict[str, Any]:
        members = cast("dict[str, Any]", as_schema(rules.get("properties")))
        required = [str(key) for key in rules.get("required", ())]
        sampled: dict[str, Any] = {}
        for key in sorted(dict.fromkeys(required), key=lambda key: key not in members):
            sampled[key] = self.sample(members.get(key, {}), key, depth + 1)
        for key, schema in members.items():
            # A value without a name is used for an optional member only if there is no other member.
            rules = resolve_schema(self._root, schema)
            if key not in sampled and self._has_value(rules, key, is_named=bool(sampled)):
                sampled[key] = self.sample(schema, key, depth + 1)
        return {key: sampled[key] for key in (*members, *sampled) if key in sampled}

    def _sample_array(self, rules: JsonSchema, name: str, depth: int) -> list[Any]:
        fixed = cast("Sequence[object]", rules.get("prefixItems", ()))
        items = resolve_schema(self._root, rules.get("items", {}))
        minimum = min(int(rules.get("minItems", 0)), MAX_ITEMS)
        maximum = min(int(rules.get("maxItems", MAX_ITEMS)), MAX_ITEMS)
        sampled = [self.sample(schema, "", depth + 1) for schema in fixed[:maximum]]
        if rules.get("items") is False:
            return sampled
        if depth < SHORTEST_BRANCH_DEPTH and not fixed:
            minimum = max(minimum, min(1, maximum))
        is_list = list_types(items)[0] in ("string", "integer", "number") and "format" not in items
        while len(sampled) < maximum and (
            len(sampled) < minimum or (is_list and self._has_value(items, ""))
        ):
            sampled.append(self.sample(items, "" if sampled else name, depth + 1))
        return sampled

    def _sample_text(self, rules: JsonSchema, name: str) -> str:
        if text_format := FORMATS.get(str(rules.get("format"))):
            matches = re.finditer(text_format.pattern, self._hints.sentence, re.IGNORECASE)
            texts = (match[0].rstrip(".,;") for match in matches)
            return next((text for text in texts if text_fits(text, rules)), text_format.example)
        defaults = (rules.get("default"), *(rules.get("examples") or ()))
        default_text = next((text for text in defaults if text and isinstance(text, str)), "")
        return fit_length(default_text or self._fallback_text(name) or "text", rules)


def _estimate_size(rules: JsonSchema) -> tuple[bool, int]:
    """Order branches: scalars before containers, then by the number of required members."""
    return list_types(rules)[0] in ("object", "array"), len(rules.get("required", ()))
