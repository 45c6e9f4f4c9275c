"""Derive the tables of request types from the openai and anthropic packages: ``make schema`` writes them to a file.

The server reads the file and needs neither package. In a table ``!`` after a name means that the member is required,
``?`` that it may be null. A type is a table, the name of a scalar, or a list that starts with its kind:

    ["enum", "low", "high"]                      one of these strings
    ["array", T], ["map", T]                     an array, an object with any keys
    ["union", {"exec": {…}}]                     one of several objects, by the value of their ``type``
    ["union", "content", "input_text", …]        the same, with the tables of another section
    ["any", T, T]                                one of several types
"""

import json
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import anthropic.types.beta as messages
import openai.types.chat as chat
import openai.types.responses as responses
import typing_extensions
from anthropic.types.beta import beta_tool_result_block_param as tool_results
from openai.types.beta import beta_response_input_item_param as beta_items
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params, tool_param

import kedge.server.schema

PATH = Path(kedge.server.schema.__file__).with_name("sdk_types.json")
SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number", object: "json"}
WRAPPERS = (
    typing.Annotated,
    typing.Required,
    typing.NotRequired,
    typing_extensions.Required,
    typing_extensions.NotRequired,
)
TEXT_BLOCKS = messages.BetaTextBlockParam | messages.BetaImageBlockParam
RESULT_BLOCKS = ("document", "image", "search_result", "text", "tool_reference")
"""The content blocks of Messages that the result of a tool may contain here."""
OTHER_BLOCKS = ("redacted_thinking", "thinking", "tool_result", "tool_use")
"""The other ones that a model here sees."""
OPAQUE_TYPES = frozenset({"CompoundFilter", "ComparisonFilter"})
"""Types that contain themselves, which are objects of any content."""

Type = str | list[Any] | dict[str, Any]
Tables = dict[str, Type]


class Derivation:
    """The tables by section, as they are derived."""

    def __init__(self) -> None:
        self.sections: dict[str, Tables] = {}

    def add_section(
        self, name: str, *unions: Any, tag: str = "type", only: Collection[str] = ()
    ) -> None:
        """Add the objects of unions by their tags; with ``only``, the members of these."""
        tables: Tables = {}
        for member in (each for union in unions for each in flatten(union)):
            if typing_extensions.is_typeddict(member):
                for value in find_tags(member, tag):
                    if value not in tables:
                        is_listed = not only or value in only
                        tables[value] = self.derive_members(member, tag) if is_listed else "object"
        self.sections[name] = dict(sorted(tables.items()))

    def derive_members(self, table: Any, omit: str = "") -> dict[str, Type]:
        """Derive the members of an object."""
        members: dict[str, Type] = {}
        for name, hint in typing_extensions.get_type_hints(table, include_extras=True).items():
            alternatives = list(flatten(hint))
            is_null = type(None) in alternatives
            rest = [each for each in alternatives if each is not type(None)]
            marks = ("!" if is_required(hint) else "") + ("?" if is_null else "")
            if name != omit and rest:
                members[name + marks] = self.derive(rest)
        return members

    def derive(self, alternatives: list[Any]) -> Type:
        """Derive a type from its alternatives."""
        objects = [each for each in alternatives if typing_extensions.is_typeddict(each)]
        literals = [each for each in alternatives if get_origin(each) is Literal]
        others = [each for each in alternatives if each not in objects and each not in literals]
        found: list[Type] = []
        if literals and str not in others:
            found.append(["enum", *dict.fromkeys(v for each in literals for v in get_args(each))])
        found += [self.derive_other(each) for each in others]
        if objects:
            found.append(self.derive_objects(objects))
        unique = [each for index, each in enumerate(found) if each not in found[:index]]
        return unique[0] if len(unique) == 1 else ["any", *unique]

    def derive_objects(self, objects: list[Any]) -> Type:
        """Derive one object, or the union of several."""
        if any(each.__name__ in OPAQUE_TYPES for each in objects):
            return "object"
        tag = "role" if find_tags(objects[0], "role") else "type"
        tags = [value for each in objects for value in find_tags(each, tag)]
        if not tags or len(tags) < len(objects):
            return self.derive_members(objects[0]) if len(objects) == 1 else "object"
        variants = {
            v: self.derive_members(each, tag) for each in objects for v in find_tags(each, tag)
        }
        section = self.find_section(variants)
        if section is not None:
            return ["union", section, *variants]
        return ["union", variants]

    def find_section(self, variants: dict[str, dict[str, Type]]) -> str | None:
        """Return the section that has all of these objects, with all of their members."""
        for section, tables in self.sections.items():
            known = {tag: {name.rstrip("!?") for name in table} for tag, table in tables.items()}
            if all(
                {name.rstrip("!?") for name in table} <= known.get(tag, set())
                for tag, table in variants.items()
            ):
                return section
        return None

    def derive_other(self, hint: Any) -> Type:
        """Derive a scalar, an array or a map."""
        origin, args = get_origin(hint), get_args(hint)
        if hint in SCALARS:
            return SCALARS[hint]
        if origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
            value = self.derive(list(flatten(args[1])))
            return "object" if value == "json" else ["map", value]
        if origin is not None and issubclass(origin, Iterable):
            return ["array", self.derive(list(flatten(args[0])))]
        return "json"


def flatten(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of a type."""
    origin = get_origin(hint)
    if isinstance(hint, typing_extensions.TypeAliasType):
        yield from flatten(hint.__value__)
    elif origin in WRAPPERS:
        yield from flatten(get_args(hint)[0])
    elif origin in (Union, types.UnionType):
        for each in get_args(hint):
            yield from flatten(each)
    else:
        yield hint


def is_required(hint: Any) -> bool:
    """Return whether the hint of a member says that it is required."""
    return get_origin(hint) in (typing.Required, typing_extensions.Required)


def find_tags(table: Any, tag: str) -> list[str]:
    """Return the values of the member that distinguishes an object from others, if it is required."""
    hint = typing_extensions.get_type_hints(table, include_extras=True).get(tag)
    literals = [each for each in flatten(hint) if get_origin(each) is Literal]
    return [value for each in literals for value in get_args(each)] if is_required(hint) else []


def derive_schema() -> dict[str, dict[str, Tables]]:
    """Derive all tables from the installed packages, by API."""
    return {"responses": derive_responses(), "chat": derive_chat(), "messages": derive_messages()}


def derive_responses() -> dict[str, Tables]:
    """Derive the tables of the Responses API."""
    derived = Derivation()
    derived.add_section(
        "content",
        get_args(responses.ResponseFunctionCallOutputItemListParam)[0],
        responses.response_output_message_param.Content,
        beta_items.AgentMessageContent,
    )
    derived.add_section("tools", tool_param.ToolParam)
    derived.add_section("tool_choices", response_create_params.ToolChoice)
    derived.add_section(
        "items", responses.ResponseInputItemParam, beta_items.BetaResponseInputItemParam
    )
    del derived.sections["items"]["message"]  # its content depends on the role
    table = derived.derive_members(response_create_params.ResponseCreateParamsBase)
    derived.sections["parameters"] = {"create": table}
    return derived.sections


def derive_chat() -> dict[str, Tables]:
    """Derive the tables of Chat Completions."""
    derived = Derivation()
    derived.add_section(
        "content", chat.ChatCompletionContentPartParam, chat.ChatCompletionContentPartRefusalParam
    )
    derived.add_section("tools", chat.ChatCompletionToolUnionParam)
    derived.add_section("tool_choices", chat.ChatCompletionToolChoiceOptionParam)
    derived.add_section("messages", chat.ChatCompletionMessageParam, tag="role")
    table = derived.derive_members(completion_create_params.CompletionCreateParamsBase)
    for name in ("function_call", "functions"):  # replaced by tools
        del table[name]
    derived.sections["parameters"] = {"create": table}
    return derived.sections


def derive_messages() -> dict[str, Tables]:
    """Derive the tables of Messages: the content that a model here sees, and the names of the rest."""
    derived = Derivation()
    derived.add_section("texts", TEXT_BLOCKS)
    derived.add_section("results", tool_results.Content, only=RESULT_BLOCKS)
    derived.add_section("content", messages.BetaContentBlockParam, only=OTHER_BLOCKS)
    for name in derived.sections["results"].keys() & derived.sections["content"].keys():
        del derived.sections["content"][name]
    derived.add_section("tools", messages.BetaToolUnionParam, only=["custom"])
    return derived.sections


def encode_schema() -> str:
    """Return the content of the file, with one member in a line."""
    return encode_nested(derive_schema(), depth=4) + "\n"


def encode_nested(value: Any, depth: int) -> str:
    """Encode an object with one member in a line, and so the objects in it down to this depth."""
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value)
    lines = [
        f"{json.dumps(name)}: {encode_nested(each, depth - 1)}" for name, each in value.items()
    ]
    return "{\n" + textwrap.indent(",\n".join(lines), " ") + "\n}"


if __name__ == "__main__":
    PATH.write_text(encode_schema())
