"""Encode, decode, hash and preview stored blocks.

The text of a block is exactly what `dump_block` returns, as compact JSON; common kinds have a fast path
in both directions. The hash covers the complete text with ids and metadata, so blocks that differ in
anything are stored separately.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from kedge.errors import KedgeError, StoreDamaged
from kedge.json_codec import decode, quote
from kedge.json_codec import encode_text as encode
from kedge.turns import (
    AssistantBlock,
    Block,
    FrozenMap,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UserBlock,
    dump_block,
    load_block,
)
from kedge.turns.blocks import unchecked_message
from kedge.turns.frozen_json import EMPTY, thaw, unchecked_map
from kedge.turns.json_codec import VERSION

Json = dict[str, Any]

_TAG = f"kedge.block/{VERSION}\n".encode()
_sha256 = hashlib.sha256
_BLOCK_ID = re.compile(r'"id":"blk_([0-9a-f]{16})')
_NO_TIMESTAMP = bytes(8)
_MAX_PLAIN_INT = 1 << 62
_COMMON_ORIGINS = ("user", "engine")


def encode_block(block: Block) -> str:
    """Return the JSON form of a block, as text."""
    write = None if block.extra else _ENCODERS.get(type(block))
    content = write(block) if write else None
    if content is None:
        return encode(dump_block(block))
    metadata = "" if block.metadata is EMPTY else _encode_metadata(block.metadata)
    origin = "" if block.origin == "user" else f',"origin":{quote(block.origin)}'
    return f'{{"kind":"{block.kind}","id":{quote(block.id)}{metadata}{origin}{content}}}'


def hash_block(body: str) -> bytes:
    """Return the hash of an encoded block, prefixed with the time in its id.

    The prefix keeps blocks that were created together close to each other in the index.
    """
    made = _BLOCK_ID.search(body)
    when = bytes.fromhex(made[1]) if made else _NO_TIMESTAMP
    return when + _sha256(_TAG + body.encode()).digest()


def decode_blocks(bodies: Sequence[str]) -> list[Block]:
    """Decode blocks; raise `StoreDamaged` for one that cannot be decoded."""
    try:
        forms: list[Json] = decode(f"[{','.join(bodies)}]")
        if len(forms) == len(bodies):
            return [_decode_block(form) for form in forms]
    except (ValueError, TypeError, KedgeError):
        pass
    return [_decode_single(place, body) for place, body in enumerate(bodies)]


def _decode_single(index: int, body: str) -> Block:
    try:
        return _decode_block(decode(body))
    except (ValueError, TypeError, KedgeError) as error:
        problem = f"block {index} cannot be read ({type(error).__name__})"
        raise StoreDamaged(f"{problem}; verify() reports all damage") from None


def _encode_metadata(metadata: FrozenMap) -> str:
    """Return the encoded metadata, if any; texts and integers have a fast path."""
    if not metadata:
        return ""
    members: list[str] = []
    for name, value in metadata.items():
        if type(value) is str:
            members.append(f"{quote(name)}:{quote(value)}")
        elif type(value) is int:
            members.append(f"{quote(name)}:{value}")
        else:
            return f',"metadata":{encode(thaw(metadata))}'
    return f',"metadata":{{{",".join(members)}}}'


def _encode_text(block: UserBlock | AssistantBlock | ToolResultBlock) -> str | None:
    """Encode content that is a single plain text."""
    parts = block.parts
    if len(parts) == 1 and type(part := parts[0]) is TextPart and not part.extra:
        return f',"parts":[{{"type":"text","text":{quote(part.text)}}}]'
    return None


def _encode_result(block: ToolResultBlock) -> str | None:
    text = None if block.custom else _encode_text(block)
    return None if text is None else f',"call_id":{quote(block.call_id)}{text}'


def _encode_call(block: ToolCallBlock) -> str | None:
    if block.custom:
        return None
    call = f',"call_id":{quote(block.call_id)},"name":{quote(block.name)}'
    return f'{call},"arguments":{quote(block.arguments)}'


_ENCODERS: dict[type[Block], Callable[[Any], str | None]] = {
    UserBlock: _encode_text,
    AssistantBlock: _encode_text,
    ToolResultBlock: _encode_result,
    ToolCallBlock: _encode_call,
}


def _decode_block(form: Json) -> Block:
    """Decode a block; those with common members only take the fast path."""
    kind, size = form["kind"], len(form)
    noted, origin = EMPTY, "user"
    if "metadata" in form:
        size -= 1
        noted = _decode_metadata(form["metadata"])
    if "origin" in form:
        size -= 1
        origin = form["origin"]
    try:
        if size == 3 and kind in _TEXT_BLOCKS:
            parts = form["parts"]
            name = form["id"]
            if len(parts) == 1 and len(part := parts[0]) == 2 and part["type"] == "text":
                text = part["text"]
                # Other characters than ASCII are checked by the constructor.
                if name and name.isascii() and text.isascii() and origin in _COMMON_ORIGINS:
                    return unchecked_message(kind, name, text, noted, origin)
            return _TEXT_BLOCKS[kind](_decode_text(form), id=name, metadata=noted, origin=origin)
        if size == 4 and kind == "tool_result":
            return ToolResultBlock(
                form["call_id"], _decode_text(form), id=form["id"], metadata=noted, origin=origin
            )
        if size == 5 and kind == "tool_call":
            return ToolCallBlock(
                form["name"],
                form["arguments"],
                form["call_id"],
                id=form["id"],
                metadata=noted,
                origin=origin,
            )
    except (KeyError, ValueError, AttributeError):
        pass  # other members, or other parts, than the common ones
    return load_block(form)


_TEXT_BLOCKS: dict[str, type[UserBlock | AssistantBlock]] = {
    "user": UserBlock,
    "assistant": AssistantBlock,
}


def _decode_text(form: Json) -> tuple[TextPart]:
    (part,) = form["parts"]
    if len(part) != 2 or part["type"] != "text":
        raise ValueError
    return (TextPart(part["text"]),)


def _decode_metadata(members: Json) -> FrozenMap:
    for value in members.values():
        if type(value) is str:
            if not value.isascii():
                return FrozenMap(members)
        elif type(value) is not int or not -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT:
            return FrozenMap(members)
    return unchecked_map(members) if all(map(str.isascii, members)) else FrozenMap(members)


def extract_text(body: str) -> str:
    """Return the searchable text of an encoded block: text, tool names and arguments, results."""
    form = cast("Json", decode(body))
    parts: Iterable[Any] = (part.get("text") for part in form.get("parts", ()))
    further = (form.get(name) for name in ("text", "name", "arguments"))
    return "\n".join(text for text in (*parts, *further) if isinstance(text, str) and text)


PREVIEW_CHARS = 4000
"""How much of a block is read for a preview: a block with attachments may be large."""


def _preview_text(block: Block) -> str:
    """Return the beginning of a block's text, on one line."""
    return _shorten(block.text if isinstance(block, UserBlock | AssistantBlock) else "")


def _shorten(text: str) -> str:
    return " ".join(text[:400].split())[:200]


_FIRST_TEXT = re.compile(r'"type":"text","text":"((?:[^"\\]|\\.)*)')


def preview_bodies(bodies: Sequence[str], kinds: tuple[type[Block], ...]) -> list[str | None]:
    """Return the preview of each block of these kinds, from the beginning of its stored form."""
    complete = [body for body in bodies if len(body) < PREVIEW_CHARS]
    blocks = iter(decode_blocks(complete))
    found: list[str | None] = []
    for body in bodies:
        if len(body) < PREVIEW_CHARS:
            block = next(blocks)
            found.append(_preview_text(block) if isinstance(block, kinds) else None)
        else:
            found.append(_preview_start(body, {kind.kind for kind in kinds}))
    return found


def _preview_start(body: str, kinds: set[str]) -> str | None:
    """Return the preview of a block of which only the beginning was read."""
    if not any(body.startswith(f'{{"kind":"{kind}"') for kind in kinds):
        return None
    text = _FIRST_TEXT.search(body)
    shown = re.sub(r"\\u.{0,3}$", "", text[1]) if text else ""
    return _shorten(json.loads(f'"{shown}"'))
