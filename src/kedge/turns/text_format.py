"""Format blocks and Turns for display, one line per block."""

from collections.abc import Iterable, Sequence

from kedge._internal.display import escape_text, format_size, pluralize
from kedge.turns.blocks import Block, ReasoningBlock
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart

DEFAULT_WIDTH = 72
_SHOWN_MEMBERS = ("text", "filename", "url", "file_id", "data")
"""The members of parts, of which the first that is not empty is shown."""


def describe(block: Block, width: int = DEFAULT_WIDTH) -> str:
    """Return the content of a block in one line of at most ``width`` characters."""
    return shorten(_format_content(block), width)


BLOCK_NAMES = {
    "user": "user message",
    "assistant": "answer",
    "reasoning": "reasoning",
    "tool_call": "tool call",
    "tool_result": "tool result",
    "system": "system prompt",
    "opaque": "other item",
}
"""The names of the kinds of blocks."""
MAX_QUOTED = 60
"""The maximum number of characters of each text in the description of a change."""


def name_block(block: Block) -> str:
    """Return the kind of a block in words and the beginning of its content."""
    return f"{BLOCK_NAMES.get(block.kind, block.kind)} “{describe(block, MAX_QUOTED)}”"


def describe_change(before: Sequence[Block], after: Sequence[Block], removed: int = 0) -> str:
    """Return one line about the first of the changes that made one list of blocks of another.

    Args:
        before: The earlier blocks, from the first one that differs on; two of them are enough.
        after: The later blocks from there on.
        removed: The number of earlier blocks, if there are no later ones.

    Returns:
        Such as ``user message “…Ada.” → “…Bea.”``; empty if there are no blocks.
    """
    if not before and not after:
        return ""
    if not before:
        return f"new {name_block(after[0])}"
    old = before[0]
    if not after and removed > 1:
        return f"removed {name_block(old)} and {pluralize(removed - 1, 'later block')}"
    if not after:
        return f"removed {name_block(old)}"
    new = after[0]
    if len(before) > 1 and _has_same_content(before[1], new):
        return f"removed {name_block(old)}"
    if len(after) > 1 and _has_same_content(old, after[1]):
        return f"new {name_block(new)}"
    if old.kind != new.kind:
        return f"{name_block(old)} → {name_block(new)}"
    name = BLOCK_NAMES.get(old.kind, old.kind)
    old_text = _format_content(old)
    new_text = _format_content(new)
    if old_text == new_text:
        return f"{name} {_quote(old_text)}"
    start = _find_excerpt_start(old_text, new_text)
    return f"{name} {_quote(old_text, start)} → {_quote(new_text, start)}"


def _quote(text: str, start: int = 0) -> str:
    """Return the beginning of a text from a position on, in quotation marks."""
    ellipsis = "…" if start else ""
    return f"“{ellipsis}{shorten(text[start:], MAX_QUOTED)}”"


def _has_same_content(one: Block, other: Block) -> bool:
    return one.kind == other.kind and _format_content(one) == _format_content(other)


def _find_excerpt_start(old: str, new: str) -> int:
    """Return the position from which two texts are quoted: the start of the first word that differs."""
    pairs = enumerate(zip(old, new, strict=False))
    shorter = min(len(old), len(new))
    different = next((index for index, (one, other) in pairs if one != other), shorter)
    return old.rfind(" ", 0, different) + 1


def format_table(blocks: Iterable[Block], width: int = DEFAULT_WIDTH) -> str:
    """Return one line per block: index, kind, content, and the response that produced it."""
    rows = [
        f"{index:>4} {block.kind:<11} {describe(block, width):<{width}} {shorten(block.response_id, width)}".rstrip()
        for index, block in enumerate(blocks)
    ]
    return "\n".join(rows)


def format_part(part: Part, width: int = DEFAULT_WIDTH) -> str:
    """Return the type and content of a part."""
    if isinstance(part, OpaquePart):
        text = str(part.content.get("type", ""))
    else:
        members = (getattr(part, name, "") for name in _SHOWN_MEMBERS)
        text = next(filter(None, members), "")
    return f"<{part.__struct_config__.tag} {shorten(text, width)}>"


def shorten(text: str, width: int) -> str:
    """Shorten text to one line of at most ``width`` characters; control characters are escaped."""
    head = text[: width + 1]
    line = escape_text(head)
    if len(line) <= width:
        return line
    return line[: width - 1] + "…"


def _format_content(block: Block) -> str:
    match block.kind:
        case "user" | "assistant":
            return " ".join(map(_format_part_content, block.parts))
        case "system":
            if block.role == "system":
                return block.text
            return f"({block.role}) {block.text}"
        case "tool_call":
            return f"{block.call_id}: {block.name} {block.arguments}"
        case "tool_result":
            return f"{block.call_id}: {' '.join(map(_format_part_content, block.parts))}"
        case "reasoning":
            return _format_reasoning(block)
        case "opaque":
            return block.type
        case "unknown":
            return f"(a block of kind {block.form.get('kind')!r})"


def _format_reasoning(block: ReasoningBlock) -> str:
    text = " ".join((*block.summary, *block.texts))
    if block.encrypted_content:
        return f"{text} ({len(block.encrypted_content)} characters encrypted)".strip()
    return text or "(nothing shown)"


def _format_part_content(part: Part) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return f"(refusal) {part.text}"
        case ImagePart() | FilePart() | OpaquePart():
            return f"({describe_attachment(part)})"


def describe_attachment(part: ImagePart | FilePart | OpaquePart) -> str:
    """Return the kind of a part that is no text, and its name, URL, or type and size, in one line."""
    match part:
        case ImagePart():
            return f"image {_format_source_url(part.url or part.file_id)}"
        case FilePart():
            content = part.data if part.data.startswith("data:") else ""
            source = _format_source_url(part.url or part.file_id or content)
            return f"file {', '.join(filter(None, (shorten(part.filename, 80), source)))}".rstrip()
        case OpaquePart():
            return shorten(str(part.content.get("type", "opaque")), DEFAULT_WIDTH)


def _format_source_url(url: str) -> str:
    """Return a URL or file id, or the type and size of the content of a data URL."""
    header, separator, content = url.partition(",")
    if not separator or not header.startswith("data:"):
        return shorten(url, 80)
    size = len(content) * 3 // 4 - content[-2:].count("=")
    return f"{shorten(header[5:].partition(';')[0], 80)}, {format_size(size)}"
