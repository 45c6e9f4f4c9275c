"""What of a sentence fits where in a schema: values by name, by mention, and among branches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.practice import scalars
from kedge.practice.hints import WORDS, Hints
from kedge.practice.schemas import ANY, Schema, kinds, mapping, resolved

DEEP = 3
MOST_STEPS = 4_000
MOST_ITEMS = 1_000
HEAVY = 1_000
SIMPLE = (ANY, "string", "number", "integer", "boolean")

NOTHING: Any = object()


@dataclass(slots=True)
class Form:
    """A schema being filled in: its root, the values to use, and a text for where none fits.

    ``values`` are facts that go to the first member they fit; ``steps`` counts the work done.
    """

    root: Schema
    hints: Hints
    spare: Callable[[str], str]
    values: list[Any] = field(default_factory=list[Any])
    steps: int = 0

    def rules(self, schema: object) -> Schema:
        """Read a schema of this form, references followed."""
        return resolved(self.root, schema)


def said_for(form: Form, rules: Schema, kind: str, name: str) -> Any:
    """Give what the sentence names so, or a fact that fits, or NOTHING."""
    named = form.hints.for_name(name) if name else None
    if named is not None and (fitting := read_as(named, rules, kind)) is not NOTHING:
        return fitting
    for i, fact in enumerate(form.values):
        if _is_fact_for(fact, rules, kind):
            return form.values.pop(i)
    return NOTHING


def _is_fact_for(fact: Any, rules: Schema, kind: str) -> bool:
    """Whether a fact goes here as it is: a number never becomes a text."""
    return read_as(fact, rules, kind) == fact and isinstance(fact, str) == (kind == "string")


def read_as(value: Any, rules: Schema, kind: str) -> Any:
    """Read a value as one of this kind, or NOTHING where it does not fit."""
    match kind, value:
        case (("integer" | "number"), int() | float()) if scalars.number_fits(value, rules, kind):
            return value
        case "string", str() | int() | float() if not isinstance(value, bool):
            text = scalars.fitted(str(value), rules)
            return text if scalars.text_fits(text, rules) else NOTHING
        case "boolean", bool():
            return value
        case "boolean", str() if value.lower() in WORDS:
            return WORDS[value.lower()]
        case "array", list() if _items_fit(cast("list[Any]", value), rules):
            return cast("list[Any]", value)
        case _ if kind == ANY:
            return value
        case _:
            return NOTHING


def _items_fit(values: list[Any], rules: Schema) -> bool:
    items = mapping(rules.get("items"))
    kind = items.get("type", ANY)
    if kind not in SIMPLE or not {"enum", "const", "$ref", "anyOf"}.isdisjoint(items):
        return False
    least, most = rules.get("minItems", 0), rules.get("maxItems", MOST_ITEMS)
    return least <= len(values) <= most and all(
        read_as(value, items, kind) == value for value in values
    )


def chosen(form: Form, rules: Schema, name: str) -> Any:
    """Choose a member of an enumeration: named, mentioned, a fact, the default, the first."""
    choices = cast("Sequence[Any]", rules["enum"])
    named = form.hints.for_name(name) if name else None
    for choice in choices:
        if named is not None and str(choice).lower() == str(named).lower():
            return choice
    mentioned = form.hints.mentioned(choices)
    if mentioned is not None:
        return mentioned
    given = [value for value in form.values if value in choices]
    return given[0] if given else rules.get("default", choices[0])


def kind_of(form: Form, rules: Schema, name: str) -> str:
    """Choose among several types: what the sentence has a value for, else null."""
    allowed = kinds(rules)
    if len(allowed) == 1:
        return allowed[0]
    said = [kind for kind in allowed if kind != "null" and has(form, rules, kind, name)]
    if said:
        return said[0]
    return "null" if "null" in allowed and name else allowed[0]


def has(form: Form, rules: Schema, kind: str, name: str) -> bool:
    """Whether the sentence holds a value of this kind."""
    named = form.hints.for_name(name) if name else None
    if named is not None:
        return kind == "object" or read_as(named, rules, kind) is not NOTHING
    if form.hints.mentioned(rules.get("enum", ())) is not None:
        return True
    if any(_is_fact_for(fact, rules, kind) for fact in form.values):
        return True
    match kind:
        case "string":
            return any(scalars.text_fits(each, rules) for each in form.hints.texts)
        case "integer" | "number":
            return any(scalars.number_fits(each, rules, kind) for each in form.hints.numbers)
        case _:
            return False


def branch_of(form: Form, branches: Sequence[object], name: str, depth: int) -> Schema:
    """Choose a branch: the one the sentence has a value for, else null, else the first.

    Deep inside a schema the branch that ends soonest is taken, or recursion would never end.
    """
    rules = [form.rules(branch) for branch in branches]
    if depth >= DEEP:
        return min(rules, key=lambda branch: weight(form, branch))
    for branch in rules:
        kind = kinds(branch)[0]
        if kind != "null" and has(form, branch, kind, name):
            return branch
    nulls = [branch for branch in rules if branch.get("type") == "null"]
    return nulls[0] if nulls and name else rules[0]


def weight(form: Form, schema: object, depth: int = 0) -> int:
    """How deep the least value of a schema is; recursive ones are heavy."""
    form.steps += 1
    if depth > DEEP or form.steps > MOST_STEPS:
        return HEAVY
    rules = form.rules(schema)
    branches = rules.get("anyOf") or rules.get("oneOf")
    if branches:
        return min(weight(form, branch, depth + 1) for branch in branches)
    members = mapping(rules.get("properties"))
    inner = [members.get(key, {}) for key in rules.get("required", ())]
    if rules.get("minItems", 0):
        inner.append(rules.get("items", {}))
    return 1 + max((weight(form, each, depth + 1) for each in inner), default=0)
