"""The JSON form of a Turn and of its blocks: versioned, lossless and documented (docs/json-form.md).

Parsing is strict about known fields and accepts unknown ones: fields and kinds of a newer version are stored and
written again; anything malformed is an ``InvalidJSON`` with the path of the invalid member. A Turn is parsed
completely or not at all.

msgspec encodes and decodes blocks by their types, also for the store and chat states. Members and kinds that Kedge does
not know, which the decoder rejects, are split off before: into ``extra``, an ``OpaquePart`` or an ``UnknownBlock``.
Nothing that was read is lost.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from kedge._internal.argument_types import checked
from kedge._internal.json_text import decode, encode
from kedge.errors import InvalidJSON, InvalidTurn
from kedge.turns import frozen_json
from kedge.turns.blocks import (
    IDENTITY_FIELDS,
    AssistantBlock,
    Block,
    KnownBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
)
from kedge.turns.frozen_json import EMPTY, MAX_INTEGER_BITS, FrozenMap, thaw
from kedge.turns.parts import ASSISTANT_PART_TYPES, PART_TYPES, OpaquePart, Part
from kedge.turns.turn import TURN_MEMBERS, Turn

JsonObject = dict[str, Any]

_BLOCK_TYPES: dict[str, type[Any]] = {cls.kind: cls for cls in KnownBlock.__args__}
_PART_TYPES: dict[str, type[Any]] = {
    str(cls.__struct_config__.tag): cls for cls in cast("tuple[type[Any], ...]", PART_TYPES)
}


def decode_special(kind: type[Any], value: object) -> Any:
    """Return the value of a field whose type msgspec does not know; the ``dec_hook`` of decoders."""
    if kind is not FrozenMap:
        raise TypeError(f"{kind.__name__} is not a member")
    if type(value) is FrozenMap:
        return value
    return read_map(value)


def encode_special(value: Any) -> Any:
    """Return a map as a dict, and a value with a JSON form as that; the ``enc_hook`` of encoders."""
    if type(value) is FrozenMap:
        return dict(value)
    return value.to_json()


class _Forms(msgspec.Struct):
    """Blocks to convert: msgspec analyzes the type of a Struct once, and any other type in every call."""

    blocks: list[KnownBlock]


# Decoders are built here, because msgspec crashes if two threads analyze one type at the same time.
_decode_block = msgspec.json.Decoder(KnownBlock, dec_hook=decode_special).decode
msgspec.convert({"blocks": [{"kind": "reasoning"}]}, _Forms, dec_hook=decode_special)
encode_json = msgspec.json.Encoder(enc_hook=encode_special).encode
"""Encode JSON values with blocks, parts and maps."""


def parse_block(text: str) -> Block:
    """Parse a block from JSON text.

    Raises:
        ValueError: If it is not JSON.
        InvalidJSON: If the value is malformed.
    """
    try:
        return _decode_block(text)
    except (msgspec.DecodeError, RecursionError):
        return decode_block(decode(text))


def encode_block(block: Block) -> str:
    """Return the JSON form of a block, as compact text."""
    if is_plain(block):
        return encode_json(block).decode()
    return encode(dump_block(block)).decode()


def is_plain(block: Block) -> bool:
    """Return whether the JSON form of a block has only its fields, without unknown members and parts."""
    if block.extra is not EMPTY or type(block) is UnknownBlock:
        return False
    for part in getattr(block, "parts", ()):  # noqa: SIM110 - faster than a generator
        if part.extra is not EMPTY or type(part) is OpaquePart:
            return False
    return True


@checked
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


@checked
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
        return _convert_blocks([value])[0]
    except (ValueError, RecursionError):
        return _decode_split(value)


def _convert_blocks(values: list[object]) -> Sequence[Block]:
    return msgspec.convert({"blocks": values}, _Forms, dec_hook=decode_special).blocks


def _decode_split(value: object) -> Block:
    """Parse a block with members or parts that Kedge does not know, or raise the error of an invalid one."""
    form = read_object(value)
    kind = _read_text(form, "kind")
    if kind not in _BLOCK_TYPES:
        rest = {name: member for name, member in form.items() if name not in IDENTITY_FIELDS}
        identity = {name: form[name] for name in IDENTITY_FIELDS & form.keys()}
        return _convert({**identity, "form": read_map(rest)}, UnknownBlock)
    parts = form.get("parts")
    if isinstance(parts, list):
        members = enumerate(cast("list[object]", parts))
        decoded = [_decode_part(part, index) for index, part in members]
        if kind == "assistant":
            _check_assistant_parts(decoded)
        form = {**form, "parts": decoded}
    return _convert_known(form, _BLOCK_TYPES[kind])


def _check_assistant_parts(parts: Iterable[Part]) -> None:
    for index, part in enumerate(parts):
        if not isinstance(part, ASSISTANT_PART_TYPES):
            problem = "an assistant block can have text and refusals only"
            raise InvalidJSON(f".parts[{index}].type", problem)


def _decode_part(value: object, index: int) -> Part:
    try:
        form = read_object(value)
        kind = _read_text(form, "type")
        if kind not in _PART_TYPES:
            return OpaquePart(read_map(form))
        return _convert_known(form, _PART_TYPES[kind])
    except InvalidJSON as error:
        raise error.prefix_path(f".parts[{index}]") from None


def _convert_known(form: JsonObject, cls: type[Any]) -> Any:
    """Return the Struct of a form, with its unknown members in ``extra``."""
    names = {cls.__struct_config__.tag_field, *cls.__struct_fields__} - {"extra"}
    rest = {name: member for name, member in form.items() if name not in names}
    struct = _convert({name: form[name] for name in form if name in names}, cls)
    if rest:
        return replace(struct, extra=read_map(rest))
    return struct


def _convert(form: JsonObject, cls: type[Any]) -> Any:
    try:
        return msgspec.convert(form, cls, dec_hook=decode_special)
    except msgspec.ValidationError as error:
        raise to_invalid_json(error) from None
    except UnicodeEncodeError as error:  # of a value that is compared with the known ones
        raise InvalidJSON("", f"lone surrogate at character {error.start}") from None


# Readers. Each raises an error with a relative path, to which its caller adds a step.


def read_object(value: object, path: str = "") -> JsonObject:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise InvalidJSON(path, f"expected an object, got {name_type(value)}")
    return cast("JsonObject", value)


def read_map(value: object, path: str = "") -> FrozenMap:
    """Return a JSON object as an immutable map."""
    return frozen_json.freeze(read_object(value, path), path)


def _read_text(form: Mapping[str, object], name: str) -> str:
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
"""The names of the types of JSON values, by their names in msgspec and in Python."""
_MESSAGE = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MISMATCH = re.compile(r"Expected `(\w+).*`, got `(\w+)`")


def name_type(value: object) -> str:
    """Return the name of the JSON type of a value."""
    name = type(value).__name__
    return _TYPE_NAMES.get(name, name)


def to_invalid_json(error: msgspec.ValidationError) -> InvalidJSON:
    """Return the error for a value that a decoder rejected, with the path of the invalid member."""
    message = cast("re.Match[str]", _MESSAGE.fullmatch(str(error)))
    path = message["path"] or ""
    problem = message["problem"]
    # The cause is an error of a check, whose path is the name of a field.
    if isinstance(cause := error.__cause__, InvalidJSON):
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
        wanted, actual = (_TYPE_NAMES.get(name, name) for name in mismatch.groups())
        if mismatch[1] == "bool":
            wanted = "true or false"
        return InvalidJSON(path, f"expected {wanted}, got {actual}")
    return InvalidJSON(path, problem[:1].lower() + problem[1:])


MAX_DIGITS = len(str(1 << MAX_INTEGER_BITS))


class InvalidValue(msgspec.Struct):
    """Replaces an invalid value in parsed JSON until its path is known."""

    problem: str
    step: str = ""


def parse_json(text: str | bytes) -> object:
    """Parse JSON text; the result may contain an ``InvalidValue``, which ``load`` rejects."""
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON("$", f"expected JSON text, got {type(text).__name__}")
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return _decode_json(text)
    except RecursionError:
        raise InvalidJSON("$", "nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InvalidJSON("$", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidJSON("$", f"not JSON: {error.msg} at character {error.pos}") from None


def _parse_int(digits: str) -> int | InvalidValue:
    if len(digits) > MAX_DIGITS + 1:  # and a sign
        return InvalidValue(f"an integer of more than {MAX_INTEGER_BITS} bits")
    return int(digits)


def _parse_float(literal: str) -> float | InvalidValue:
    """Parse a fraction as the nearest double; overflow and underflow are invalid."""
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        return InvalidValue("the number is too large")
    if value == 0 and literal.lower().partition("e")[0].strip("-0."):
        return InvalidValue("the number is too small")
    return value


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | InvalidValue:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    return InvalidValue("given twice", frozen_json.path_step(twice))


_decode_json = json.JSONDecoder(
    object_pairs_hook=_parse_object,
    parse_float=_parse_float,
    parse_int=_parse_int,
    parse_constant=lambda name: InvalidValue(f"{name} is not a JSON number"),
).decode


def _find_invalid_value(value: object) -> InvalidJSON | None:
    """Return the error of an invalid value in parsed JSON, if there is one."""
    remaining: list[tuple[str, object]] = [("$", value)]
    while remaining:
        path, value = remaining.pop()
        if isinstance(value, InvalidValue):
            return InvalidJSON(path + value.step, value.problem)
        if isinstance(value, dict):
            members = cast("dict[str, object]", value).items()
            remaining += [(path + frozen_json.path_step(name), member) for name, member in members]
        elif isinstance(value, list):
            elements = enumerate(cast("list[object]", value))
            remaining += [(f"{path}[{index}]", element) for index, element in elements]
    return None


VERSION = 2
FORMAT = "kedge.turn"


@checked
def dumps(turn: Turn) -> str:
    """Encode a Turn as JSON text.

    Args:
        turn: The Turn.

    Returns:
        The text, which ``loads`` parses.
    """
    blocks = [block if is_plain(block) else dump_block(block) for block in turn.blocks]
    return encode_json({**_dump_members(turn), "blocks": blocks, **turn.extra}).decode()


def loads(text: str | bytes) -> Turn:
    """Parse a Turn from JSON text.

    Anchors in the text are as trustworthy as its source; see ``kedge.planning.drop_anchors``.

    Args:
        text: The output of ``dumps``.

    Returns:
        The Turn.

    Raises:
        InvalidJSON: If the text is malformed; ``path`` names the invalid member.
    """
    value = parse_json(text)
    try:
        return load(value)
    except InvalidJSON as error:
        raise _find_invalid_value(value) or error from None


@checked
def dump(turn: Turn) -> JsonObject:
    """Encode a Turn as plain JSON values.

    Args:
        turn: The Turn.

    Returns:
        A dict, which ``load`` parses.
    """
    blocks = [dump_block(block) for block in turn.blocks]
    return {**_dump_members(turn), "blocks": blocks, **thaw(turn.extra)}


def _dump_members(turn: Turn) -> JsonObject:
    members: JsonObject = {"format": FORMAT, "version": VERSION, "id": turn.id}
    if turn.data:
        members["data"] = thaw(turn.data)
    return members


def load(value: object) -> Turn:
    """Parse a Turn from plain JSON values.

    Args:
        value: The output of ``dump``.

    Returns:
        The Turn.

    Raises:
        InvalidJSON: If the value is malformed; ``path`` names the invalid member.
    """
    try:
        return _load_turn(value)
    except InvalidJSON as error:
        raise error.prefix_path("$") from None


def _load_turn(value: object) -> Turn:
    form = read_object(value)
    if form.get("format") != FORMAT:
        raise InvalidJSON(".format", f"expected {FORMAT!r}")
    _check_version(form.get("version"))
    rest = {name: member for name, member in form.items() if name not in TURN_MEMBERS}
    turn_id = ""
    if "id" in form:
        turn_id = _read_id(form)
    data = EMPTY
    if "data" in form:
        data = read_map(form["data"], ".data")
    return Turn(_load_blocks(form), id=turn_id, data=data, extra=read_map(rest))


def _load_blocks(form: JsonObject) -> Sequence[Block]:
    if "blocks" not in form:
        raise InvalidJSON(".blocks", "missing")
    if not isinstance(form["blocks"], list):
        raise InvalidJSON(".blocks", f"expected an array, got {name_type(form['blocks'])}")
    forms = cast("list[object]", form["blocks"])
    try:
        blocks = _convert_blocks(forms)
    except (ValueError, RecursionError):  # a block is not known completely, or is invalid
        blocks = [load_block(member, f".blocks[{index}]") for index, member in enumerate(forms)]
    indices: dict[str, int] = {}
    for index, block in enumerate(blocks):
        first = indices.setdefault(block.id, index)
        if first != index:
            raise InvalidJSON(f".blocks[{index}].id", f"the same id as $.blocks[{first}]")
    return blocks


def _read_id(form: JsonObject) -> str:
    if not (name := frozen_json.check_text(_read_text(form, "id"), ".id")):
        raise InvalidJSON(".id", "expected an id, got an empty string")
    return name


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidJSON(".version", "expected a positive integer")
    if version < VERSION:
        raise InvalidJSON(
            ".version",
            f"written by a development version of Kedge (form {version}); this version reads form {VERSION} only",
        )
    if version > VERSION:
        raise InvalidJSON(
            ".version",
            f"written by a newer version of Kedge (form {version}, this one reads {VERSION}); upgrade Kedge",
        )
