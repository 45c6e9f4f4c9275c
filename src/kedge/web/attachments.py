"""Attachments of messages: which types are accepted, and how stored ones are served.

They are parts of the blocks of a conversation, so they are deleted with it. Lists read only the beginning of
a block, and the page loads images from separate URLs, so that neither reads the content of attachments.
"""

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import quote

from starlette.responses import Response

from kedge.errors import InvalidSetting, NotInStore
from kedge.turns import Block, FilePart, ImagePart, Part, ToolResultBlock, UserBlock, file, image
from kedge.web.schemas import MAX_ATTACHMENT_BYTES, NewAttachment

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Image types that are accepted and shown; remote images are not fetched."""
FILE_TYPES = ("application/pdf", "application/json", "text/plain", "text/markdown", "text/csv")
"""File types that are accepted; they are offered as downloads only."""


def parse_attachment(attachment: NewAttachment) -> Part:
    """Convert an attachment to a part of a message.

    Raises:
        InvalidSetting: It is not a data URL, too large, or of a type that is not accepted.
    """
    media_type, content = _parse_data_url(attachment.data)
    if len(content) > MAX_ATTACHMENT_BYTES:
        raise InvalidSetting(f"an attachment is limited to {MAX_ATTACHMENT_BYTES:,} bytes")
    if media_type in IMAGE_TYPES:
        return image(content, media_type=media_type)
    if media_type in FILE_TYPES:
        return file(content, media_type=media_type, filename=attachment.filename or "attachment")
    accepted = ", ".join((*IMAGE_TYPES, *FILE_TYPES))
    raise InvalidSetting(f"attachments of type {media_type!r} are not accepted; use {accepted}")


def serve_attachment(blocks: Sequence[Block], block_id: str, index: int) -> Response:
    """Return the content of an attachment: an image to show, or a file to download.

    Raises:
        NotInStore: There is no such attachment, or its content is not stored here.
    """
    block = next((block for block in blocks if block.id == block_id), None)
    parts = block.parts if isinstance(block, UserBlock | ToolResultBlock) else ()
    part = parts[index] if index < len(parts) else None
    match part:
        case ImagePart(url=url) if url.startswith("data:"):
            media_type, content = _parse_data_url(url)
            headers = {}
        case FilePart(data=data) if data:
            media_type, content = _parse_data_url(data)
            headers = {"content-disposition": format_disposition(part.filename or "attachment")}
        case _:
            raise NotInStore(f"there is no attachment {index} in block {block_id!r}")
    if media_type not in (*IMAGE_TYPES, *FILE_TYPES):
        media_type = "application/octet-stream"
    return Response(
        content,
        media_type=media_type,
        headers={**headers, "cache-control": "private, max-age=3600"},
    )


def format_disposition(filename: str) -> str:
    """Return the ``content-disposition`` header of a download with any file name."""
    return f"attachment; filename*=UTF-8''{quote(filename, safe='')}"


def _parse_data_url(url: str) -> tuple[str, bytes]:
    """Return the media type and the content of a data URL."""
    head, _, content = url.partition(",")
    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if not head.startswith("data:") or encoding.rpartition(";")[2] != "base64":
        raise InvalidSetting("an attachment must be a data URL with base64 content")
    try:
        return media_type.lower(), base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSetting("the base64 content of an attachment is invalid") from None
