"""Hash and preview stored blocks, and read them with errors that name the damaged one.

The text of a block is the output of `kedge.turns.json_codec`. The hash covers the complete text with ids and
metadata, so blocks with any difference are stored separately.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from kedge.errors import KedgeError, StoreDamaged
from kedge.text.json_text import decode
from kedge.turns import AssistantBlock, Block, UserBlock
from kedge.turns.json_codec import VERSION, parse_block

Json = dict[str, Any]

_TAG = f"kedge.block/{VERSION}\n".encode()
_sha256 = hashlib.sha256
_BLOCK_ID = re.compile(r'"id":"blk_([0-9a-f]{16})')
_NO_TIMESTAMP = bytes(8)
_DECODE_ERRORS = (ValueError, TypeError, KedgeError)


def hash_block(body: str) -> bytes:
    """Return the hash of an encoded block, prefixed with the time in its id.

    Because of the prefix, blocks that were created together are close to each other in the index.
    """
    match = _BLOCK_ID.search(body)
    timestamp = bytes.fromhex(match[1]) if match else _NO_TIMESTAMP
    return timestamp + _sha256(_TAG + body.encode()).digest()


def decode_blocks(bodies: Sequence[str]) -> list[Block]:
    """Decode blocks; raise `StoreDamaged` for one that cannot be decoded."""
    try:
        return [parse_block(body) for body in bodies]
    except _DECODE_ERRORS as error:
        index = next(index for index, body in enumerate(bodies) if not _is_readable(body))
        problem = f"block {index} cannot be read ({type(error).__name__})"
        raise StoreDamaged(f"{problem}; verify() reports all damage") from None


def _is_readable(body: str) -> bool:
    try:
        parse_block(body)
    except _DECODE_ERRORS:
        return False
    return True


def extract_search_text(body: str) -> str:
    """Return the searchable text of an encoded block: text, tool names and arguments, results."""
    form = cast("Json", decode(body))
    parts: Iterable[Any] = (part.get("text") for part in form.get("parts", ()))
    further = (form.get(name) for name in ("text", "name", "arguments"))
    return "\n".join(text for text in (*parts, *further) if isinstance(text, str) and text)


PREVIEW_CHARS = 4000
"""The number of characters of a block that are read for a preview: a block with attachments may be large."""


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
