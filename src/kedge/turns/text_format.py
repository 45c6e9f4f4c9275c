"""Format blocks for display, one line per block, and describe the change from one list of blocks to another."""

from collections.abc import Iterable, Sequence

from kedge._internal.display import escape_text, format_size, pluralize
from kedge.turns.blocks import Block, ReasoningBlock
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart

DEFAULT_WIDTH = 72
MAX_SOURCE_LENGTH = 80
"""The maximum number of characters of a file name, a URL or a file id."""
_SHOWN_MEMBERS = ("text", "filename", "url", "file_id", "data")
"""The members of a part in the order of preference: the first that is not empty is shown."""


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
"""What each kind of block is called in sentences."""
MAX_QUOTED = 60
"""The maximum number of characters of each quoted text."""


def name_block(block: Block) -> str:
    """Return the kind of a block in words and the beginning of its content."""
    return f"{BLOCK_NAMES.get(block.kind, block.kind)} “{describe(block, MAX_QUOTED)}”"


def describe_change(before: Sequence[Block], after: Sequence[Block], removed: int = 0) -> str:
    """Describe the first difference between two lists of blocks in one line.

    Args:
        before: The old blocks, from the first one that differs on; two of them are enough.
        after: The new blocks, from the same index on; two of them are enough.
        removed: The number of all old blocks from there on; needed if there are no new ones.

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
    # If one list continues with the other's first block, a single block was removed or added before it.
    if len(before) > 1 and _has_same_content(before[1], new):
        return f"removed {name_block(old)}"
    if len(after) > 1 and _has_same_content(old, after[1]):
        return f"new {name_block(new)}"
    if old.kind != new.kind:
        return f"{name_block(old)} → {name_block(new)}"
    name = BLOCK_NAMES.get(old.kind, old.kind)
    old_text = _format_content(old)
    new_text = _format_content(new)
    if old_text == new_text:  # the difference is in members that are not shown
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
    pairs = zip(old, new, strict=False)
    differences = (index for index, (one, other) in enumerate(pairs) if one != other)
    first_difference = next(differences, min(len(old), len(new)))
    return old.rfind(" ", 0, first_difference) + 1


def format_table(blocks: Iterable[Block], width: int = DEFAULT_WIDTH) -> str:
    """Return one line per block: index, kind, content, and the response that produced it."""
    lines: list[str] = []
    for index, block in enumerate(blocks):
        content = describe(block, width)
        response_id = shorten(block.response_id, width)
        lines.append(f"{index:>4} {block.kind:<11} {content:<{width}} {response_id}".rstrip())
    return "\n".join(lines)


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
    # Only the beginning of a long text is escaped: one character more than fits shows that it is longer.
    line = escape_text(text[: width + 1])
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
    """Describe an image, a file or an opaque part in one line: its kind, and its name, URL, or type and size."""
    match part:
        case ImagePart():
            return f"image {_format_source(part.url or part.file_id)}"
        case FilePart():
            content_url = ""
            if part.data.startswith("data:"):
                content_url = part.data
            name = shorten(part.filename, MAX_SOURCE_LENGTH)
            source = _format_source(part.url or part.file_id or content_url)
            return f"file {', '.join(filter(None, (name, source)))}".rstrip()
        case OpaquePart():
            return shorten(str(part.content.get("type", "opaque")), DEFAULT_WIDTH)


def _format_source(source: str) -> str:
    """Return a URL or file id, or the type and size of the content of a data URL."""
    header, separator, content = source.partition(",")
    if not separator or not header.startswith("data:"):
        return shorten(source, MAX_SOURCE_LENGTH)
    media_type, _, _ = header.removeprefix("data:").partition(";")
    # Four characters of base64 are three bytes; "=" at the end is padding.
    size = len(content) * 3 // 4 - content[-2:].count("=")
    return f"{shorten(media_type, MAX_SOURCE_LENGTH)}, {format_size(size)}"
