"""Attachments of messages: read from requests, and served to the page.

Attachments are parts of the blocks of a conversation, so they are deleted with it. Lists read only the beginning of
a block, and the page loads images from separate URLs, so that neither reads the content of attachments.
"""

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import quote

from starlette.responses import Response

from kedge import turns
from kedge.errors import InvalidSetting, NotInStore
from kedge.turns.attachments import split_data_url
from kedge.web import schemas


def parse_attachment(attachment: schemas.NewAttachment) -> turns.Part:
    """Convert an attachment to a part of a message.

    Raises:
        InvalidSetting: It is not a data URL, too large, or of a type that is not accepted.
    """
    media_type, content = _parse_data_url(attachment.data)
    if len(content) > schemas.MAX_ATTACHMENT_BYTES:
        raise InvalidSetting(f"an attachment is limited to {schemas.MAX_ATTACHMENT_BYTES:,} bytes")
    if media_type in schemas.IMAGE_TYPES:
        return turns.image(content, media_type=media_type)
    if media_type in schemas.FILE_TYPES:
        return turns.file(
            content, media_type=media_type, filename=attachment.filename or "attachment"
        )
    accepted = ", ".join((*schemas.IMAGE_TYPES, *schemas.FILE_TYPES))
    raise InvalidSetting(f"attachments of type {media_type!r} are not accepted; use {accepted}")


def serve_attachment(blocks: Sequence[turns.Block], block_id: str, index: int) -> Response:
    """Return the content of an attachment: an image to show, or a file to download.

    Raises:
        NotInStore: There is no such attachment, or its content is not stored here.
    """
    headers = {"cache-control": "private, max-age=3600"}
    match _find_part(blocks, block_id, index):
        case turns.ImagePart(url=url) if url.startswith("data:"):
            data_url = url
        case turns.FilePart(data=data, filename=filename) if data:
            data_url = data
            headers["content-disposition"] = format_disposition(filename or "attachment")
        case _:
            raise NotInStore(f"there is no attachment {index} in block {block_id!r}")
    media_type, content = _parse_data_url(data_url)
    if media_type not in (*schemas.IMAGE_TYPES, *schemas.FILE_TYPES):
        media_type = "application/octet-stream"
    return Response(content, media_type=media_type, headers=headers)


def _find_part(blocks: Sequence[turns.Block], block_id: str, index: int) -> turns.Part | None:
    """Return a part of a message or of a tool result; None if there is none."""
    for block in blocks:
        if block.id != block_id or not isinstance(block, turns.UserBlock | turns.ToolResultBlock):
            continue
        if index < len(block.parts):
            return block.parts[index]
    return None


def format_disposition(filename: str) -> str:
    """Return the ``content-disposition`` header of a download with any file name."""
    return f"attachment; filename*=UTF-8''{quote(filename, safe='')}"


def _parse_data_url(url: str) -> tuple[str, bytes]:
    """Return the media type and the content of a data URL."""
    media_type, content = split_data_url(url)
    if not (media_type or content):
        raise InvalidSetting("an attachment must be a data URL with base64 content")
    try:
        return media_type.lower(), base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSetting("the base64 content of an attachment is invalid") from None
