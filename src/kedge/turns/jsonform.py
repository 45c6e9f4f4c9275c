"""The JSON form of a Turn: versioned, lossless, and a contract (docs/json-form.md).

Reading is strict about what it knows and generous about what it does not: members and kinds from a
newer Kedge are kept and written back; anything malformed is an ``InvalidJSON`` that names the path of
the offending member. There is never half a Turn.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn, cast

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
from kedge.turns.frozen import FrozenMap, freeze, thaw
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart
from kedge.turns.turn import Turn

VERSION = 1
FORMAT = "kedge.turn"

Json = dict[str, Any]

# Every kind, with its members: name -> how to read it. The same table writes.
_IDENTITY = {"id": "text", "metadata": "map", "origin": "text"}
_BLOCKS: dict[str, tuple[type[Block], dict[str, str]]] = {
    "user": (UserBlock, {"parts": "parts"}),
    "assistant": (AssistantBlock, {"parts": "spoken"}),
    "system": (SystemBlock, {"text": "text", "role": "role?"}),
    "tool_call": (
        ToolCallBlock,
        {"name": "text", "arguments": "text", "call_id": "text", "custom": "flag?"},
    ),
    "tool_result": (ToolResultBlock, {"call_id": "text", "parts": "parts", "custom": "flag?"}),
    "reasoning": (
        ReasoningBlock,
        {"summary": "texts?", "texts": "texts?", "encrypted_content": "text?"},
    ),
    "opaque": (OpaqueBlock, {"item": "map"}),
}
_PARTS: dict[str, tuple[type[Any], dict[str, str]]] = {
    "text": (TextPart, {"text": "text"}),
    "refusal": (RefusalPart, {"text": "text"}),
    "image": (ImagePart, {"url": "text?", "detail": "text?", "file_id": "text?"}),
    "file": (
        FilePart,
        {"url": "text?", "data": "text?", "file_id": "text?", "filename": "text?"},
    ),
}
_PART_TYPES: dict[type[Any], str] = {cls: name for name, (cls, _) in _PARTS.items()}
_DEFAULTS: dict[type[Any], dict[str, object]] = {
    cls: {each.name: each.default for each in fields(cls)}
    for cls, _ in (*_BLOCKS.values(), *_PARTS.values())
}


def dumps(turn: Turn) -> str:
    """Write a Turn as JSON text."""
    return json.dumps(dump(turn), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
    form = _object(value, "$")
    if form.get("format") != FORMAT:
        raise InvalidJSON("$.format", f"expected {FORMAT!r}")
    version = form.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidJSON("$.version", "expected a positive integer")
    if version > VERSION:
        raise InvalidJSON(
            "$.version", f"written by a newer Kedge (version {version}, this one reads {VERSION})"
        )
    blocks = form.get("blocks")
    if not isinstance(blocks, list):
        raise InvalidJSON("$.blocks", f"expected an array, got {_named(blocks)}")
    known = {"format", "version", "id", "data", "blocks"}
    listed = cast("list[object]", blocks)
    loaded = [load_block(block, f"$.blocks[{i}]") for i, block in enumerate(listed)]
    _check_ids(loaded)
    return Turn(
        loaded,
        id=_text(form.get("id", ""), "$.id"),
        data=_map(form.get("data", {}), "$.data"),
        extra=_map({k: v for k, v in form.items() if k not in known}, "$"),
    )


def dump_block(block: Block) -> Json:
    """Write one block as plain JSON values; members at their default are left out."""
    identity = {"id": block.id, **_identity_members(block)}
    if isinstance(block, UnknownBlock):
        return {**thaw(block.form), **identity}
    members = _BLOCKS[block.kind][1]
    written = {
        name: _dump_member(getattr(block, name), reader)
        for name, reader in members.items()
        if getattr(block, name) != _DEFAULTS[type(block)].get(name, ...)
    }
    known = {"kind": block.kind, **identity, **written}
    return {**known, **thaw(block.extra), **known}


def load_block(value: object, path: str = "$") -> Block:
    """Read one block from plain JSON values."""
    form = _object(value, path)
    kind = _text(form.get("kind"), f"{path}.kind")
    identity = {
        name: _READERS[reader](form[name], f"{path}.{name}")
        for name, reader in _IDENTITY.items()
        if name in form
    }
    if kind not in _BLOCKS:
        rest = {name: member for name, member in form.items() if name not in _IDENTITY}
        return UnknownBlock(_map(rest, path), **identity)
    cls, members = _BLOCKS[kind]
    read = _load_members(form, members, path)
    rest = {k: v for k, v in form.items() if k not in members and k not in (*_IDENTITY, "kind")}
    return _built(cls, path, **read, **identity, extra=_map(rest, path))


def parse(text: str | bytes) -> object:
    """Parse JSON text strictly: no NaN, no infinities, no numbers too large to hold exactly."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_float)
    except RecursionError:
        raise InvalidJSON("$", "nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InvalidJSON("$", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidJSON("$", f"not JSON: {error.msg} at character {error.pos}") from None
    except InvalidTurn:
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise InvalidJSON("$", "a number has too many digits") from None


def _identity_members(block: Block) -> Json:
    members: Json = {}
    if block.origin != "user":
        members["origin"] = block.origin
    if block.metadata:
        members["metadata"] = thaw(block.metadata)
    return members


def _load_members(form: Mapping[str, object], members: dict[str, str], path: str) -> Json:
    read: Json = {}
    for name, reader in members.items():
        if name in form:
            read[name] = _READERS[reader.rstrip("?")](form[name], f"{path}.{name}")
        elif not reader.endswith("?"):
            raise InvalidJSON(f"{path}.{name}", "missing")
    return read


def _dump_member(value: Any, reader: str) -> Any:
    if reader in ("parts", "spoken"):
        return [_dump_part(part) for part in value]
    return thaw(value)


def _dump_part(part: Part) -> Json:
    if isinstance(part, OpaquePart):
        return thaw(part.content)
    name = _PART_TYPES[type(part)]
    members = _PARTS[name][1]
    written = {
        member: getattr(part, member)
        for member in members
        if getattr(part, member) != _DEFAULTS[type(part)].get(member, ...)
    }
    known = {"type": name, **written}
    return {**known, **thaw(part.extra), **known}


def _load_part(value: object, path: str) -> Part:
    form = _object(value, path)
    name = _text(form.get("type"), f"{path}.type")
    if name not in _PARTS:
        return OpaquePart(_map(form, path))
    cls, members = _PARTS[name]
    read = _load_members(form, members, path)
    rest = {k: v for k, v in form.items() if k not in members and k != "type"}
    return _built(cls, path, **read, extra=_map(rest, path))


def _built(cls: type[Any], path: str, **members: Any) -> Any:
    try:
        return cls(**members)
    except InvalidJSON:
        raise
    except InvalidTurn as error:
        raise InvalidJSON(path, str(error)) from None


def _check_ids(blocks: list[Block]) -> None:
    seen: dict[str, int] = {}
    for index, block in enumerate(blocks):
        first = seen.setdefault(block.id, index)
        if first != index:
            raise InvalidJSON(f"$.blocks[{index}].id", f"the same id as $.blocks[{first}]")


def _object(value: object, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidJSON(path, f"expected an object, got {_named(value)}")
    return cast("dict[str, object]", value)


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidJSON(path, f"expected a string, got {_named(value)}")
    return freeze(value, path)


def _map(value: object, path: str) -> FrozenMap:
    return freeze(_object(value, path), path)


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidJSON(path, f"expected true or false, got {_named(value)}")
    return value


def _role(value: object, path: str) -> str:
    if value not in ("system", "developer"):
        raise InvalidJSON(path, "expected 'system' or 'developer'")
    return cast("str", value)


def _array(value: object, path: str, read: Callable[[object, str], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidJSON(path, f"expected an array, got {_named(value)}")
    members = cast("list[object]", value)
    return tuple(read(member, f"{path}[{index}]") for index, member in enumerate(members))


def _texts(value: object, path: str) -> tuple[str, ...]:
    return _array(value, path, _text)


def _parts(value: object, path: str) -> tuple[Part, ...]:
    return _array(value, path, _load_part)


def _spoken(value: object, path: str) -> tuple[Part, ...]:
    parts = _parts(value, path)
    for index, part in enumerate(parts):
        if isinstance(part, ImagePart | FilePart):
            raise InvalidJSON(f"{path}[{index}].type", "an assistant holds text and refusals")
    return parts


_READERS: dict[str, Callable[[object, str], Any]] = {
    "text": _text,
    "texts": _texts,
    "map": _map,
    "flag": _flag,
    "role": _role,
    "parts": _parts,
    "spoken": _spoken,
}


def _named(value: object) -> str:
    names: dict[type[object], str] = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJSON("$", f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InvalidJSON("$", f"the number {text[:24]} is too large to hold")
    return value
