"""Generate a value that satisfies a JSON schema, using the values of a sentence where they fit.

Used for the arguments of a tool and for answers in a ``json_schema`` format. "call add with a=2 and b=3" names its
values; "get_weather in Paris" only mentions one. A named value is used for the member of that name, a mentioned one for
the first member that it fits, each once.

Supports types (also several), const, enum, required and optional members, nested objects, arrays and tuples, bounds,
lengths, the formats of ``FORMATS``, ``$ref`` into the same document, ``anyOf``, ``oneOf`` and ``allOf``. Other keywords
(``multipleOf``, ``uniqueItems``, ``minProperties``) are ignored. A ``pattern`` is not evaluated, because it is part of
a request and a malicious one can make ``re`` run without end. The text is a value of the sentence, the schema's default
or example, or any other text.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, NamedTuple, TypeGuard, cast
from uuid import UUID

MAX_SENTENCE_LENGTH = 2_000
_NUMBER = r"[-+]?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?"
_QUOTED = r"\"[^\"]*\"|“[^”]*”|(?<!\w)'[^']*'(?!\w)"
NAMED_VALUE = re.compile(
    rf"\b([A-Za-z_][\w.-]*)\s*[=:]\s*({_QUOTED}|\[[^\]]*\]|[^\s,;][^,;]*?)"
    r"(?=\s+and\b|\s*[,;]|\s+[A-Za-z_][\w.-]*\s*[=:]|[.?!]?\s*\Z)"
)
QUOTED = re.compile(_QUOTED)
NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w%]|\.\d)")
_WORD = r"[^\s,;?!]*[^\s,;?!.]"  # a dot may be inside, not at the end
_LINK = r"in|for|of|to|about|at|on|from|with|by|named|called|and"
PHRASE = re.compile(
    rf"\b(?:{_LINK})\s+(?:(?:the|a|an|my|your)\s+)?"
    rf"((?:(?!(?:{_LINK})\b){_WORD})(?:\s+(?!(?:{_LINK})\b){_WORD})*)",
    re.IGNORECASE,
)
WORD = re.compile(r"[\w.-]*\w")
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class SentenceValues:
    """The values of one sentence.

    Args:
        sentence: The sentence.
        extra: More named values.
        facts: Values without a name, used before those of the sentence.
    """

    def __init__(
        self, sentence: str, extra: Mapping[str, Any] | None = None, facts: Iterable[Any] = ()
    ) -> None:
        self.sentence = sentence[:MAX_SENTENCE_LENGTH]
        self._named: dict[str, Any] = dict(extra or {})
        rest = self._parse_object(self.sentence)
        for found in NAMED_VALUE.finditer(rest):
            self._named.setdefault(found[1], _parse_literal(found[2].strip()))
        rest = NAMED_VALUE.sub(" ", rest)
        texts = [found[0][1:-1] for found in QUOTED.finditer(rest)]
        rest = QUOTED.sub(" ", rest)
        numbers = [_parse_literal(found[0]) for found in NUMBER.finditer(rest)]
        phrases = [found[1].strip() for found in PHRASE.finditer(NUMBER.sub(" ", rest))]
        self.unnamed_values: list[Any] = [*facts, *texts, *numbers, *phrases]
        rest = re.sub(rf"\A\W*(?:(?:{_LINK})\b\W*)+", "", rest, flags=re.IGNORECASE)
        self.remainder = " ".join(rest.split()).strip(" .,;:!?")

    def _parse_object(self, text: str) -> str:
        """Read the JSON object of a sentence, and return the rest."""
        if (start := text.find("{")) < 0:
            return text
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            return text
        self._named |= cast("dict[str, Any]", value)
        return f"{text[:start]} {text[end:]}"

    def find_named(self, name: str) -> Any:
        """Return the value of this name in the sentence, or None."""
        if name in self._named or not name:
            return self._named.get(name)
        names = "|".join({re.escape(name), re.escape(re.sub(r"[_-]", " ", name))})
        value = rf"(?:{names})\s+(?:is\s+|of\s+|to\s+)?"
        plain = rf"\b{value}({_QUOTED}|{_NUMBER})(?!\w)"
        linked = rf"(?:\bwith|\band|,)\s+(?:the\s+)?{value}({_WORD})"
        for pattern in (plain, linked):
            if found := re.search(pattern, self.sentence, re.IGNORECASE):
                return _parse_literal(found[1])
        return None

    def find_mentioned(self, values: Iterable[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or None."""
        words = f" {' '.join(WORD.findall(self.sentence.lower()))} "
        for value in values:
            text = str(value).lower()
            spoken = text.replace("_", " ").strip()
            if value is not None and (f" {text} " in words or f" {spoken} " in words):
                return value
        return None


def _parse_literal(text: str) -> Any:
    if QUOTED.fullmatch(text):
        return text[1:-1]
    if re.fullmatch(_NUMBER, text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        parts = (part.strip() for part in text.strip("[]").split(","))
        return [_parse_literal(part) for part in parts if part]


JsonSchema = Mapping[str, Any]
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
    declared: Any = rules.get("type") or ()
    types = [declared] if isinstance(declared, str) else list(declared)
    return types or [kind for word, kind in TYPE_HINTS.items() if word in rules][:1] or [ANY_TYPE]


def resolve_schema(root: JsonSchema, schema: object, depth: int = 0) -> JsonSchema:
    """Follow references and merge the parts of ``allOf``."""
    rules = as_schema(schema)
    if depth > MAX_REFERENCES:
        return {}
    parts = list(rules.get("allOf", ()))
    if isinstance(reference := rules.get("$ref"), str):
        parts.append(_find_reference(root, reference))
    merged: JsonSchema = {}
    for part in parts:
        merged = _merge_schemas(merged, resolve_schema(root, part, depth + 1))
    own = {key: rules[key] for key in rules if key not in ("$ref", "allOf")}
    return _merge_schemas(merged, own)


def _find_reference(root: JsonSchema, reference: str) -> object:
    """Return the target of a reference like ``#/$defs/place``; None if there is none."""
    node: Any = root if reference.startswith("#") else None
    for step in reference.removeprefix("#").split("/")[1:]:
        node = as_schema(node).get(step.replace("~1", "/").replace("~0", "~"))
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
    has_length = rules.get("minItems", 0) <= len(values) <= rules.get("maxItems", MAX_ITEMS)
    return has_length and all(value_fits(value, items, kind) for value in values)


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
            branch = self._choose_branch(
                branches or [{"type": kind} for kind in types], name, depth
            )
            rest = {key: rules[key] for key in rules if key not in ("anyOf", "oneOf")}
            return self.sample(_merge_schemas(rest, branch), name, depth + 1)
        if (value := self._find_value(rules, name, take=True)) is not NO_VALUE:
            return value
        match types[0]:
            case "object":
                return self._sample_object(rules, depth)
            case "array":
                return self._sample_array(rules, name, depth)
            case "number" | "integer":
                return _find_number(rules, types[0])
            case "boolean":
                return rules.get("default", True) is True
            case "null":
                return None
            case _:
                return self._sample_text(rules, name)

    def _find_value(
        self, rules: JsonSchema, name: str, *, take: bool = False, is_named: bool = False
    ) -> Any:
        """Return the value of this name in the sentence, or one without a name unless ``is_named``, or NO_VALUE.

        With ``take`` a value without a name is used only once.
        """
        kind = list_types(rules)[0]
        named = self._hints.find_named(name)
        if kind == "string" and (isinstance(named, str) or _is_number(named)):
            named = fit_length(str(named), rules)
        elif kind == "boolean":
            named = BOOLEAN_WORDS.get(str(named).lower())
        if named is not None and value_fits(named, rules, kind):
            return named
        unnamed = [] if is_named else self._hints.unnamed_values
        for index, value in enumerate(unnamed):
            if value_fits(value, rules, kind):
                return unnamed.pop(index) if take else value
        return NO_VALUE

    def _has_value(self, schema: object, name: str, *, is_named: bool = False) -> bool:
        """Return whether the sentence has a value for a member."""
        rules = resolve_schema(self._root, schema)
        if self._hints.find_mentioned(rules.get("enum", ())) is not None:
            return True
        if list_types(rules)[0] == "object" and self._hints.find_named(name) is not None:
            return True
        return self._find_value(rules, name, is_named=is_named) is not NO_VALUE

    def _choose_enum_value(self, rules: JsonSchema, name: str) -> Any:
        """Choose the named value, else one that the sentence contains, else the default or the first."""
        choices = {str(choice).lower(): choice for choice in rules["enum"]}
        mentioned = self._hints.find_mentioned(choices.values())
        for value in (self._hints.find_named(name), mentioned, *self._hints.unnamed_values):
            if value is not None and str(value).lower() in choices:
                return choices[str(value).lower()]
        return rules.get("default", rules["enum"][0])

    def _choose_branch(self, schemas: Sequence[object], name: str, depth: int) -> JsonSchema:
        """Choose the branch that the sentence has a value for, else null, else the first.

        Below a depth the smallest branch is chosen, because a recursive schema would never end.
        """
        branches = [resolve_schema(self._root, schema) for schema in schemas]
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
        sampled: dict[str, Any] = {}
        for key in sorted(dict.fromkeys(required), key=lambda key: key not in members):
            sampled[key] = self.sample(members.get(key, {}), key, depth + 1)
        for key, schema in members.items():
            # A value without a name is used for an optional member only if there is no other member.
            if key not in sampled and self._has_value(schema, key, is_named=bool(sampled)):
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
