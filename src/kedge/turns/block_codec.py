"""Encode and parse blocks as JSON: the codec of Turn JSON, the store and chat states.

`dump_block` and `load_block` are general: a table of codecs serves both directions, strict about known fields and
lossless about unknown ones. Most blocks are a text, a tool call or a tool result without further members, and every
block is encoded and parsed again by each save and each call of a `Chat`. Those have a direct path with the same
result: `encode_block`, `parse_blocks` and `decode_block`, or `decode_common` for a form with other member names.
A block that is not common in every respect uses the general path, which also reports its problems.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypeVar, cast

import msgspec

from kedge.errors import InvalidJSON, InvalidTurn
from kedge.text.json_text import decode, encode, encode_text
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
    unchecked_message,
)
from kedge.turns.frozen_json import EMPTY, FrozenMap, InvalidValue, freeze, thaw, unchecked_map
from kedge.turns.immutable import build_instances
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart

JsonObject = dict[str, Any]
T = TypeVar("T")

_MAX_PLAIN_INT = 1 << 62
_COMMON_ORIGINS = ("user", "engine")
_TEXT_BLOCKS: dict[str, type[UserBlock | AssistantBlock]] = {
    "user": UserBlock,
    "assistant": AssistantBlock,
}


def decode_block(value: object) -> Block:
    """Parse a block from plain JSON values.

    Raises:
        InvalidJSON: If the value is malformed; its path is relative to the block.
    """
    form = read_object(value)
    try:
        size, metadata, origin = len(form), EMPTY, "user"
        if "metadata" in form:
            size, metadata = size - 1, _decode_metadata(form["metadata"])
        if "origin" in form:
            size, origin = size - 1, form["origin"]
        block = decode_common(form, size, _find_text(form), metadata, origin)
    except (KeyError, ValueError, TypeError):
        block = None  # other members, or other values, than the common ones
    return _decode_any(form) if block is None else block


# Most of the time to save or load a long conversation is spent here. msgspec encodes and decodes the common forms as
# structures, and decoding checks the same as the constructors of blocks: the names and types of members, and that
# texts are valid Unicode. So these blocks are built without checking again, and without a dictionary for each. Other
# forms (other kinds, other parts, further members) are left to the general functions.


_Id = Annotated[str, msgspec.Meta(min_length=1)]


class _Text(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, gc=False):
    text: str


class _Form(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True, gc=False, kw_only=True):
    id: _Id
    metadata: (
        dict[str, str | Annotated[int, msgspec.Meta(gt=-_MAX_PLAIN_INT, lt=_MAX_PLAIN_INT)]]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    origin: str | msgspec.UnsetType = msgspec.UNSET


class _User(_Form, tag="user", kw_only=True):
    parts: tuple[_Text]


class _Assistant(_Form, tag="assistant", kw_only=True):
    parts: tuple[_Text]


class _Call(_Form, tag="tool_call", kw_only=True):
    call_id: _Id
    name: str
    arguments: str


class _Result(_Form, tag="tool_result", kw_only=True):
    call_id: _Id
    parts: tuple[_Text]


_decode_form = msgspec.json.Decoder(_User | _Assistant | _Call | _Result).decode
_encode_form = msgspec.json.Encoder().encode


def encode_block(block: Block) -> str:
    """Return the JSON form of a block, as compact text."""
    try:
        form = _build_form(block)
        if form is not None:
            return _encode_form(form).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or a subclass of a string
        pass
    return encode_text(dump_block(block))


def _build_form(block: Block) -> _Form | None:
    """Return the form of a common block, or None for any other block."""
    if block.extra is not EMPTY:
        return None
    kind = type(block)
    metadata = msgspec.UNSET if block.metadata is EMPTY else _build_metadata(block.metadata)
    origin = msgspec.UNSET if block.origin == "user" else block.origin
    if kind is ToolCallBlock:
        call = cast("ToolCallBlock", block)
        if call.custom:
            return None
        return _Call(
            id=call.id,
            metadata=metadata,
            origin=origin,
            call_id=call.call_id,
            name=call.name,
            arguments=call.arguments,
        )
    if kind not in (UserBlock, AssistantBlock, ToolResultBlock):
        return None
    parts = cast("UserBlock", block).parts
    if len(parts) != 1 or type(part := parts[0]) is not TextPart or part.extra is not EMPTY:
        return None
    content = (_Text(part.text),)
    if kind is UserBlock:
        return _User(id=block.id, metadata=metadata, origin=origin, parts=content)
    if kind is AssistantBlock:
        return _Assistant(id=block.id, metadata=metadata, origin=origin, parts=content)
    result = cast("ToolResultBlock", block)
    if result.custom:
        return None
    return _Result(
        id=block.id, metadata=metadata, origin=origin, call_id=result.call_id, parts=content
    )


def _build_metadata(metadata: FrozenMap) -> Any:
    """Return metadata as a value for `_encode_form`; only texts and integers are encoded there."""
    for value in metadata.values():
        if type(value) is not str and type(value) is not int:
            return msgspec.Raw(encode(thaw(metadata)))
    return dict(metadata.items()) or msgspec.UNSET


def parse_blocks(texts: Sequence[str]) -> list[Block]:
    """Parse blocks from JSON texts, with the same result as `decode_block` of each value.

    Raises:
        ValueError: If one is not JSON.
        InvalidJSON: If a value is malformed.
    """
    forms: list[Any] = []
    remaining = iter(texts)
    while len(forms) < len(texts):
        try:
            deque(map(forms.append, map(_decode_form, remaining)), maxlen=0)
        except (ValueError, RecursionError):
            forms.append(None)  # not a common form
    built: dict[type, Iterator[Block]] = {
        kind: iter(_build_blocks(kind, [form for form in forms if type(form) is kind]))
        for kind in set(map(type, forms)) - {NoneType}
    }
    return [
        decode_block(decode(text)) if form is None else next(built[type(form)])
        for form, text in zip(forms, texts, strict=True)
    ]


def _build_blocks(kind: type[_Form], forms: Sequence[Any]) -> Sequence[Block]:
    """Return the blocks of forms of one kind, which were checked when they were decoded."""
    unset = msgspec.UNSET
    columns: dict[str, Iterable[object]] = {
        "id": [form.id for form in forms],
        "metadata": _build_maps([form.metadata for form in forms]),
        "origin": ["user" if form.origin is unset else form.origin for form in forms],
        "extra": repeat(EMPTY),
        "_digest": repeat(None),
    }
    if kind is _Call:
        names = ("call_id", "name", "arguments")
        columns |= {name: list(map(attrgetter(name), forms)) for name in names}
        return build_instances(ToolCallBlock, len(forms), custom=repeat(False), **columns)
    contents = [form.parts[0].text for form in forms]
    parts = build_instances(TextPart, len(forms), text=contents, extra=repeat(EMPTY))
    columns["parts"] = zip(parts, strict=True)
    if kind is _Result:
        columns |= {"call_id": [form.call_id for form in forms], "custom": repeat(False)}
        return build_instances(ToolResultBlock, len(forms), **columns)
    return build_instances(UserBlock if kind is _User else AssistantBlock, len(forms), **columns)


def _build_maps(values: Sequence[Any]) -> Iterable[FrozenMap]:
    """Return the maps of metadata that was checked when it was decoded."""
    members = [value for value in values if value is not msgspec.UNSET]
    maps = iter(
        build_instances(
            FrozenMap, len(members), _members=map(MappingProxyType, members), _depth=repeat(None)
        )
    )
    return [EMPTY if value is msgspec.UNSET else next(maps) for value in values]


def decode_common(
    form: JsonObject, size: int, text: str | None, metadata: FrozenMap, origin: str
) -> Block | None:
    """Return the block of a form with common members only, or None for any other form.

    Args:
        form: The members of the block.
        size: The number of these members, without metadata and origin.
        text: The content, if it is one plain text.
        metadata: The metadata of the block.
        origin: Its origin.

    Raises:
        KeyError: A member is missing.
        InvalidTurn: A member has an invalid value.
    """
    kind, block_id = form["kind"], form["id"]
    if not block_id:
        return None
    if size == 5 and kind == "tool_call":
        return ToolCallBlock(
            form["name"],
            form["arguments"],
            form["call_id"],
            id=block_id,
            metadata=metadata,
            origin=origin,
        )
    if type(text) is not str:
        return None
    if size == 3 and kind in _TEXT_BLOCKS:
        # The constructor checks characters that are not ASCII.
        is_plain = type(block_id) is str and block_id.isascii() and text.isascii()
        if is_plain and origin in _COMMON_ORIGINS:
            return unchecked_message(kind, block_id, text, metadata, origin)
        content = (TextPart(text),)
        return _TEXT_BLOCKS[kind](content, id=block_id, metadata=metadata, origin=origin)
    if size == 4 and kind == "tool_result":
        content = (TextPart(text),)
        return ToolResultBlock(
            form["call_id"], content, id=block_id, metadata=metadata, origin=origin
        )
    return None


def _find_text(form: JsonObject) -> str | None:
    """Return the content of a form, if it is one plain text."""
    parts = cast("list[JsonObject]", form.get("parts"))
    if type(parts) is not list or len(parts) != 1:
        return None
    part = parts[0]
    if type(part) is not dict or len(part) != 2 or part["type"] != "text":
        return None
    return part["text"]


def _decode_metadata(members: JsonObject) -> FrozenMap:
    if type(members) is not dict:
        raise TypeError
    for value in members.values():
        if type(value) is str:
            if not value.isascii():
                return FrozenMap(members)
        elif type(value) is not int or not -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT:
            return FrozenMap(members)
    return unchecked_map(dict(members)) if all(map(str.isascii, members)) else FrozenMap(members)


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


def _decode_any(form: JsonObject) -> Block:
    kind = _read_tag(form, "kind")
    if kind in BLOCK_CODECS:
        return BLOCK_CODECS[kind].load(form, "kind")
    rest = {name: member for name, member in form.items() if name not in _IDENTITY_FIELDS}
    return UnknownBlock(read_map(rest), **_UNKNOWN_CODEC.read(form))


def _dump_part(part: Part) -> JsonObject:
    if isinstance(part, OpaquePart) and _is_unambiguous(part):
        return thaw(part.content)
    return {
        "type": _PART_TYPE_NAMES[type(part)],
        **PART_CODECS[_PART_TYPE_NAMES[type(part)]].dump(part),
    }


def _load_part(value: object) -> Part:
    form = read_object(value)
    kind = _read_tag(form, "type")
    return (
        PART_CODECS[kind].load(form, "type") if kind in PART_CODECS else OpaquePart(read_map(form))
    )


def _is_unambiguous(part: OpaquePart) -> bool:
    """Return whether the content of this part cannot be confused with a known part."""
    kind = part.content.get("type")
    return isinstance(kind, str) and kind not in PART_CODECS and not part.extra


# Readers. Each raises an error with a relative path, to which its caller adds a step.


def read_at(step: str, read: Callable[..., T], *values: Any) -> T:
    """Call a reader, and add this step at the start of the path of its errors."""
    try:
        return read(*values)
    except InvalidJSON as error:
        raise error.prefix_path(step) from None


def _type_mismatch(value: object, expected: str) -> InvalidJSON:
    if isinstance(value, InvalidValue):
        return InvalidJSON(value.step, value.problem)
    kind = _JSON_TYPE_NAMES.get(type(value), type(value).__name__)
    return InvalidJSON("", f"expected {expected}, got {kind}")


def read_object(value: object) -> JsonObject:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise _type_mismatch(value, "an object")
    return cast("JsonObject", value)


def _read_tag(form: Mapping[str, object], name: str) -> str:
    if name not in form:
        raise InvalidJSON(f".{name}", "missing")
    return read_at(f".{name}", _read_text, form[name])


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise _type_mismatch(value, "a string")
    return value if value.isascii() else freeze(value, "")


def read_id(value: object) -> str:
    """Return a string that is not empty."""
    if not value and isinstance(value, str):
        raise InvalidJSON("", "expected an id, got an empty string")
    return _read_text(value)


def read_map(value: object) -> FrozenMap:
    """Return a JSON object as an immutable map."""
    return freeze(read_object(value), "")


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise _type_mismatch(value, "true or false")
    return value


def _read_role(value: object) -> str:
    if _read_text(value) not in ("system", "developer"):
        raise InvalidJSON("", "expected 'system' or 'developer'")
    return cast("str", value)


def read_array(value: object, read: Callable[[object], T]) -> tuple[T, ...]:
    """Return the elements of a JSON array, each read by a reader."""
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
    return read_array(value, _read_text)


def _read_parts(value: object) -> tuple[Part, ...]:
    return read_array(value, _load_part)


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
            members["extra"] = read_map(rest)
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
    "name": (read_id, _pass_through),
    "texts": (_read_texts, list),
    "map": (read_map, thaw),
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
