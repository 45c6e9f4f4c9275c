"""Format blocks and Turns for display, one line per block."""

from collections.abc import Iterable

from kedge.text.display import escape_text, format_size
from kedge.turns.blocks import Block, ReasoningBlock
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart

DEFAULT_WIDTH = 72
_SHOWN_MEMBERS = ("text", "filename", "url", "file_id", "data")
"""The members of parts, of which the first that is not empty is shown."""


def describe(block: Block, width: int = DEFAULT_WIDTH) -> str:
    """Return the content of a block in one line of at most ``width`` characters."""
    return shorten(_format_content(block), width)


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
    return line if len(line) <= width else line[: width - 1] + "…"


def _format_content(block: Block) -> str:
    match block.kind:
        case "user" | "assistant":
            return " ".join(map(_format_part_content, block.parts))
        case "system":
            return block.text if block.role == "system" else f"({block.role}) {block.text}"
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
    encrypted = f"({len(block.encrypted_content)} characters encrypted)"
    return f"{text} {encrypted}".strip() if block.encrypted_content else text or "(nothing shown)"


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
