"""The JSON form of a Turn: versioned, lossless and documented (docs/json-form.md).

Parsing is strict about known fields and accepts unknown ones: fields and kinds of a newer version are stored and
written again; anything malformed is an ``InvalidJSON`` with the path of the invalid member. A Turn is parsed
completely or not at all. One table of codecs serves both directions.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, TypeVar, cast

from kedge.errors import InvalidJSON, InvalidTurn
from kedge.turns.blocks import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    SystemBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
)
from kedge.turns.frozen_json import MAX_INTEGER_BITS, FrozenMap, InvalidValue, freeze, thaw
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart
from kedge.turns.turn import TURN_MEMBERS, Turn

MAX_DIGITS = len(str(1 << MAX_INTEGER_BITS))


def parse_json(text: str | bytes) -> object:
    """Parse JSON text; the result may hold an ``InvalidValue``, which ``load`` rejects."""
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON("$", f"expected JSON text, got {type(text).__name__}")
    try:
        return _decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise InvalidJSON("$", "nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InvalidJSON("$", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidJSON("$", f"not JSON: {error.msg} at character {error.pos}") from None


def _parse_constant(name: str) -> InvalidValue:
    return InvalidValue(f"{name} is not a JSON number")


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
    return InvalidValue("given twice", twice)


_decode = json.JSONDecoder(
    object_pairs_hook=_parse_object,
    parse_float=_parse_float,
    parse_int=_parse_int,
    parse_constant=_parse_constant,
).decode


VERSION = 1
FORMAT = "kedge.turn"

JsonObject = dict[str, Any]
T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(turn: Turn) -> str:
    """Encode a Turn as JSON text.

    Args:
        turn: The Turn.

    Returns:
        The text, which ``loads`` parses.
    """
    return _encode(dump(turn))


def loads(text: str | bytes) -> Turn:
    """Parse a Turn from JSON text.

    Anchors in the text are as trustworthy as its source; see ``kedge.planning.drop_anchors``.

    Args:
        text: What ``dumps`` returned.

    Returns:
        The Turn.

    Raises:
        InvalidJSON: If the text is malformed; ``path`` names the invalid member.
    """
    return load(parse_json(text))


def dump(turn: Turn) -> JsonObject:
    """Encode a Turn as plain JSON values.

    Args:
        turn: The Turn.

    Returns:
        A dict, which ``load`` parses.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": turn.id,
        **({"data": thaw(turn.data)} if turn.data else {}),
        "blocks": [dump_block(block) for block in turn.blocks],
        **thaw(turn.extra),
    }


def load(value: object) -> Turn:
    """Parse a Turn from plain JSON values.

    Args:
        value: What ``dump`` returned.

    Returns:
        The Turn.

    Raises:
        InvalidJSON: If the value is malformed; ``path`` names the invalid member.
    """
    try:
        return _load_turn(value)
    except InvalidJSON as error:
        raise error.prefix_path("$") from None


def dump_block(block: Block) -> JsonObject:
    """Encode a block as plain JSON values, without fields at their default.

    Args:
        block: The block.

    Returns:
        A dict, which ``load_block`` parses.
    """
    if isinstance(block, UnknownBlock):
        return {**thaw(block.form), **_UNKNOWN_CODEC.dump(block)}
    return {"kind": block.kind, **BLOCK_CODECS[block.kind].dump(block)}


def load_block(value: object, path: str = "$") -> Block:
    """Parse a block from plain JSON values.

    Args:
        value: What ``dump_block`` returned.
        path: The path of the value, for errors.

    Returns:
        The block.

    Raises:
        InvalidJSON: If the value is malformed; ``path`` names the invalid member.
    """
    try:
        return _load_block(value)
    except InvalidJSON as error:
        raise error.prefix_path(path) from None


def _load_turn(value: object) -> Turn:
    form = _read_object(value)
    if form.get("format") != FORMAT:
        raise InvalidJSON(".format", f"expected {FORMAT!r}")
    _read_at(".version", _check_version, form.get("version"))
    if "blocks" not in form:
        raise InvalidJSON(".blocks", "missing")
    blocks = _read_at(".blocks", _read_array, form["blocks"], _load_block)
    _check_ids(blocks)
    return Turn(
        blocks,
        id=_read_at(".id", _read_id, form["id"]) if "id" in form else "",
        data=_read_at(".data", _read_map, form["data"]) if "data" in form else {},
        extra=_read_map(
            {name: member for name, member in form.items() if name not in TURN_MEMBERS}
        ),
    )


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidJSON("", "expected a positive integer")
    if version > VERSION:
        raise InvalidJSON(
            "",
            f"written by a newer version of Kedge (form {version}, this one reads {VERSION}); upgrade Kedge",
        )


def _check_ids(blocks: tuple[Block, ...]) -> None:
    seen: dict[str, int] = {}
    for index, block in enumerate(blocks):
        first = seen.setdefault(block.id, index)
        if first != index:
            raise InvalidJSON(f".blocks[{index}].id", f"the same id as $.blocks[{first}]")


def _load_block(value: object) -> Block:
    form = _read_object(value)
    kind = _read_tag(form, "kind")
    if kind in BLOCK_CODECS:
        return BLOCK_CODECS[kind].load(form, "kind")
    rest = {name: member for name, member in form.items() if name not in _IDENTITY_FIELDS}
    return UnknownBlock(_read_map(rest), **_UNKNOWN_CODEC.read(form))


def _dump_part(part: Part) -> JsonObject:
    if isinstance(part, OpaquePart) and _is_unambiguous(part):
        return thaw(part.content)
    return {
        "type": _PART_TYPE_NAMES[type(part)],
        **PART_CODECS[_PART_TYPE_NAMES[type(part)]].dump(part),
    }


def _load_part(value: object) -> Part:
    form = _read_object(value)
    kind = _read_tag(form, "type")
    return (
        PART_CODECS[kind].load(form, "type") if kind in PART_CODECS else OpaquePart(_read_map(form))
    )


def _is_unambiguous(part: OpaquePart) -> bool:
    """Return whether the content of this part cannot be taken for a known part."""
    kind = part.content.get("type")
    return isinstance(kind, str) and kind not in PART_CODECS and not part.extra


# Readers. Each raises an error with a relative path, to which its caller adds a step.


def _read_at(step: str, read: Callable[..., T], *values: Any) -> T:
    try:
        return read(*values)
    except InvalidJSON as error:
        raise error.prefix_path(step) from None


def _type_mismatch(value: object, expected: str) -> InvalidJSON:
    if isinstance(value, InvalidValue):
        return InvalidJSON(value.step, value.problem)
    kind = _JSON_TYPE_NAMES.get(type(value), type(value).__name__)
    return InvalidJSON("", f"expected {expected}, got {kind}")


def _read_object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _type_mismatch(value, "an object")
    return cast("dict[str, object]", value)


def _read_tag(form: Mapping[str, object], name: str) -> str:
    if name not in form:
        raise InvalidJSON(f".{name}", "missing")
    return _read_at(f".{name}", _read_text, form[name])


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise _type_mismatch(value, "a string")
    return value if value.isascii() else freeze(value, "")


def _read_id(value: object) -> str:
    if not value and isinstance(value, str):
        raise InvalidJSON("", "expected an id, got an empty string")
    return _read_text(value)


def _read_map(value: object) -> FrozenMap:
    return freeze(_read_object(value), "")


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise _type_mismatch(value, "true or false")
    return value


def _read_role(value: object) -> str:
    if _read_text(value) not in ("system", "developer"):
        raise InvalidJSON("", "expected 'system' or 'developer'")
    return cast("str", value)


def _read_array(value: object, read: Callable[[object], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise _type_mismatch(value, "an array")
    loaded: list[T] = []
    for index, member in enumerate(cast("list[object]", value)):
        try:
            loaded.append(read(member))
        except InvalidJSON as error:
            raise error.prefix_path(f"[{index}]") from None
    return tuple(loaded)


def _read_texts(value: object) -> tuple[str, ...]:
    return _read_array(value, _read_text)


def _read_parts(value: object) -> tuple[Part, ...]:
    return _read_array(value, _load_part)


def _read_assistant_parts(value: object) -> tuple[Part, ...]:
    parts = _read_parts(value)
    for index, part in enumerate(parts):
        if isinstance(part, ImagePart | FilePart):
            raise InvalidJSON(
                f"[{index}].type", "an assistant block can have text and refusals only"
            )
    return parts


def _pass_through(value: Any) -> Any:
    return value


def _dump_parts(parts: tuple[Part, ...]) -> list[JsonObject]:
    return [_dump_part(part) for part in parts]


_JSON_TYPE_NAMES: dict[type, str] = {
    NoneType: "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class ObjectCodec:
    """Encodes and parses one kind of block or type of part."""

    make: Callable[..., Any]
    required: frozenset[str]
    defaults: Mapping[str, object]
    readers: Mapping[str, Callable[[object], Any]]
    writers: Mapping[str, Callable[[Any], Any]]

    def read(self, form: Mapping[str, object]) -> JsonObject:
        """Parse the fields of a form; a missing one without default is an error."""
        members: JsonObject = {}
        for name, read in self.readers.items():
            if name in form:
                try:
                    members[name] = read(form[name])
                except InvalidJSON as error:
                    raise error.prefix_path(f".{name}") from None
            elif name in self.required:
                raise InvalidJSON(f".{name}", "missing")
        return members

    def load(self, form: Mapping[str, object], tag: str) -> Any:
        """Parse a value; unknown fields are stored in its ``extra``."""
        members = self.read(form)
        if len(members) + 1 < len(form):
            rest = {k: v for k, v in form.items() if k not in self.readers and k != tag}
            members["extra"] = _read_map(rest)
        try:
            return self.make(**members)
        except InvalidTurn as error:
            raise InvalidJSON("", str(error)) from None

    def dump(self, value: object) -> JsonObject:
        """Return the fields that are not at their default, and those of ``extra``."""
        form: JsonObject = {}
        for name, write in self.writers.items():
            member = getattr(value, name)
            if member != self.defaults[name]:
                form[name] = write(member)
        extra: FrozenMap = getattr(value, "extra")  # noqa: B009
        return {**form, **thaw(extra)} if extra else form


_FIELD_CODECS: dict[str, tuple[Callable[[object], Any], Callable[[Any], Any]]] = {
    "text": (_read_text, _pass_through),
    "name": (_read_id, _pass_through),
    "texts": (_read_texts, list),
    "map": (_read_map, thaw),
    "flag": (_read_bool, _pass_through),
    "role": (_read_role, _pass_through),
    "parts": (_read_parts, _dump_parts),
    "spoken": (_read_assistant_parts, _dump_parts),
}
"""The kinds of fields, each with its parser and its encoder."""


def _build_codec(cls: type[Any], **members: str) -> ObjectCodec:
    defaults = {each.name: each.default for each in fields(cls)}
    codecs = {name: _FIELD_CODECS[codec] for name, codec in members.items()}
    return ObjectCodec(
        cls,
        frozenset(name for name in members if defaults[name] is MISSING),
        {name: defaults[name] for name in members},
        {name: read for name, (read, _) in codecs.items()},
        {name: write for name, (_, write) in codecs.items()},
    )


_IDENTITY_FIELDS = {"id": "name", "metadata": "map", "origin": "text"}
_UNKNOWN_CODEC = _build_codec(UnknownBlock, **_IDENTITY_FIELDS)

BLOCK_CODECS: dict[str, ObjectCodec] = {
    "user": _build_codec(UserBlock, **_IDENTITY_FIELDS, parts="parts"),
    "assistant": _build_codec(AssistantBlock, **_IDENTITY_FIELDS, parts="spoken"),
    "system": _build_codec(SystemBlock, **_IDENTITY_FIELDS, text="text", role="role"),
    "tool_call": _build_codec(
        ToolCallBlock,
        **_IDENTITY_FIELDS,
        call_id="name",
        name="text",
        arguments="text",
        custom="flag",
    ),
    "tool_result": _build_codec(
        ToolResultBlock, **_IDENTITY_FIELDS, call_id="name", parts="parts", custom="flag"
    ),
    "reasoning": _build_codec(
        ReasoningBlock, **_IDENTITY_FIELDS, summary="texts", texts="texts", encrypted_content="text"
    ),
    "opaque": _build_codec(OpaqueBlock, **_IDENTITY_FIELDS, item="map"),
}
"""The codec of each kind of block."""

PART_CODECS: dict[str, ObjectCodec] = {
    "text": _build_codec(TextPart, text="text"),
    "refusal": _build_codec(RefusalPart, text="text"),
    "image": _build_codec(ImagePart, url="text", detail="text", file_id="text"),
    "file": _build_codec(FilePart, url="text", data="text", file_id="text", filename="text"),
    "opaque": _build_codec(OpaquePart, content="map"),
}
"""The codec of each type of part."""
_PART_TYPE_NAMES: dict[type[Any], str] = {
    cast("type", part.make): name for name, part in PART_CODECS.items()
}
