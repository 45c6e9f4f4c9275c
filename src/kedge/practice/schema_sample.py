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

from kedge.errors import SchemaTooComplex
from kedge.practice.sentence_values import BOOLEAN_WORDS, SentenceValues

JsonSchema = Mapping[str, Any]
ANY_TYPE = "any"
SCALAR_TYPES = (ANY_TYPE, "string", "number", "integer", "boolean")
TYPE_HINTS = {"properties": "object", "required": "object", "items": "array", "minimum": "number"}
"""The type of a schema that states none, by a keyword that it has."""

MAX_STEPS = 10_000
"""The steps of all samples of one answer."""
MAX_OUTPUT_BYTES = 100_000
"""The size of all samples of one answer, as JSON."""
MAX_REFERENCES = 24
MAX_DEPTH = 24
MAX_TYPES = 8
SEARCH_STEPS = 200
"""The steps for a search of the sentence with a regular expression."""
NUMBER_STEPS = 5
"""The steps for a number within bounds."""
CHARACTERS_PER_STEP = 1_000
SHORTEST_BRANCH_DEPTH = 3

NO_VALUE: Any = object()


class SampleBudget:
    """The work and the output that remain for the samples of one answer."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.output_bytes = MAX_OUTPUT_BYTES

    def spend(self, steps: int = 0, output_bytes: int = 0) -> None:
        """Subtract steps and bytes.

        Raises:
            SchemaTooComplex: One of them is used up.
        """
        self.steps -= steps
        self.output_bytes -= output_bytes
        if self.steps < 0:
            raise SchemaTooComplex(f"takes more than {MAX_STEPS:,} steps")
        if self.output_bytes < 0:
            raise SchemaTooComplex(f"has more than {MAX_OUTPUT_BYTES:,} bytes")


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
        return _Sampler(root, hints, fallback_text, budget or SampleBudget()).sample(root, "", 0)
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


def _items_fit(values: list[Any], rules: JsonSchema) -> bool:
    items = as_schema(rules.get("items"))
    kind = items.get("type", ANY_TYPE)
    if kind not in SCALAR_TYPES or not {"enum", "const", "$ref", "anyOf"}.isdisjoint(items):
        return False
    has_length = rules.get("minItems", 0) <= len(values) <= rules.get("maxItems", len(values))
    return has_length and all(value_fits(value, items, kind) for value in values)


def weigh_value(value: object) -> int:
    """Return the number of steps that a comparison of a value takes."""
    if isinstance(value, list):
        values = cast("list[object]", value)
        return 1 + sum(map(weigh_value, values))
    return 1 + (len(value) // CHARACTERS_PER_STEP if isinstance(value, str) else 0)


class _Sampler:
    """A generator of the value of one schema, within a budget."""

    def __init__(
        self,
        root: JsonSchema,
        hints: SentenceValues,
        fallback_text: Callable[[str], str],
        budget: SampleBudget,
    ) -> None:
        self._root = root
        self._hints = hints
        self._fallback_text = fallback_text
        self._budget = budget

    def sample(self, schema: object, name: str, depth: int) -> Any:
        """Return a value for a part of the schema; ``name`` is the name of the member, or empty."""
        if depth > MAX_DEPTH:
            return None
        rules = self._resolve(schema)
        if "const" in rules:
            return self._emit(rules["const"])
        if rules.get("enum"):
            return self._emit(self._choose_enum_value(rules, name))
        types = list_types(rules)
        branches = rules.get("anyOf") or rules.get("oneOf")
        if branches or len(types) > 1:
            branch = self._choose_branch(
                branches or [{"type": kind} for kind in types], name, depth
            )
            rest = {key: rules[key] for key in rules if key not in ("anyOf", "oneOf")}
            return self.sample(self._merge(rest, branch), name, depth + 1)
        if (value := self._find_value(rules, name, take=True)) is not NO_VALUE:
            return self._emit(value)
        match types[0]:
            case "object":
                return self._sample_object(rules, depth)
            case "array":
                return self._sample_array(rules, name, depth)
            case "number" | "integer":
                self._budget.spend(NUMBER_STEPS)
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
        self._budget.spend(output_bytes=size + len(","))
        return value

    def _resolve(self, schema: object, depth: int = 0) -> JsonSchema:
        """Follow references and merge the parts of ``allOf``."""
        rules = as_schema(schema)
        self._budget.spend(1 + len(rules))
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
        node: Any = self._root if reference.startswith("#") else None
        steps = reference.removeprefix("#").split("/")[1:]
        self._budget.spend(weigh_value(steps))
        for step in steps:
            node = as_schema(node).get(step.replace("~1", "/").replace("~0", "~"))
        return node

    def _merge(self, left: JsonSchema, right: JsonSchema) -> JsonSchema:
        """Merge two schemas that both apply; where they differ, the right one has precedence."""
        both = {**left, **right}
        if "properties" in left and "properties" in right:
            both["properties"] = {**as_schema(left["properties"]), **as_schema(right["properties"])}
            self._budget.spend(len(both["properties"]))
        if "required" in left and "required" in right:
            both["required"] = [*left["required"], *right["required"]]
            self._budget.spend(len(both["required"]))
        self._budget.spend(len(both))
        return both

    def _find_named(self, name: str) -> Any:
        """Return the value of this name in the sentence, or None."""
        self._budget.spend(SEARCH_STEPS if self._hints.is_unsearched(name) else 1)
        return self._hints.find_named(name)

    def _find_mentioned(self, values: Sequence[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or None."""
        self._budget.spend(sum(map(weigh_value, values)))
        return self._hints.find_mentioned(values)

    def _fits(self, value: Any, rules: JsonSchema, kind: str) -> bool:
        self._budget.spend(weigh_value(value))
        return value_fits(value, rules, kind)

    def _find_value(
        self, rules: JsonSchema, name: str, *, take: bool = False, is_named: bool = False
    ) -> Any:
        """Return the value of this name in the sentence, or one without a name unless ``is_named``, or NO_VALUE.

        With ``take`` a value without a name is used only once.
        """
        kind = list_types(rules)[0]
        named = self._find_named(name)
        if kind == "string" and (isinstance(named, str) or _is_number(named)):
            named = fit_length(str(named), rules)
        elif kind == "boolean":
            named = BOOLEAN_WORDS.get(fold_scalar(named) or "")
        if named is not None and self._fits(named, rules, kind):
            return named
        unnamed = [] if is_named else self._hints.unnamed_values
        for index, value in enumerate(unnamed):
            if self._fits(value, rules, kind):
                return unnamed.pop(index) if take else value
        return NO_VALUE

    def _has_value(self, schema: object, name: str, *, is_named: bool = False) -> bool:
        """Return whether the sentence has a value for a member."""
        rules = self._resolve(schema)
        if self._find_mentioned(rules.get("enum", ())) is not None:
            return True
        if list_types(rules)[0] == "object" and self._find_named(name) is not None:
            return True
        return self._find_value(rules, name, is_named=is_named) is not NO_VALUE

    def _choose_enum_value(self, rules: JsonSchema, name: str) -> Any:
        """Choose the named value, else one that the sentence contains, else the default or the first."""
        mentioned = self._find_mentioned(rules["enum"])
        choices = {fold_scalar(choice): choice for choice in rules["enum"]}
        values = (self._find_named(name), mentioned, *self._hints.unnamed_values)
        self._budget.spend(sum(map(weigh_value, values)))
        for value in values:
            if (folded := fold_scalar(value)) is not None and folded in choices:
                return choices[folded]
        return rules.get("default", rules["enum"][0])

    def _choose_branch(self, schemas: Sequence[object], name: str, depth: int) -> JsonSchema:
        """Choose the branch that the sentence has a value for, else null, else the first.

        Below a depth the smallest branch is chosen, because a recursive schema would never end.
        """
        branches = [self._resolve(schema) for schema in schemas]
        if depth >= SHORTEST_BRANCH_DEPTH:
            return min(branches, key=_estimate_size)
        nulls = [branch for branch in branches if branch.get("type") == "null"]
        for branch in branches:
            if branch not in nulls and self._has_value(branch, name):
                return branch
        return nulls[0] if nulls and name else branches[0]

    def _sample_object(self, rules: JsonSchema, depth: int) -> dict[str, Any]:
        members = cast("dict[str, Any]", as_schema(rules.get("properties")))
        required = [str(key) for key in rules.get("required", ())]
        self._budget.spend(len(members) + len(required), len("{},"))
        sampled: dict[str, Any] = {}
        for key in sorted(dict.fromkeys(required), key=lambda key: key not in members):
            sampled[self._emit(key)] = self.sample(members.get(key, {}), key, depth + 1)
        for key, schema in members.items():
            # A value without a name is used for an optional member only if there is no other member.
            if key not in sampled and self._has_value(schema, key, is_named=bool(sampled)):
                sampled[self._emit(key)] = self.sample(schema, key, depth + 1)
        return {key: sampled[key] for key in (*members, *sampled) if key in sampled}

    def _sample_array(self, rules: JsonSchema, name: str, depth: int) -> list[Any]:
        fixed = cast("Sequence[object]", rules.get("prefixItems", ()))
        items = self._resolve(rules.get("items", {}))
        self._budget.spend(output_bytes=len("[],"))
        minimum = int(rules.get("minItems", 0))
        maximum = int(rules.get("maxItems", max(minimum, MAX_STEPS)))
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
            self._budget.spend(SEARCH_STEPS)
            matches = re.finditer(text_format.pattern, self._hints.sentence, re.IGNORECASE)
            texts = (match[0].rstrip(".,;") for match in matches)
            return next((text for text in texts if text_fits(text, rules)), text_format.example)
        if isinstance(minimum := rules.get("minLength"), int) and minimum > MAX_OUTPUT_BYTES:
            self._budget.spend(output_bytes=minimum)
        defaults = (rules.get("default"), *(rules.get("examples") or ()))
        self._budget.spend(len(defaults))
        default_text = next((text for text in defaults if text and isinstance(text, str)), "")
        return fit_length(default_text or self._fallback_text(name) or "text", rules)


def fold_scalar(value: object) -> str | None:
    """Return a text, number or boolean as a text in lower case; None for any other value."""
    return str(value).lower() if isinstance(value, str | int | float) else None


def _estimate_size(rules: JsonSchema) -> tuple[bool, int]:
    """Order branches: scalars before containers, then by the number of required members."""
    return list_types(rules)[0] in ("object", "array"), len(rules.get("required", ()))
