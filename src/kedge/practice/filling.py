"""A value that satisfies a JSON schema, with the values of a sentence where they fit.

Used for the arguments of a tool and for answers in a ``json_schema`` format. Understands what
such schemas use: types (also several), const, enum, required and optional members, nested objects,
arrays and tuples, bounds, lengths, formats, patterns, ``$ref`` into the same document, ``anyOf``,
``oneOf`` and ``allOf``. A schema may be recursive; from a certain depth on, the shortest way out is
taken, and the number of values made is bounded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kedge.practice import scalars
from kedge.practice.fitting import (
    DEEP,
    MOST_ITEMS,
    MOST_STEPS,
    NOTHING,
    Form,
    branch_of,
    chosen,
    has,
    kind_of,
    said_for,
)
from kedge.practice.hints import Hints
from kedge.practice.schemas import ANY, Schema, kinds, mapping, merged

DEEPEST = 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the schema a value is made: its rules, its kind, its name, how deep."""

    rules: Schema
    kind: str
    name: str
    depth: int

    def count(self, word: str, otherwise: int) -> int:
        """Read a bound on the number of members."""
        return min(int(self.rules.get(word, otherwise)), MOST_ITEMS)


def fill(schema: object, hints: Hints, spare: Callable[[str], str], *values: Any) -> Any:
    """Make a value for a schema; None where the schema itself is malformed.

    ``values`` go first to whatever they fit; ``spare`` gives a text for a member's name.
    """
    root = mapping(schema)
    form = Form(root, hints, spare, [value for value in values if value is not None])
    try:
        return _value(form, root, "", 0)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return None


def _value(form: Form, schema: object, name: str, depth: int) -> Any:
    form.steps += 1
    if form.steps > MOST_STEPS or depth > DEEPEST:
        return None
    rules = form.rules(schema)
    if "const" in rules:
        return rules["const"]
    if rules.get("enum"):
        return chosen(form, rules, name)
    for word in ("anyOf", "oneOf"):
        if branches := rules.get(word):
            branch = branch_of(form, cast("Sequence[object]", branches), name, depth)
            others = {key: rules[key] for key in rules if key != word}
            return _value(form, merged(others, branch), name, depth + 1)
    place = Place(rules, kind_of(form, rules, name), name, depth)
    said = said_for(form, rules, place.kind, name)
    return MAKERS[place.kind](form, place) if said is NOTHING else said


def _object(form: Form, place: Place) -> dict[str, Any]:
    members = cast("dict[str, Any]", mapping(place.rules.get("properties")))
    required = [str(key) for key in place.rules.get("required", ())]
    made: dict[str, Any] = {}

    def add(key: str, schema: object) -> None:
        made[key] = _value(form, schema, key, place.depth + 1)

    for key in dict.fromkeys([*(key for key in members if key in required), *required]):
        add(key, members.get(key, {}))
    for key in members:
        if key not in made and _is_said(form, members[key], key, alone=not made):
            add(key, members[key])
    more = place.rules.get("additionalProperties", True)
    for i in range(place.count("minProperties", 0) - len(made)):
        key = next((key for key in members if key not in made), f"key{i + 1}")
        add(key, members.get(key, more))
    return {key: made[key] for key in (*members, *made) if key in made}


def _is_said(form: Form, schema: object, name: str, *, alone: bool) -> bool:
    """Whether the sentence has a value for an optional member.

    Naming it is enough; a mere mention counts for a member that would stand alone.
    """
    if form.hints.for_name(name) is not None:
        return True
    rules = form.rules(schema)
    if form.hints.mentioned(rules.get("enum", ())) is not None:
        return True
    return alone and has(form, rules, kinds(rules)[0], name)


def _array(form: Form, place: Place) -> list[Any]:
    fixed = cast("Sequence[object]", place.rules.get("prefixItems", ()))
    items = place.rules.get("items", {})
    least, most = place.count("minItems", 0), place.count("maxItems", MOST_ITEMS)
    made = [_value(form, schema, "", place.depth + 1) for schema in fixed[:most]]
    if items is False:
        return made
    wanted = max(least, min(1, most) if place.depth < DEEP and not fixed else 0)
    kind = kinds(form.rules(items))[0]
    while len(made) < most and (len(made) < wanted or _more_said(form, items, kind)):
        made.append(_value(form, items, place.name if not made else "", place.depth + 1))
    return _different(form.rules(items), made) if place.rules.get("uniqueItems") else made


def _more_said(form: Form, items: object, kind: str) -> bool:
    rules = form.rules(items)
    if kind == "string":
        return scalars.is_free(rules) and has(form, rules, kind, "")
    return kind in ("integer", "number") and has(form, rules, kind, "")


def _different(rules: Schema, made: list[Any]) -> list[Any]:
    """Make equal members of a list different, as far as their schema lets us."""
    different: list[Any] = []
    for value in made:
        others = cast("list[Any]", rules["enum"]) if "enum" in rules else _variants(rules, value)
        fresh = (each for each in (value, *others) if each not in different)
        different += [each for _, each in zip(range(1), fresh, strict=False)]
    return different


def _variants(rules: Schema, value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            step = rules.get("multipleOf", 1)
            near = (value + sign * i * step for i in range(1, MOST_ITEMS) for sign in (1, -1))
            return [each for each in near if scalars.number_fits(each, rules, kinds(rules)[0])]
        case str():
            most = int(rules.get("maxLength", len(value) + 4))
            return [f"{value[: most - len(str(i))]}{i}" for i in range(2, MOST_ITEMS)]
        case _:
            return []


def _text(form: Form, place: Place) -> str:
    examples = cast("Sequence[Any]", place.rules.get("examples") or ())
    spare = place.rules.get("default") or (examples[0] if examples else None)
    other = spare if isinstance(spare, str) else form.spare(place.name)
    return scalars.text(place.rules, form.hints, other or "text")


def _number(form: Form, place: Place) -> Any:
    default = place.rules.get("default")
    if not form.hints.numbers and scalars.number_fits(default, place.rules, place.kind):
        return default
    return scalars.number(place.rules, form.hints, place.kind)


def _boolean(_: Form, place: Place) -> bool:
    return place.rules.get("default", True) is True


def _null(_: Form, __: Place) -> None:
    return None


MAKERS: Mapping[str, Callable[[Form, Place], Any]] = {
    "object": _object,
    "array": _array,
    "string": _text,
    "number": _number,
    "integer": _number,
    "boolean": _boolean,
    "null": _null,
    ANY: _text,
}
