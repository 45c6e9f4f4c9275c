"""A value that satisfies a JSON schema, with the values of a sentence where they fit.

Used for the arguments of a tool and for answers in a ``json_schema`` format. Understands what
such schemas use: types (also several), const, enum, required and optional members, nested objects,
arrays and tuples, bounds, lengths, formats, patterns, ``$ref`` into the same document, ``anyOf``,
``oneOf`` and ``allOf``. A schema may be recursive; from a certain depth on, the shortest way out is
taken, and the number of values made is bounded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.practice import scalar_sample
from kedge.practice.sentence_values import BOOLEAN_WORDS, SentenceValues

JsonSchema = Mapping[str, Any]
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ANY_TYPE = "any"
MAX_REFERENCES = 24


def list_types(rules: JsonSchema) -> list[str]:
    """Name the types that a schema allows, as it orders them; guessed where it does not say."""
    stated = rules.get("type")
    listed = [stated] if isinstance(stated, str) else list(cast("Sequence[str]", stated or ()))
    known = [kind for kind in listed if kind in JSON_TYPES]
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
    return [ANY_TYPE]


def resolve_schema(root: JsonSchema, schema: object, depth: int = 0) -> JsonSchema:
    """Follow references and join ``allOf``; booleans are the schemas for anything and nothing."""
    rules = as_schema(schema)
    if depth > MAX_REFERENCES:
        return {}
    if isinstance(reference := rules.get("$ref"), str):
        target = resolve_schema(root, _find_reference(root, reference), depth + 1)
        return merge_schemas(target, {key: rules[key] for key in rules if key != "$ref"})
    if parts := rules.get("allOf"):
        joined: JsonSchema = {key: rules[key] for key in rules if key != "allOf"}
        for part in parts:
            joined = merge_schemas(joined, resolve_schema(root, part, depth + 1))
        return joined
    return rules


def _find_reference(root: JsonSchema, reference: str) -> JsonSchema:
    """Find what a reference like ``#/$defs/place`` points to; anything where it leads nowhere."""
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            listed = cast("list[Any]", place)
            place = listed[int(key)] if key.isdecimal() and int(key) < len(listed) else None
        else:
            place = as_schema(place).get(key)
    return as_schema(place) if reference.startswith("#") else {}


def merge_schemas(left: JsonSchema, right: JsonSchema) -> JsonSchema:
    """Join two schemas that both hold; where they differ the right one wins."""
    both = {**left, **right}
    if "properties" in left and "properties" in right:
        both["properties"] = {**as_schema(left["properties"]), **as_schema(right["properties"])}
    if "required" in left and "required" in right:
        both["required"] = [*left["required"], *right["required"]]
    return both


def as_schema(value: object) -> JsonSchema:
    """Read a value as a schema."""
    return cast("JsonSchema", value) if isinstance(value, Mapping) else {}


SHORTEST_BRANCH_DEPTH = 3
MAX_STEPS = 4_000
MAX_ITEMS = 1_000
RECURSIVE_DEPTH = 1_000
SCALAR_TYPES = (ANY_TYPE, "string", "number", "integer", "boolean")

NO_VALUE: Any = object()


@dataclass(slots=True)
class SamplerState:
    """A schema being filled in: its root, the values to use, and a text for where none fits.

    ``values`` are facts that go to the first member they fit; ``steps`` counts the work done.
    """

    root: JsonSchema
    hints: SentenceValues
    fallback_text: Callable[[str], str]
    values: list[Any] = field(default_factory=list[Any])
    steps: int = 0

    def resolve(self, schema: object) -> JsonSchema:
        """Read a schema of this form, references followed."""
        return resolve_schema(self.root, schema)


def find_value(state: SamplerState, rules: JsonSchema, kind: str, name: str) -> Any:
    """Give what the sentence names so, or a fact that fits, or NOTHING."""
    named = state.hints.find_named(name) if name else None
    if named is not None and (fitting := coerce_value(named, rules, kind)) is not NO_VALUE:
        return fitting
    for i, fact in enumerate(state.values):
        if _fact_fits(fact, rules, kind):
            return state.values.pop(i)
    return NO_VALUE


def _fact_fits(fact: Any, rules: JsonSchema, kind: str) -> bool:
    """Whether a fact goes here as it is: a number never becomes a text."""
    return coerce_value(fact, rules, kind) == fact and isinstance(fact, str) == (kind == "string")


def coerce_value(value: Any, rules: JsonSchema, kind: str) -> Any:
    """Read a value as one of this kind, or NOTHING where it does not fit."""
    match kind, value:
        case (("integer" | "number"), int() | float()) if scalar_sample.number_fits(
            value, rules, kind
        ):
            return value
        case "string", str() | int() | float() if not isinstance(value, bool):
            text = scalar_sample.fit_length(str(value), rules)
            return text if scalar_sample.text_fits(text, rules) else NO_VALUE
        case "boolean", bool():
            return value
        case "boolean", str() if value.lower() in BOOLEAN_WORDS:
            return BOOLEAN_WORDS[value.lower()]
        case "array", list() if _items_fit(cast("list[Any]", value), rules):
            return cast("list[Any]", value)
        case _ if kind == ANY_TYPE:
            return value
        case _:
            return NO_VALUE


def _items_fit(values: list[Any], rules: JsonSchema) -> bool:
    items = as_schema(rules.get("items"))
    kind = items.get("type", ANY_TYPE)
    if kind not in SCALAR_TYPES or not {"enum", "const", "$ref", "anyOf"}.isdisjoint(items):
        return False
    least, most = rules.get("minItems", 0), rules.get("maxItems", MAX_ITEMS)
    return least <= len(values) <= most and all(
        coerce_value(value, items, kind) == value for value in values
    )


def choose_enum_value(state: SamplerState, rules: JsonSchema, name: str) -> Any:
    """Choose a member of an enumeration: named, mentioned, a fact, the default, the first."""
    choices = cast("Sequence[Any]", rules["enum"])
    named = state.hints.find_named(name) if name else None
    for choice in choices:
        if named is not None and str(choice).lower() == str(named).lower():
            return choice
    mentioned = state.hints.find_mentioned(choices)
    if mentioned is not None:
        return mentioned
    given = [value for value in state.values if value in choices]
    return given[0] if given else rules.get("default", choices[0])


def choose_type(state: SamplerState, rules: JsonSchema, name: str) -> str:
    """Choose among several types: what the sentence has a value for, else null."""
    allowed = list_types(rules)
    if len(allowed) == 1:
        return allowed[0]
    said = [kind for kind in allowed if kind != "null" and has_value(state, rules, kind, name)]
    if said:
        return said[0]
    return "null" if "null" in allowed and name else allowed[0]


def has_value(state: SamplerState, rules: JsonSchema, kind: str, name: str) -> bool:
    """Whether the sentence holds a value of this kind."""
    named = state.hints.find_named(name) if name else None
    if named is not None:
        return kind == "object" or coerce_value(named, rules, kind) is not NO_VALUE
    if state.hints.find_mentioned(rules.get("enum", ())) is not None:
        return True
    if any(_fact_fits(fact, rules, kind) for fact in state.values):
        return True
    match kind:
        case "string":
            return any(scalar_sample.text_fits(each, rules) for each in state.hints.texts)
        case "integer" | "number":
            return any(scalar_sample.number_fits(each, rules, kind) for each in state.hints.numbers)
        case _:
            return False


def choose_branch(
    state: SamplerState, branches: Sequence[object], name: str, depth: int
) -> JsonSchema:
    """Choose a branch: the one the sentence has a value for, else null, else the first.

    Deep inside a schema the branch that ends soonest is taken, or recursion would never end.
    """
    rules = [state.resolve(branch) for branch in branches]
    if depth >= SHORTEST_BRANCH_DEPTH:
        return min(rules, key=lambda branch: measure_depth(state, branch))
    for branch in rules:
        kind = list_types(branch)[0]
        if kind != "null" and has_value(state, branch, kind, name):
            return branch
    nulls = [branch for branch in rules if branch.get("type") == "null"]
    return nulls[0] if nulls and name else rules[0]


def measure_depth(state: SamplerState, schema: object, depth: int = 0) -> int:
    """How deep the least value of a schema is; recursive ones are heavy."""
    state.steps += 1
    if depth > SHORTEST_BRANCH_DEPTH or state.steps > MAX_STEPS:
        return RECURSIVE_DEPTH
    rules = state.resolve(schema)
    branches = rules.get("anyOf") or rules.get("oneOf")
    if branches:
        return min(measure_depth(state, branch, depth + 1) for branch in branches)
    members = as_schema(rules.get("properties"))
    inner = [members.get(key, {}) for key in rules.get("required", ())]
    if rules.get("minItems", 0):
        inner.append(rules.get("items", {}))
    return 1 + max((measure_depth(state, each, depth + 1) for each in inner), default=0)


MAX_DEPTH = 24


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """Where in the schema a value is made: its rules, its kind, its name, how deep."""

    rules: JsonSchema
    kind: str
    name: str
    depth: int

    def read_bound(self, keyword: str, default: int) -> int:
        """Read a bound on the number of members."""
        return min(int(self.rules.get(keyword, default)), MAX_ITEMS)


def sample_value(
    schema: object, hints: SentenceValues, fallback_text: Callable[[str], str], *values: Any
) -> Any:
    """Make a value for a schema; None where the schema itself is malformed.

    ``values`` go first to whatever they fit; ``spare`` gives a text for a member's name.
    """
    root = as_schema(schema)
    form = SamplerState(
        root, hints, fallback_text, [value for value in values if value is not None]
    )
    try:
        return _sample(form, root, "", 0)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return None


def _sample(state: SamplerState, schema: object, name: str, depth: int) -> Any:
    state.steps += 1
    if state.steps > MAX_STEPS or depth > MAX_DEPTH:
        return None
    rules = state.resolve(schema)
    if "const" in rules:
        return rules["const"]
    if rules.get("enum"):
        return choose_enum_value(state, rules, name)
    for word in ("anyOf", "oneOf"):
        if branches := rules.get(word):
            branch = choose_branch(state, cast("Sequence[object]", branches), name, depth)
            others = {key: rules[key] for key in rules if key != word}
            return _sample(state, merge_schemas(others, branch), name, depth + 1)
    place = SchemaNode(rules, choose_type(state, rules, name), name, depth)
    said = find_value(state, rules, place.kind, name)
    return SAMPLERS[place.kind](state, place) if said is NO_VALUE else said


def _sample_object(state: SamplerState, node: SchemaNode) -> dict[str, Any]:
    members = cast("dict[str, Any]", as_schema(node.rules.get("properties")))
    required = [str(key) for key in node.rules.get("required", ())]
    made: dict[str, Any] = {}

    def add(key: str, schema: object) -> None:
        made[key] = _sample(state, schema, key, node.depth + 1)

    for key in dict.fromkeys([*(key for key in members if key in required), *required]):
        add(key, members.get(key, {}))
    for key in members:
        if key not in made and _is_mentioned(state, members[key], key, is_only=not made):
            add(key, members[key])
    more = node.rules.get("additionalProperties", True)
    for i in range(node.read_bound("minProperties", 0) - len(made)):
        key = next((key for key in members if key not in made), f"key{i + 1}")
        add(key, members.get(key, more))
    return {key: made[key] for key in (*members, *made) if key in made}


def _is_mentioned(state: SamplerState, schema: object, name: str, *, is_only: bool) -> bool:
    """Whether the sentence has a value for an optional member.

    Naming it is enough; a mere mention counts for a member that would stand alone.
    """
    if state.hints.find_named(name) is not None:
        return True
    rules = state.resolve(schema)
    if state.hints.find_mentioned(rules.get("enum", ())) is not None:
        return True
    return is_only and has_value(state, rules, list_types(rules)[0], name)


def _sample_array(state: SamplerState, node: SchemaNode) -> list[Any]:
    fixed = cast("Sequence[object]", node.rules.get("prefixItems", ()))
    items = node.rules.get("items", {})
    least, most = node.read_bound("minItems", 0), node.read_bound("maxItems", MAX_ITEMS)
    made = [_sample(state, schema, "", node.depth + 1) for schema in fixed[:most]]
    if items is False:
        return made
    wanted = max(least, min(1, most) if node.depth < SHORTEST_BRANCH_DEPTH and not fixed else 0)
    kind = list_types(state.resolve(items))[0]
    while len(made) < most and (len(made) < wanted or _has_more_values(state, items, kind)):
        made.append(_sample(state, items, node.name if not made else "", node.depth + 1))
    return _make_unique(state.resolve(items), made) if node.rules.get("uniqueItems") else made


def _has_more_values(state: SamplerState, items: object, kind: str) -> bool:
    rules = state.resolve(items)
    if kind == "string":
        return scalar_sample.is_unconstrained(rules) and has_value(state, rules, kind, "")
    return kind in ("integer", "number") and has_value(state, rules, kind, "")


def _make_unique(rules: JsonSchema, made: list[Any]) -> list[Any]:
    """Make equal members of a list different, as far as their schema lets us."""
    different: list[Any] = []
    for value in made:
        others = (
            cast("list[Any]", rules["enum"]) if "enum" in rules else _list_variants(rules, value)
        )
        fresh = (each for each in (value, *others) if each not in different)
        different += [each for _, each in zip(range(1), fresh, strict=False)]
    return different


def _list_variants(rules: JsonSchema, value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            step = rules.get("multipleOf", 1)
            near = (value + sign * i * step for i in range(1, MAX_ITEMS) for sign in (1, -1))
            return [
                each
                for each in near
                if scalar_sample.number_fits(each, rules, list_types(rules)[0])
            ]
        case str():
            most = int(rules.get("maxLength", len(value) + 4))
            return [f"{value[: most - len(str(i))]}{i}" for i in range(2, MAX_ITEMS)]
        case _:
            return []


def _sample_text(state: SamplerState, node: SchemaNode) -> str:
    examples = cast("Sequence[Any]", node.rules.get("examples") or ())
    spare = node.rules.get("default") or (examples[0] if examples else None)
    other = spare if isinstance(spare, str) else state.fallback_text(node.name)
    return scalar_sample.sample_text(node.rules, state.hints, other or "text")


def _sample_number(state: SamplerState, node: SchemaNode) -> Any:
    default = node.rules.get("default")
    if not state.hints.numbers and scalar_sample.number_fits(default, node.rules, node.kind):
        return default
    return scalar_sample.sample_number(node.rules, state.hints, node.kind)


def _sample_boolean(_: SamplerState, node: SchemaNode) -> bool:
    return node.rules.get("default", True) is True


def _sample_null(_: SamplerState, __: SchemaNode) -> None:
    return None


SAMPLERS: Mapping[str, Callable[[SamplerState, SchemaNode], Any]] = {
    "object": _sample_object,
    "array": _sample_array,
    "string": _sample_text,
    "number": _sample_number,
    "integer": _sample_number,
    "boolean": _sample_boolean,
    "null": _sample_null,
    ANY_TYPE: _sample_text,
}
