"""Encode and parse blocks as JSON: the codec of Turn JSON, the store and chat states.

msgspec encodes and decodes blocks by their types. Members and kinds that Kedge does not know, which the decoder
rejects, are split off before: into ``extra``, an ``OpaquePart`` or an ``UnknownBlock``. Nothing that was read is lost.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from kedge.errors import InvalidJSON, InvalidTurn
from kedge.text.json_text import decode, encode
from kedge.turns.blocks import (
    IDENTITY_FIELDS,
    USER,
    AssistantBlock,
    Block,
    KnownBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
)
from kedge.turns.frozen_json import EMPTY, FrozenMap, freeze, thaw
from kedge.turns.parts import ASSISTANT_PART_TYPES, PART_TYPES, OpaquePart, Part

JsonObject = dict[str, Any]

_BLOCK_TYPES: dict[str, type[Any]] = {cls.kind: cls for cls in KnownBlock.__args__}
_PART_TYPES: dict[str, type[Any]] = {
    str(cls.__struct_config__.tag): cls for cls in cast("tuple[type[Any], ...]", PART_TYPES)
}


def decode_special(kind: type[Any], value: object) -> Any:
    """Return the value of a field whose type msgspec does not know; the ``dec_hook`` of decoders."""
    if kind is FrozenMap:
        return value if type(value) is FrozenMap else read_map(value)
    raise TypeError(f"{kind.__name__} is not a member")


def encode_special(value: Any) -> Any:
    """Return a map as a dict, and a value with a JSON form as that; the ``enc_hook`` of encoders."""
    return dict(value) if type(value) is FrozenMap else value.to_json()


class _Form(msgspec.Struct):
    """A block to convert: msgspec analyzes the type of a Struct once, and any other type in every call."""

    block: KnownBlock


# Decoders are built here, because msgspec crashes if two threads analyze one type at the same time.
_decode = msgspec.json.Decoder(KnownBlock, dec_hook=decode_special).decode
msgspec.convert({"block": {"kind": "reasoning"}}, _Form, dec_hook=decode_special)
encode_json = msgspec.json.Encoder(enc_hook=encode_special).encode
"""Encode JSON values with blocks, parts and maps."""


def parse_block(text: str) -> Block:
    """Parse a block from JSON text.

    Raises:
        ValueError: If it is not JSON.
        InvalidJSON: If the value is malformed.
    """
    try:
        return _decode(text)
    except (msgspec.DecodeError, RecursionError):
        return decode_block(decode(text))


def encode_block(block: Block) -> str:
    """Return the JSON form of a block, as compact text."""
    return (encode_json(block) if is_plain(block) else encode(dump_block(block))).decode()


def is_plain(block: Block) -> bool:
    """Return whether the JSON form of a block is that of its fields, without unknown members and parts."""
    if block.extra is not EMPTY or type(block) is UnknownBlock:
        return False
    for part in getattr(block, "parts", ()):  # noqa: SIM110 - faster than a generator
        if part.extra is not EMPTY or type(part) is OpaquePart:
            return False
    return True


def dump_block(block: Block) -> JsonObject:
    """Encode a block as plain JSON values, without fields at their default.

    Args:
        block: The block.

    Returns:
        A dict, which ``load_block`` parses.
    """
    form = _dump(block)
    if isinstance(block, UnknownBlock):
        del form["kind"], form["form"]
        return {**thaw(block.form), **form}
    if isinstance(block, UserBlock | AssistantBlock | ToolResultBlock):
        form["parts"] = [_dump_part(part) for part in block.parts]
    return form


def _dump_part(part: Part) -> JsonObject:
    if isinstance(part, OpaquePart) and not part.extra:
        kind = part.content.get("type")
        if isinstance(kind, str) and kind not in _PART_TYPES:
            return thaw(part.content)
    return _dump(part)


def _dump(value: Block | Part) -> JsonObject:
    form = decode(encode_json(value))
    form.pop("extra", None)
    return {**form, **thaw(value.extra)}


def load_block(value: object, path: str = "$") -> Block:
    """Parse a block from plain JSON values.

    Args:
        value: The output of ``dump_block``.
        path: The path of the value, for errors.

    Returns:
        The block.

    Raises:
        InvalidJSON: If the value is malformed; ``path`` names the invalid member.
    """
    try:
        return decode_block(value)
    except InvalidJSON as error:
        raise error.prefix_path(path) from None


def decode_block(value: object) -> Block:
    """Parse a block from plain JSON values.

    Raises:
        InvalidJSON: If the value is malformed; its path is relative to the block.
    """
    try:
        return msgspec.convert({"block": value}, _Form, dec_hook=decode_special).block
    except (ValueError, RecursionError):
        return _decode_split(value)


def upgrade_block(value: object) -> object:
    """Return a block of Turn JSON 1 as one of today: its source and Kedge's own values were members of ``metadata``."""
    if not isinstance(value, dict):
        return value
    form = cast("JsonObject", value)
    metadata = form.get("metadata")
    if not isinstance(metadata, dict):
        return form
    members = dict(cast("JsonObject", metadata))
    source = [members.pop(name, default) for name, default in _SOURCE_DEFAULTS.items()]
    if form.get("origin", USER) != USER:
        members = {_RENAMED.get(name, name): member for name, member in members.items()}
    is_known = source != list(_SOURCE_DEFAULTS.values())
    return {**form, "metadata": members, **({"source": source} if is_known else {})}


_SOURCE_DEFAULTS: dict[str, Any] = {"response_id": "", "item_id": "", "output_index": None}
_OWN_METADATA = ("native_api", "outcome", "partial", "prompt_level", "shortened", "summary")
_RENAMED = {name: f"kedge.{name}" for name in _OWN_METADATA}


def _decode_split(value: object) -> Block:
    """Parse a block with members or parts that Kedge does not know, or raise the error of an invalid one."""
    form = read_object(value)
    kind = _read_tag(form, "kind")
    if kind not in _BLOCK_TYPES:
        rest = {name: member for name, member in form.items() if name not in IDENTITY_FIELDS}
        identity = {name: form[name] for name in IDENTITY_FIELDS & form.keys()}
        return _convert({**identity, "form": read_map(rest)}, UnknownBlock)
    parts = form.get("parts")
    if isinstance(parts, list):
        members = enumerate(cast("list[object]", parts))
        form = {**form, "parts": [_decode_part(part, index) for index, part in members]}
        for index, part in enumerate(form["parts"] if kind == "assistant" else ()):
            if not isinstance(part, ASSISTANT_PART_TYPES):
                problem = "an assistant block can have text and refusals only"
                raise InvalidJSON(f".parts[{index}].type", problem)
    return _convert_known(form, _BLOCK_TYPES[kind])


def _decode_part(value: object, index: int) -> Part:
    try:
        form = read_object(value)
        kind = _read_tag(form, "type")
        if kind not in _PART_TYPES:
            return OpaquePart(read_map(form))
        return _convert_known(form, _PART_TYPES[kind])
    except InvalidJSON as error:
        raise error.prefix_path(f".parts[{index}]") from None


def _convert_known(form: JsonObject, cls: type[Any]) -> Any:
    """Return the Struct of a form, with its unknown members in ``extra``."""
    names = {cls.__struct_config__.tag_field, *cls.__struct_fields__} - {"extra"}
    rest = {name: member for name, member in form.items() if name not in names}
    found = _convert({name: form[name] for name in form if name in names}, cls)
    return replace(found, extra=read_map(rest)) if rest else found


def _convert(form: JsonObject, cls: type[Any]) -> Any:
    try:
        return msgspec.convert(form, cls, dec_hook=decode_special)
    except msgspec.ValidationError as error:
        raise to_invalid_json(error) from None
    except UnicodeEncodeError as error:  # of a value that is compared with the known ones
        raise InvalidJSON("", f"lone surrogate at character {error.start}") from None


# Readers. Each raises an error with a relative path, to which its caller adds a step.


def read_object(value: object) -> JsonObject:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise InvalidJSON("", f"expected an object, got {name_type(value)}")
    return cast("JsonObject", value)


def read_map(value: object) -> FrozenMap:
    """Return a JSON object as an immutable map."""
    return freeze(read_object(value), "")


def _read_tag(form: Mapping[str, object], name: str) -> str:
    if name not in form:
        raise InvalidJSON(f".{name}", "missing")
    tag = form[name]
    if not isinstance(tag, str):
        raise InvalidJSON(f".{name}", f"expected a string, got {name_type(tag)}")
    return tag


_TYPE_NAMES = {
    **dict.fromkeys(("null", "NoneType"), "null"),
    **dict.fromkeys(("array", "list"), "an array"),
    **dict.fromkeys(("object", "dict"), "an object"),
    **dict.fromkeys(("int", "float"), "a number"),
    "bool": "a boolean",
    "str": "a string",
}
"""The names of the types of JSON values, by those of msgspec and of Python."""
_MESSAGE = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MISMATCH = re.compile(r"Expected `(\w+).*`, got `(\w+)`")


def name_type(value: object) -> str:
    """Return the name of the JSON type of a value."""
    return _get_name(type(value).__name__)


def _get_name(name: str) -> str:
    return _TYPE_NAMES.get(name, name)


def to_invalid_json(error: msgspec.ValidationError) -> InvalidJSON:
    """Return the error for a value that a decoder rejected, with the path of the invalid member."""
    found = cast("re.Match[str]", _MESSAGE.fullmatch(str(error)))
    path, problem = found["path"] or "", found["problem"]
    if isinstance(
        cause := error.__cause__, InvalidJSON
    ):  # of a check, whose path is the name of a field
        step = "." if cause.path[:1] not in (".", "[", "") else ""
        return cause.prefix_path(path + step)
    if isinstance(cause, InvalidTurn):
        return InvalidJSON(path, str(cause))
    if path == ".role" and problem.startswith("Invalid enum"):
        return InvalidJSON(path, "expected 'system' or 'developer'")
    if missing := _MISSING.fullmatch(problem):
        return InvalidJSON(f"{path}.{missing[1]}", "missing")
    if problem.startswith("Expected `str` of length"):
        return InvalidJSON(path, "expected an id, got an empty string")
    if mismatch := _MISMATCH.fullmatch(problem):
        expected = "true or false" if mismatch[1] == "bool" else _get_name(mismatch[1])
        return InvalidJSON(path, f"expected {expected}, got {_get_name(mismatch[2])}")
    return InvalidJSON(path, problem[:1].lower() + problem[1:])
