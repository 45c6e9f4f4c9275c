"""Encode, hash and preview stored blocks, and read them with errors that name the damaged one.

The text of a block is the output of `kedge.turns.json_codec`. The hash covers the complete text with ids and
metadata, so blocks with any difference are stored separately. Blocks with one id, which edits make, are found by the
hash of this id: an id may be longer than a database indexes, and have characters that PostgreSQL rejects.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from kedge._internal.json_text import decode
from kedge.errors import KedgeError, StoreDamaged
from kedge.turns import AssistantBlock, Block, UserBlock
from kedge.turns.json_codec import VERSION, encode_block, parse_block

Json = dict[str, Any]

_TAG = f"kedge.block/{VERSION}\n".encode()
_sha256 = hashlib.sha256
_BLOCK_ID = re.compile(r"blk_([0-9a-f]{16})")
_NO_TIMESTAMP = bytes(8)
_ID_HASH_BYTES = 8


class StoredBlock(NamedTuple):
    """A block in its stored form."""

    id: str
    id_hash: bytes
    hash: bytes
    body: str


def to_stored_block(block: Block) -> StoredBlock:
    """Encode a block."""
    body = encode_block(block)
    return StoredBlock(block.id, hash_block_id(block.id), hash_block(block.id, body), body)


def hash_block(block_id: str, body: str) -> bytes:
    """Return the hash of an encoded block, prefixed with the time in its id.

    Because of the prefix, blocks that were created together are close to each other in the index.
    """
    return _read_timestamp(block_id) + _sha256(_TAG + body.encode()).digest()


def hash_block_id(block_id: str) -> bytes:
    """Return the value of a block's id in the index of ids, with the same prefix; other ids may have the same."""
    return _read_timestamp(block_id) + _sha256(block_id.encode()).digest()[:_ID_HASH_BYTES]


def _read_timestamp(block_id: str) -> bytes:
    match = _BLOCK_ID.match(block_id)
    return bytes.fromhex(match[1]) if match else _NO_TIMESTAMP


def decode_blocks(bodies: Sequence[str]) -> list[Block]:
    """Decode blocks; raise `StoreDamaged` for one that cannot be decoded."""
    blocks: list[Block] = []
    try:
        blocks.extend(map(parse_block, bodies))
    except (ValueError, TypeError, KedgeError) as error:
        problem = f"block {len(blocks)} cannot be read ({type(error).__name__})"
        raise StoreDamaged(f"{problem}; verify() reports all damage") from None
    return blocks


def extract_search_text(body: str) -> str:
    """Return the searchable text of an encoded block: text, tool names and arguments, results."""
    form = cast("Json", decode(body))
    texts: list[Any] = [part.get("text") for part in form.get("parts", ())]
    texts += [form.get(name) for name in ("text", "name", "arguments")]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


PREVIEW_CHARS = 4000
"""The number of characters of a block that are read for a preview: a block with attachments may be large."""


def _shorten(text: str) -> str:
    return " ".join(text[:400].split())[:200]


_FIRST_TEXT = re.compile(r'"type":"text","text":"((?:[^"\\]|\\.)*)')


def preview_body(body: str, *kinds: type[Block]) -> str | None:
    """Return the beginning of the text of a block of one of these kinds, on one line.

    Only the beginning of the stored form of a long block was read.
    """
    if not any(body.startswith(f'{{"kind":"{kind.kind}"') for kind in kinds):
        return None
    if len(body) < PREVIEW_CHARS:
        (block,) = decode_blocks([body])
        if not isinstance(block, UserBlock | AssistantBlock):
            return ""
        return _shorten(block.text)
    text = _FIRST_TEXT.search(body)
    if text is None:
        return ""
    without_half_escape = re.sub(r"\\u.{0,3}$", "", text[1])
    return _shorten(json.loads(f'"{without_half_escape}"'))
