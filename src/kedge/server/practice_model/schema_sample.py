"""Generate a value that satisfies a JSON schema, using the values of a sentence where they fit.

Used for the arguments of a tool and for answers in a ``json_schema`` format. A named value of the sentence is used for
the member of that name, a mentioned one for the first member that it fits, each once.

Supports types (also several), const, enum, required and optional members, nested objects, arrays and tuples, bounds,
lengths, the formats of ``FORMATS``, ``$ref`` into the same document, ``anyOf``, ``oneOf`` and ``allOf``. Other keywords
(``multipleOf``, ``uniqueItems``, ``minProperties``) are ignored. A ``pattern`` is not evaluated, because it is part of
a request and a malicious one can make ``re`` run without end. The text is a value of the sentence, the schema's default
or example, or any other text.

A schema is part of a request, and a small one can require endless work or a value of any size. So all samples of one
answer share a ``SampleBudget``. A step is a member of a schema that is read, merged or compared, a value that is tried,
or a thousand characters of one; a search of the sentence with a regular expression counts for many.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from itertools import islice
from typing import Any, NamedTuple, TypeGuard, cast
from uuid import UUID

from msgspec import Struct

from kedge.server.practice_model.context import MAX_OUTPUT_BYTES, MAX_STEPS, SampleBudget
from kedge.server.practice_model.sentence_values import BOOLEAN_WORDS, NO_VALUE, SentenceValues

JsonSchema = Mapping[str, Any]
ANY_TYPE = "any"
TYPE_HINTS = {"properties": "object", "required": "object", "items": "array", "minimum": "number"}
"""The type of a schema that states none, by a keyword that it has."""

MAX_REFERENCES = 24
MAX_DEPTH = 24
MAX_TYPES = 8
SEARCH_STEPS = 200
"""The steps for a search of the sentence with a regular expression."""
NUMBER_STEPS = 5
"""The steps for a number within bounds."""
CHARACTERS_PER_STEP = 1_000
SHORTEST_BRANCH_DEPTH = 3


def sample_value(
    schema: object,
    hints: SentenceValues,
    fallback_text: Callable[[str], str],
    budget: SampleBudget | None = None,
) -> Any:
    """Return a value for a schema.

    Args:
        schema: The JSON schema; a malformed one is tolerated.
        hints: The values of the sentence; one without a name is used for the first member that it fits.
        fallback_text: Returns a text for a member's name, where no other value fits.
        budget: The budget of the answer; by default a new one.

    Returns:
        The value, or None if the schema is malformed.

    Raises:
        SchemaTooComplex: The budget does not suffice.
    """
    root = as_schema(schema)
    try:
        sampler = _Sampler(root, hints, fallback_text, budget or SampleBudget())
        return sampler.sample(root, "", 0, hints.json_object or NO_VALUE)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return None


def as_schema(value: object) -> JsonSchema:
    """Return the value if it is an object, else the schema that allows anything."""
    return cast("JsonSchema", value) if isinstance(value, Mapping) else {}


def list_types(rules: JsonSchema) -> list[str]:
    """List the types that a schema allows, in its order; guessed if it states none."""
    declared: Any = rules.get("type") or ()
    types: list[str] = [declared] if isinstance(declared, str) else [*islice(declared, MAX_TYPES)]
    return types or [kind for word, kind in TYPE_HINTS.items() if word in rules][:1] or [ANY_TYPE]


_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)"


class TextFormat(NamedTuple):
    """A format of strings: a pattern that finds one, an example, and a parser that raises ValueError."""

    pattern: str
    example: str
    parse: Callable[[str], object] = str


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
    text_format = FORMATS.get(str(rules.get("format")), TextFormat(".*", ""))
    try:
        text_format.parse(value)
    except ValueError:
        return False
    matches = re.fullmatch(text_format.pattern, value, re.IGNORECASE | re.DOTALL)
    return matches is not None and fit_length(value, rules) == value


def fit_length(value: str, rules: JsonSchema) -> str:
    """Repeat or truncate a text to a length that the schema allows."""
    minimum, maximum = rules.get("minLength"), rules.get("maxLength")
    if isinstance(minimum, int) and len(value) < minimum <= MAX_OUTPUT_BYTES:
        filler = value or "text "
        value = (filler * (minimum // len(filler) + 1))[:minimum]
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
    return all(BOUND_CHECKS[word](value, limit) for word, limit in _read_bounds(rules).items())


def _find_number(rules: JsonSchema, kind: str) -> float:
    """Find a number within the bounds: the default, 1, 0, one near a bound, or the one in the middle."""
    if number_fits(default := rules.get("default"), rules, kind):
        return cast("float", default)
    limits = _read_bounds(rules).values()
    for start in (1, 0, *limits):
        for value in (start, math.floor(start) + 1, math.ceil(start) - 1):
            if number_fits(value, rules, kind):
                return value if value % 1 else int(value)
    middle = sum(limits) / (len(limits) or 1)
    return middle if number_fits(middle, rules, kind) else 1


def _read_bounds(rules: JsonSchema) -> dict[str, float]:
    return {word: rules[word] for word in BOUND_CHECKS if _is_number(rules.get(word))}


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two values have the same JSON."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _get_item_schema(rules: JsonSchema, index: int) -> object:
    fixed = rules.get("prefixItems", ())
    return fixed[index] if index < len(fixed) else rules.get("items", {})


def weigh_value(value: object) -> int:
    """Return the number of steps that a comparison of a value takes."""
    if isinstance(value, list | dict):
        values = cast("list[object]", value if isinstance(value, list) else [*value.values()])
        return 1 + sum(map(weigh_value, values))
    return 1 + (len(value) // CHARACTERS_PER_STEP if isinstance(value, str) else 0)


class _Sampler(Struct):
    """A generator of the value of one schema, within a budget."""

    root: JsonSchema
    hints: SentenceValues
    fallback_text: Callable[[str], str]
    budget: SampleBudget

    def sample(self, schema: object, name: str, depth: int, given: Any = NO_VALUE) -> Any:
        """Return a value for a part of the schema.

        Args:
            schema: The schema of the part.
            name: The name of the member, or empty.
            depth: The number of schemas around it.
            given: The value that the sentence has for it; by default the one of this name.
        """
        if depth > MAX_DEPTH:
            return None
        rules = self._resolve(schema)
        if given is NO_VALUE:
            given = self._find_named(name)
        if "const" in rules:
            return self._emit(rules["const"])
        if rules.get("enum"):
            return self._emit(self._choose_enum_value(rules, given))
        types = list_types(rules)
        branches = rules.get("anyOf") or rules.get("oneOf")
        if branches or len(types) > 1:
            branches = branches or [{"type": kind} for kind in types]
            branch = self._choose_branch(branches, name, depth, given)
            rest = {key: rules[key] for key in rules if key not in ("anyOf", "oneOf")}
            return self.sample(self._merge(rest, branch), name, depth + 1, given)
        if (value := self._find_value(rules, given, take=True)) is not NO_VALUE:
            return self._emit(value)
        match types[0]:
            case "object":
                return self._sample_object(rules, depth, given)
            case "array":
                return self._sample_array(rules, name, depth, given)
            case "number" | "integer":
                self.budget.spend(NUMBER_STEPS)
                return self._emit(_find_number(rules, types[0]))
            case "boolean":
                return self._emit(rules.get("default", True) is True)
            case "null":
                return self._emit(None)
            case _:
                return self._emit(self._sample_text(rules, name))

    def _emit(self, value: Any) -> Any:
        """Return a value that becomes part of the output."""
        size = len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        self.budget.spend(output_bytes=size + len(","))
        return value

    def _resolve(self, schema: object, depth: int = 0) -> JsonSchema:
        """Follow references and merge the parts of ``allOf``."""
        rules = as_schema(schema)
        self.budget.spend(1 + len(rules))
        if depth > MAX_REFERENCES:
            return {}
        parts = list(rules.get("allOf", ()))
        if isinstance(reference := rules.get("$ref"), str):
            parts.append(self._find_reference(reference))
        merged: JsonSchema = {}
        for part in parts:
            merged = self._merge(merged, self._resolve(part, depth + 1))
        own = {key: rules[key] for key in rules if key not in ("$ref", "allOf")}
        return self._merge(merged, own) if parts else own

    def _find_reference(self, reference: str) -> object:
        """Return the target of a reference like ``#/$defs/place``; None if there is none."""
        node: Any = self.root if reference.startswith("#") else None
        steps = reference.removeprefix("#").split("/")[1:]
        self.budget.spend(weigh_value(steps))
        for step in steps:
            node = as_schema(node).get(step.replace("~1", "/").replace("~0", "~"))
        return node

    def _merge(self, left: JsonSchema, right: JsonSchema) -> JsonSchema:
        """Merge two schemas that both apply; where they differ, the right one has precedence."""
        both = {**left, **right}
        if "properties" in left and "properties" in right:
            both["properties"] = {**as_schema(left["properties"]), **as_schema(right["properties"])}
            self.budget.spend(len(both["properties"]))
        if "required" in left and "required" in right:
            both["required"] = [*left["required"], *right["required"]]
            self.budget.spend(len(both["required"]))
        self.budget.spend(len(both))
        return both

    def _find_named(self, name: str) -> Any:
        """Return the value of this name in the sentence, or NO_VALUE."""
        self.budget.spend(SEARCH_STEPS if self.hints.is_unsearched(name) else 1)
        return self.hints.find_named(name)

    def _find_mentioned(self, values: Sequence[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or None."""
        self.budget.spend(sum(map(weigh_value, values)))
        return self.hints.find_mentioned(values)

    def _accepts(self, schema: object, value: Any, depth: int = 0) -> bool:
        """Return whether a value satisfies a schema."""
        if schema is False or depth > MAX_DEPTH:
            return False
        rules = self._resolve(schema)
        self.budget.spend(1 if isinstance(value, dict | list) else weigh_value(value))
        choices = [rules["const"]] if "const" in rules else rules.get("enum")
        branches = rules.get("anyOf") or rules.get("oneOf")
        return (
            (not choices or any(_is_same(choice, value) for choice in choices))
            and (not branches or any(self._accepts(each, value, depth + 1) for each in branches))
            and any(self._has_type(rules, kind, value, depth) for kind in list_types(rules))
        )

    def _has_type(self, rules: JsonSchema, kind: str, value: Any, depth: int) -> bool:
        match kind:
            case "object" if isinstance(value, dict):
                members = cast("dict[str, Any]", value)
                known, other = rules.get("properties"), rules.get("additionalProperties", {})
                has_size = all(key in members for key in rules.get("required", ()))
                parts = [(as_schema(known).get(key, other), each) for key, each in members.items()]
            case "array" if isinstance(value, list):
                items = cast("list[Any]", value)
                has_size = (
                    rules.get("minItems", 0) <= len(items) <= rules.get("maxItems", len(items))
                )
                parts = [(_get_item_schema(rules, index), each) for index, each in enumerate(items)]
            case "string":
                return isinstance(value, str) and text_fits(value, rules)
            case "integer" | "number":
                return number_fits(value, rules, kind)
            case "boolean":
                return isinstance(value, bool)
            case "null":
                return value is None
            case _:
                return kind == ANY_TYPE
        return has_size and all(self._accepts(schema, each, depth + 1) for schema, each in parts)

    def _find_value(
        self, rules: JsonSchema, given: Any, *, take: bool = False, is_named: bool = False
    ) -> Any:
        """Return the given value if it fits, or one without a name unless ``is_named``, or NO_VALUE.

        Objects and arrays are sampled member by member instead, so that one that does not fit is only repaired. With
        ``take`` a value without a name is used only once.
        """
        kind = list_types(rules)[0]
        if kind == "object" or (kind == "array" and isinstance(given, list)):
            return NO_VALUE
        if kind == "string" and (isinstance(given, str) or _is_number(given)):
            given = fit_length(str(given), rules)
        elif kind == "boolean":
            given = BOOLEAN_WORDS.get(fold_scalar(given) or "", NO_VALUE)
        if given is not NO_VALUE and self._accepts(rules, given):
            return given
        unnamed = [] if is_named else self.hints.unnamed_values
        for index, value in enumerate(unnamed):
            if self._accepts(rules, value):
                return unnamed.pop(index) if take else value
        return NO_VALUE

    def _has_value(self, schema: object, name: str, *, is_named: bool = False) -> bool:
        """Return whether the sentence has a value for a member."""
        rules = self._resolve(schema)
        if self._find_mentioned(rules.get("enum", ())) is not None:
            return True
        given = self._find_named(name)
        if list_types(rules)[0] in ("object", "array") and given is not NO_VALUE:
            return True
        return self._find_value(rules, given, is_named=is_named) is not NO_VALUE

    def _choose_enum_value(self, rules: JsonSchema, given: Any) -> Any:
        """Choose the given value, else one that the sentence contains, else the default or the first."""
        choices = {fold_scalar(choice): choice for choice in rules["enum"]}
        values = (given, self._find_mentioned(rules["enum"]), *self.hints.unnamed_values)
        self.budget.spend(sum(map(weigh_value, values)))
        if given is not NO_VALUE and any(_is_same(given, choice) for choice in rules["enum"]):
            return given
        for value in values:
            if (folded := fold_scalar(value)) is not None and folded in choices:
                return choices[folded]
        return rules.get("default", rules["enum"][0])

    def _choose_branch(
        self, schemas: Sequence[object], name: str, depth: int, given: Any
    ) -> JsonSchema:
        """Choose the branch that the sentence has a value for, else null, else the first.

        Below a depth the smallest branch is chosen, because a recursive schema would never end.
        """
        branches = [self._resolve(schema) for schema in schemas]
        if given is not NO_VALUE:
            fits = [self._measure_fit(branch, given) for branch in branches]
            if max(fits) > 0:
                return branches[fits.index(max(fits))]
        if depth >= SHORTEST_BRANCH_DEPTH:
            return min(branches, key=_estimate_size)
        nulls = [branch for branch in branches if branch.get("type") == "null"]
        for branch in branches:
            if branch not in nulls and self._has_value(branch, name):
                return branch
        return nulls[0] if nulls and name else branches[0]

    def _measure_fit(self, rules: JsonSchema, given: Any) -> float:
        """Return how well a given value fits a branch: infinity, or the number of its members that fit."""
        if self._accepts(rules, given):
            return math.inf
        members = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        known = as_schema(rules.get("properties"))
        return sum(self._accepts(known[key], members[key]) for key in members if key in known)

    def _sample_object(self, rules: JsonSchema, depth: int, given: Any) -> dict[str, Any]:
        members = cast("dict[str, Any]", as_schema(rules.get("properties")))
        required = [str(key) for key in rules.get("required", ())]
        values = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        # The members of the sentence's own object may be meant for any object of the schema.
        is_closed = isinstance(given, dict) and given is not self.hints.json_object
        self.budget.spend(len(members) + len(required) + len(values), len("{},"))
        sampled: dict[str, Any] = {}

        def add(key: str, schema: object) -> None:
            value = values.get(key, NO_VALUE)
            sampled[self._emit(key)] = self.sample(schema, key, depth + 1, value)

        for key in sorted(dict.fromkeys(required), key=lambda key: key not in members):
            add(key, members.get(key, {}))
        for key, schema in members.items():
            # A value without a name is used for an optional member only if there is no other member.
            if key not in sampled and (
                key in values
                or (not is_closed and self._has_value(schema, key, is_named=bool(sampled)))
            ):
                add(key, schema)
        if rules.get("additionalProperties", is_closed or not members) is not False:
            for key in values:
                if key not in sampled:
                    add(key, rules.get("additionalProperties", {}))
        return {key: sampled[key] for key in (*members, *sampled) if key in sampled}

    def _sample_array(self, rules: JsonSchema, name: str, depth: int, given: Any) -> list[Any]:
        self.budget.spend(output_bytes=len("[],"))
        values = cast("list[Any]", given) if isinstance(given, list) else None
        fixed = len(rules.get("prefixItems", ()))
        minimum = int(rules.get("minItems", 0))
        maximum = int(rules.get("maxItems", max(minimum, MAX_STEPS)))
        if rules.get("items") is False:
            maximum = min(maximum, fixed)
        wanted = max(minimum, fixed if values is None else len(values))
        if values is None and depth < SHORTEST_BRANCH_DEPTH and not fixed:
            wanted = max(wanted, 1)
        items = self._resolve(rules.get("items", {}))
        is_list = list_types(items)[0] in ("string", "integer", "number") and "format" not in items
        sampled: list[Any] = []
        while len(sampled) < maximum and (
            len(sampled) < wanted or (is_list and values is None and self._has_value(items, ""))
        ):
            index = len(sampled)
            value = values[index] if values and index < len(values) else NO_VALUE
            item_name = name if values is None and not sampled and not fixed else ""
            sampled.append(self.sample(_get_item_schema(rules, index), item_name, depth + 1, value))
        return sampled

    def _sample_text(self, rules: JsonSchema, name: str) -> str:
        if text_format := FORMATS.get(str(rules.get("format"))):
            self.budget.spend(SEARCH_STEPS)
            matches = re.finditer(text_format.pattern, self.hints.sentence, re.IGNORECASE)
            texts = (match[0].rstrip(".,;") for match in matches)
            return next((text for text in texts if text_fits(text, rules)), text_format.example)
        if isinstance(minimum := rules.get("minLength"), int) and minimum > MAX_OUTPUT_BYTES:
            self.budget.spend(output_bytes=minimum)
        defaults = (rules.get("default"), *(rules.get("examples") or ()))
        self.budget.spend(len(defaults))
        default_text = next((text for text in defaults if text and isinstance(text, str)), "")
        return fit_length(default_text or self.fallback_text(name) or "text", rules)


def fold_scalar(value: object) -> str | None:
    """Return a text, number or boolean as a text in lower case; None for any other value."""
    return str(value).lower() if isinstance(value, str | int | float) else None


def _estimate_size(rules: JsonSchema) -> tuple[bool, int]:
    """Order branches: scalars before containers, then by the number of required members."""
    return list_types(rules)[0] in ("object", "array"), len(rules.get("required", ()))
