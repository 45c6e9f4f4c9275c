"""Fill a JSON schema with the values of a sentence, and with defaults where it has none.

Used for the arguments of a tool and for answers in a ``json_schema`` format. A member that the sentence gives by name
or as JSON has this value, if it has the member's type. Other required members have the next value of the sentence that
has their type, and else the schema's ``default``, its ``minimum``, or a default of the type.

The keywords that are read are types, ``properties``, ``required``, ``additionalProperties``, ``items``,
``prefixItems``, ``minItems``, ``enum``, ``const``, ``default``, ``minimum``, ``format``, ``anyOf``, ``oneOf``,
``allOf`` and ``$ref`` into the same document. Others, such as patterns and lengths, are ignored: give such a value
in the message.

A schema is part of a request, and a small one can require endless work or a value of any size. So all samples of one
answer share a ``SampleBudget``. A step is a member of a schema that is read, or a value that is tried.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct

from kedge.errors import SchemaTooComplex
from kedge.server.practice_model.sentence_values import (
    ANY_TYPE,
    BOOLEAN_WORDS,
    NO_VALUE,
    SentenceValues,
    fold_scalar,
    has_type,
)

JsonSchema = Mapping[str, Any]
MAX_STEPS = 10_000
"""The steps of all samples of one answer."""
MAX_OUTPUT_BYTES = 100_000
"""The size of all samples of one answer, as JSON."""
MAX_DEPTH = 24
"""How deep values may be nested, and how long a chain of references may be."""
SHORTEST_BRANCH_DEPTH = 3
"""The depth from which lists are empty and scalars are chosen, because a recursive schema would never end."""

FORMAT_EXAMPLES = {
    "date": "2025-01-31",
    "time": "12:00:00Z",
    "date-time": "2025-01-31T12:00:00Z",
    "email": "ada@example.com",
    "uuid": "00000000-0000-4000-8000-000000000001",
    "uri": "https://example.com/",
}


class SampleBudget:
    """The work and the output that remain for the samples of one answer."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.output_bytes = MAX_OUTPUT_BYTES

    def spend_steps(self, count: int) -> None:
        """Subtract steps.

        Raises:
            SchemaTooComplex: They are used up.
        """
        self.steps -= count
        if self.steps < 0:
            raise SchemaTooComplex(f"takes more than {MAX_STEPS:,} steps")

    def spend_bytes(self, count: int) -> None:
        """Subtract bytes of the output.

        Raises:
            SchemaTooComplex: They are used up.
        """
        self.output_bytes -= count
        if self.output_bytes < 0:
            raise SchemaTooComplex(f"has more than {MAX_OUTPUT_BYTES:,} bytes")


def sample_value(
    schema: object,
    values: SentenceValues,
    default_text: Callable[[str], str],
    budget: SampleBudget | None = None,
) -> Any:
    """Return a value for a schema.

    Args:
        schema: The JSON schema; a malformed one is tolerated.
        values: The values of the sentence; one without a name is used for the first member that has its type.
        default_text: Returns a text for a member's name, where the sentence has no value.
        budget: The budget of the answer; by default a new one.

    Returns:
        The value, or None if the schema is malformed.

    Raises:
        SchemaTooComplex: The budget does not suffice.
    """
    root = as_schema(schema)
    sampler = _Sampler(root, values, default_text, budget or SampleBudget())
    try:
        return sampler.sample(root, "", 0, values.json_object or NO_VALUE)
    except (TypeError, ValueError, AttributeError, LookupError):
        # Nothing checks the keywords of a schema before, so any of them may have a wrong type.
        return None


def as_schema(value: object) -> JsonSchema:
    """Return the value if it is an object, else the schema that allows anything."""
    if isinstance(value, Mapping):
        return cast("JsonSchema", value)
    return {}


def read_type(rules: JsonSchema) -> str:
    """Return the type of a schema that allows one type; guessed if it states none."""
    declared = rules.get("type")
    if isinstance(declared, str):
        return declared
    if "properties" in rules or "required" in rules:
        return "object"
    if "items" in rules:
        return "array"
    return ANY_TYPE


def _is_container(rules: JsonSchema) -> bool:
    return read_type(rules) in ("object", "array")


class _Sampler(Struct):
    """A generator of the value of one schema, within a budget."""

    root: JsonSchema
    values: SentenceValues
    default_text: Callable[[str], str]
    budget: SampleBudget

    def sample(self, schema: object, name: str, depth: int, given: Any = NO_VALUE) -> Any:
        """Return a value for a part of the schema.

        Args:
            schema: The schema of the part.
            name: The name of the member, or empty.
            depth: The number of schemas around it.
            given: The value that the sentence has for it; by default the value with this name.
        """
        if depth > MAX_DEPTH:
            return None
        rules = self._resolve(schema)
        if given is NO_VALUE:
            given = self.values.named.get(name, NO_VALUE)

        if "const" in rules:
            return self._emit(rules["const"])
        if rules.get("enum"):
            return self._emit(self._choose_enum_value(rules, given))
        branches = self._list_branches(rules)
        if branches:
            branch = self._choose_branch(branches, name, depth, given)
            return self.sample(branch, name, depth + 1, given)
        match read_type(rules):
            case "object":
                return self._sample_object(rules, depth, given)
            case "array":
                return self._sample_array(rules, name, depth, given)
            case kind:
                return self._emit(self._sample_scalar(rules, kind, name, given))

    def _emit(self, value: Any) -> Any:
        """Return a value that becomes part of the output."""
        text = json.dumps(value, ensure_ascii=False)
        self.budget.spend_bytes(len(text.encode("utf-8", "surrogatepass")) + len(","))
        return value

    def _resolve(self, schema: object, depth: int = 0) -> JsonSchema:
        """Follow references and add the keywords of ``allOf``; of a repeated keyword the last one counts."""
        rules = as_schema(schema)
        self.budget.spend_steps(1 + len(rules))
        if depth > MAX_DEPTH:
            return {}
        parts = list(rules.get("allOf", ()))
        reference = rules.get("$ref")
        if isinstance(reference, str):
            parts.append(self._find_reference(reference))

        merged: dict[str, Any] = {}
        for part in parts:
            merged |= self._resolve(part, depth + 1)
        return merged | {key: rules[key] for key in rules if key not in ("$ref", "allOf")}

    def _find_reference(self, reference: str) -> object:
        """Return the target of a reference like ``#/$defs/place``; None if there is none."""
        if not reference.startswith("#"):
            return None
        keys = reference.removeprefix("#").split("/")[1:]
        self.budget.spend_steps(len(keys))
        node: object = self.root
        for key in keys:
            node = as_schema(node).get(key.replace("~1", "/").replace("~0", "~"))
        return node

    def _list_branches(self, rules: JsonSchema) -> list[JsonSchema]:
        """Return the schemas in ``anyOf`` or ``oneOf``, or one for each type of a list of types."""
        alternatives = rules.get("anyOf") or rules.get("oneOf")
        if alternatives is None and isinstance(rules.get("type"), list):
            alternatives = [{"type": kind} for kind in rules["type"]]
        if not alternatives:
            return []
        shared = {key: rules[key] for key in rules if key not in ("anyOf", "oneOf", "type")}
        self.budget.spend_steps(len(alternatives) * len(rules))
        return [{**shared, **self._resolve(branch)} for branch in alternatives]

    def _choose_branch(
        self, branches: Sequence[JsonSchema], name: str, depth: int, given: Any
    ) -> JsonSchema:
        """Choose the branch that the sentence has a value for, else null, else the first."""
        if given is not NO_VALUE:
            for branch in branches:
                if self._accepts(branch, given):
                    return branch
        if depth >= SHORTEST_BRANCH_DEPTH:
            return min(branches, key=_is_container)

        null = next((branch for branch in branches if branch.get("type") == "null"), None)
        for branch in branches:
            if branch is not null and self._has_value(branch):
                return branch
        if null is not None and name:
            return null
        return branches[0]

    def _accepts(self, schema: object, value: Any, depth: int = 0) -> bool:
        """Return whether a value has the types, the required members and the constants of a schema."""
        rules = self._resolve(schema)
        if depth > MAX_DEPTH:
            return False
        if "const" in rules:
            return value == rules["const"]
        if rules.get("enum"):
            self.budget.spend_steps(len(rules["enum"]))
            return value in rules["enum"]
        branches = self._list_branches(rules)
        if branches:
            return any(self._accepts(branch, value, depth + 1) for branch in branches)

        kind = read_type(rules)
        if not has_type(value, kind):
            return False
        if kind == "array":
            items = rules.get("items")
            return all(self._accepts(items, item, depth + 1) for item in cast("list[Any]", value))
        if kind == "object":
            return self._accepts_members(rules, cast("dict[str, Any]", value), depth)
        return True

    def _accepts_members(self, rules: JsonSchema, value: Mapping[str, Any], depth: int) -> bool:
        members = as_schema(rules.get("properties"))
        required: Sequence[str] = rules.get("required", ())
        self.budget.spend_steps(len(required) + len(value))
        if not all(key in value for key in required):
            return False
        known = [key for key in value if key in members]
        return all(self._accepts(members[key], value[key], depth + 1) for key in known)

    def _has_value(self, rules: JsonSchema) -> bool:
        """Return whether the sentence has a value without a name for a schema."""
        choices = rules.get("enum")
        if choices:
            return self._find_mentioned(choices) is not NO_VALUE
        self.budget.spend_steps(1 + len(self.values.unnamed))
        return not _is_container(rules) and self.values.has_unnamed(read_type(rules))

    def _find_mentioned(self, choices: Sequence[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or NO_VALUE."""
        self.budget.spend_steps(len(choices))
        return self.values.find_mentioned(choices)

    def _choose_enum_value(self, rules: JsonSchema, given: Any) -> Any:
        """Choose the given value, else one that the sentence contains, else the default or the first."""
        choices: Sequence[Any] = rules["enum"]
        mentioned = self._find_mentioned(choices)
        self.budget.spend_steps(len(choices) + len(self.values.unnamed))
        choices_by_word = {fold_scalar(choice): choice for choice in choices}
        for value in (given, mentioned, *self.values.unnamed):
            word = fold_scalar(value)
            if word is not None and word in choices_by_word:
                return choices_by_word[word]
        return rules.get("default", choices[0])

    def _sample_scalar(self, rules: JsonSchema, kind: str, name: str, given: Any) -> Any:
        """Return the given value, else the next one of the sentence that has the type, else a default."""
        if kind == "string" and has_type(given, "number"):
            given = str(given)
        if kind == "boolean":
            given = BOOLEAN_WORDS.get(fold_scalar(given) or "", NO_VALUE)
        if given is not NO_VALUE and has_type(given, kind):
            return given

        text_format = rules.get("format")
        if kind == "string" and text_format in FORMAT_EXAMPLES:
            return FORMAT_EXAMPLES[text_format]
        value = self._take(kind)
        if value is not NO_VALUE:
            return value
        return self._make_default(rules, kind, name)

    def _take(self, kind: str) -> Any:
        self.budget.spend_steps(1 + len(self.values.unnamed))
        return self.values.take(kind)

    def _make_default(self, rules: JsonSchema, kind: str, name: str) -> Any:
        default = rules.get("default", NO_VALUE)
        if default is not NO_VALUE and has_type(default, kind):
            return default
        match kind:
            case "integer" | "number":
                minimum = rules.get("minimum", 1)
                return minimum if has_type(minimum, kind) else 1
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return self.default_text(name) or "text"

    def _sample_object(self, rules: JsonSchema, depth: int, given: Any) -> dict[str, Any]:
        members = as_schema(rules.get("properties"))
        required = dict.fromkeys(str(key) for key in rules.get("required", ()))
        given_members = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        self.budget.spend_steps(len(members) + len(required) + len(given_members))
        self.budget.spend_bytes(len("{},"))

        sampled: dict[str, Any] = {}
        for key in required:
            sampled[key] = self._sample_member(key, members.get(key, {}), depth, given_members)
        for key, schema in members.items():
            if key not in sampled and self._wants_optional(key, schema, given, bool(sampled)):
                sampled[key] = self._sample_member(key, schema, depth, given_members)
        others = rules.get("additionalProperties", {})
        if others is not False:
            for key in given_members:
                if key not in sampled:
                    sampled[key] = self._sample_member(key, others, depth, given_members)
        in_order = (*members, *sampled)
        return {key: sampled[key] for key in in_order if key in sampled}

    def _sample_member(
        self, key: str, schema: object, depth: int, given_members: Mapping[str, Any]
    ) -> Any:
        self._emit(key)
        return self.sample(schema, key, depth + 1, given_members.get(key, NO_VALUE))

    def _wants_optional(self, key: str, schema: object, given: Any, has_members: bool) -> bool:
        """Return whether the sentence has a value for an optional member.

        A value without a name is used for an optional member only if there is no other member.
        """
        if isinstance(given, dict):
            return key in given
        if key in self.values.named:
            return True
        rules = self._resolve(schema)
        return ("enum" in rules or not has_members) and self._has_value(rules)

    def _sample_array(self, rules: JsonSchema, name: str, depth: int, given: Any) -> list[Any]:
        self.budget.spend_bytes(len("[],"))
        first_schemas: Sequence[object] = rules.get("prefixItems", ())
        item_schema = rules.get("items", {})
        if not isinstance(given, list):
            given = self._take("array")

        given_items: Sequence[Any] = ()
        count = max(len(first_schemas), rules.get("minItems", 0))
        if isinstance(given, list):
            given_items = cast("list[Any]", given)
            count = max(count, len(given_items))
        elif not first_schemas and depth < SHORTEST_BRANCH_DEPTH:
            count = max(count, self._count_items(item_schema))

        sampled: list[Any] = []
        for index in range(count):
            schema = first_schemas[index] if index < len(first_schemas) else item_schema
            item = given_items[index] if index < len(given_items) else NO_VALUE
            sampled.append(self.sample(schema, name, depth + 1, item))
        return sampled

    def _count_items(self, schema: object) -> int:
        """Return how many values of the sentence can be items of a list; at least 1."""
        rules = self._resolve(schema)
        kind = read_type(rules)
        if kind not in ("string", "integer", "number") or "enum" in rules or "format" in rules:
            return 1
        self.budget.spend_steps(len(self.values.unnamed))
        return max(1, sum(has_type(value, kind) for value in self.values.unnamed))
