"""The JSON form of a Turn: versioned, lossless, and a contract (docs/json-form.md).

Reading is strict about what it knows and generous about what it does not: members and kinds from a
newer Kedge are kept and written back; anything malformed is an ``InvalidJSON`` that names the path of
the offending member. There is never half a Turn. One table of shapes serves reading and writing.
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
from kedge.turns.frozen import Flaw, FrozenMap, freeze, thaw
from kedge.turns.jsontext import parse
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart
from kedge.turns.turn import MEMBERS, Turn

VERSION = 1
FORMAT = "kedge.turn"

Json = dict[str, Any]
T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(turn: Turn) -> str:
    """Write a Turn as JSON text."""
    return _encode(dump(turn))


def loads(text: str | bytes) -> Turn:
    """Read a Turn from JSON text."""
    return load(parse(text))


def dump(turn: Turn) -> Json:
    """Write a Turn as plain JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": turn.id,
        **({"data": thaw(turn.data)} if turn.data else {}),
        "blocks": [dump_block(block) for block in turn.blocks],
        **thaw(turn.extra),
    }


def load(value: object) -> Turn:
    """Read a Turn from plain JSON values."""
    try:
        return _load_turn(value)
    except InvalidJSON as error:
        raise error.inside("$") from None


def dump_block(block: Block) -> Json:
    """Write one block as plain JSON values; members at their default are left out."""
    if isinstance(block, UnknownBlock):
        return {**thaw(block.form), **_UNKNOWN.dump(block)}
    return {"kind": block.kind, **BLOCKS[block.kind].dump(block)}


def load_block(value: object, path: str = "$") -> Block:
    """Read one block from plain JSON values."""
    try:
        return _load_block(value)
    except InvalidJSON as error:
        raise error.inside(path) from None


def _load_turn(value: object) -> Turn:
    form = _object(value)
    if form.get("format") != FORMAT:
        raise InvalidJSON(".format", f"expected {FORMAT!r}")
    _inside(".version", _check_version, form.get("version"))
    if "blocks" not in form:
        raise InvalidJSON(".blocks", "missing")
    blocks = _inside(".blocks", _array, form["blocks"], _load_block)
    _check_ids(blocks)
    return Turn(
        blocks,
        id=_inside(".id", _name, form["id"]) if "id" in form else "",
        data=_inside(".data", _map, form["data"]) if "data" in form else {},
        extra=_map({name: member for name, member in form.items() if name not in MEMBERS}),
    )


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidJSON("", "expected a positive integer")
    if version > VERSION:
        raise InvalidJSON(
            "", f"written by a newer Kedge (version {version}, this one reads {VERSION})"
        )


def _check_ids(blocks: tuple[Block, ...]) -> None:
    seen: dict[str, int] = {}
    for index, block in enumerate(blocks):
        first = seen.setdefault(block.id, index)
        if first != index:
            raise InvalidJSON(f".blocks[{index}].id", f"the same id as $.blocks[{first}]")


def _load_block(value: object) -> Block:
    form = _object(value)
    kind = _tag(form, "kind")
    if kind in BLOCKS:
        return BLOCKS[kind].load(form, "kind")
    rest = {name: member for name, member in form.items() if name not in _IDENTITY}
    return UnknownBlock(_map(rest), **_UNKNOWN.read(form))


def _dump_part(part: Part) -> Json:
    if isinstance(part, OpaquePart) and _speaks_for_itself(part):
        return thaw(part.content)
    return {"type": _PART_TYPES[type(part)], **PARTS[_PART_TYPES[type(part)]].dump(part)}


def _load_part(value: object) -> Part:
    form = _object(value)
    kind = _tag(form, "type")
    return PARTS[kind].load(form, "type") if kind in PARTS else OpaquePart(_map(form))


def _speaks_for_itself(part: OpaquePart) -> bool:
    """Whether no reader takes the content of this part for one of our own."""
    kind = part.content.get("type")
    return isinstance(kind, str) and kind not in PARTS and not part.extra


# Reading. Each reader raises an error whose path is still relative; who called it adds the step.


def _inside(step: str, read: Callable[..., T], *values: Any) -> T:
    try:
        return read(*values)
    except InvalidJSON as error:
        raise error.inside(step) from None


def _wrong(value: object, expected: str) -> InvalidJSON:
    if isinstance(value, Flaw):
        return InvalidJSON(value.step, value.problem)
    kind = _NAMES.get(type(value), type(value).__name__)
    return InvalidJSON("", f"expected {expected}, got {kind}")


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _wrong(value, "an object")
    return cast("dict[str, object]", value)


def _tag(form: Mapping[str, object], name: str) -> str:
    if name not in form:
        raise InvalidJSON(f".{name}", "missing")
    return _inside(f".{name}", _text, form[name])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "a string")
    return value if value.isascii() else freeze(value, "")


def _name(value: object) -> str:
    if not value and isinstance(value, str):
        raise InvalidJSON("", "expected an id, got an empty string")
    return _text(value)


def _map(value: object) -> FrozenMap:
    return freeze(_object(value), "")


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "true or false")
    return value


def _role(value: object) -> str:
    if _text(value) not in ("system", "developer"):
        raise InvalidJSON("", "expected 'system' or 'developer'")
    return cast("str", value)


def _array(value: object, read: Callable[[object], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise _wrong(value, "an array")
    loaded: list[T] = []
    for index, member in enumerate(cast("list[object]", value)):
        try:
            loaded.append(read(member))
        except InvalidJSON as error:
            raise error.inside(f"[{index}]") from None
    return tuple(loaded)


def _texts(value: object) -> tuple[str, ...]:
    return _array(value, _text)


def _parts(value: object) -> tuple[Part, ...]:
    return _array(value, _load_part)


def _spoken(value: object) -> tuple[Part, ...]:
    parts = _parts(value)
    for index, part in enumerate(parts):
        if isinstance(part, ImagePart | FilePart):
            raise InvalidJSON(f"[{index}].type", "an assistant holds text and refusals")
    return parts


def _as_it_is(value: Any) -> Any:
    return value


def _dump_parts(parts: tuple[Part, ...]) -> list[Json]:
    return [_dump_part(part) for part in parts]


_NAMES: dict[type, str] = {
    NoneType: "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The members of one kind of block or type of part, in both directions."""

    make: Callable[..., Any]
    required: frozenset[str]
    defaults: Mapping[str, object]
    readers: Mapping[str, Callable[[object], Any]]
    writers: Mapping[str, Callable[[Any], Any]]

    def read(self, form: Mapping[str, object]) -> Json:
        """The members of the form, read; a missing one without default is an error."""
        members: Json = {}
        for name, read in self.readers.items():
            if name in form:
                try:
                    members[name] = read(form[name])
                except InvalidJSON as error:
                    raise error.inside(f".{name}") from None
            elif name in self.required:
                raise InvalidJSON(f".{name}", "missing")
        return members

    def load(self, form: Mapping[str, object], tag: str) -> Any:
        """The value; members that nobody knows go into its ``extra``."""
        members = self.read(form)
        if len(members) + 1 < len(form):
            rest = {k: v for k, v in form.items() if k not in self.readers and k != tag}
            members["extra"] = _map(rest)
        try:
            return self.make(**members)
        except InvalidTurn as error:
            raise InvalidJSON("", str(error)) from None

    def dump(self, value: object) -> Json:
        """The members that are not at their default, and what ``extra`` keeps."""
        form: Json = {}
        for name, write in self.writers.items():
            member = getattr(value, name)
            if member != self.defaults[name]:
                form[name] = write(member)
        extra: FrozenMap = getattr(value, "extra")  # noqa: B009
        return {**form, **thaw(extra)} if extra else form


_CODECS: dict[str, tuple[Callable[[object], Any], Callable[[Any], Any]]] = {
    "text": (_text, _as_it_is),
    "name": (_name, _as_it_is),
    "texts": (_texts, list),
    "map": (_map, thaw),
    "flag": (_flag, _as_it_is),
    "role": (_role, _as_it_is),
    "parts": (_parts, _dump_parts),
    "spoken": (_spoken, _dump_parts),
}
"""What a member can hold: how it is read, and how it is written."""


def _shape(cls: type[Any], **members: str) -> Shape:
    defaults = {each.name: each.default for each in fields(cls)}
    codecs = {name: _CODECS[codec] for name, codec in members.items()}
    return Shape(
        cls,
        frozenset(name for name in members if defaults[name] is MISSING),
        {name: defaults[name] for name in members},
        {name: read for name, (read, _) in codecs.items()},
        {name: write for name, (_, write) in codecs.items()},
    )


_IDENTITY = {"id": "name", "metadata": "map", "origin": "text"}
_UNKNOWN = _shape(UnknownBlock, **_IDENTITY)

BLOCKS: dict[str, Shape] = {
    "user": _shape(UserBlock, **_IDENTITY, parts="parts"),
    "assistant": _shape(AssistantBlock, **_IDENTITY, parts="spoken"),
    "system": _shape(SystemBlock, **_IDENTITY, text="text", role="role"),
    "tool_call": _shape(
        ToolCallBlock, **_IDENTITY, call_id="name", name="text", arguments="text", custom="flag"
    ),
    "tool_result": _shape(
        ToolResultBlock, **_IDENTITY, call_id="name", parts="parts", custom="flag"
    ),
    "reasoning": _shape(
        ReasoningBlock, **_IDENTITY, summary="texts", texts="texts", encrypted_content="text"
    ),
    "opaque": _shape(OpaqueBlock, **_IDENTITY, item="map"),
}
"""Every kind of block, with its members."""

PARTS: dict[str, Shape] = {
    "text": _shape(TextPart, text="text"),
    "refusal": _shape(RefusalPart, text="text"),
    "image": _shape(ImagePart, url="text", detail="text", file_id="text"),
    "file": _shape(FilePart, url="text", data="text", file_id="text", filename="text"),
    "opaque": _shape(OpaquePart, content="map"),
}
"""Every type of part, with its members."""
_PART_TYPES: dict[type[Any], str] = {cast("type", part.make): name for name, part in PARTS.items()}
