"""Render a plan as messages of Anthropic's Messages API.

Messages alternate: output of the model is one assistant message, its input one user message with the
results first. Leading system text is a separate member. A later system block is a separate message
after the user's message, where this API accepts one (since Claude Opus 4.8; older models reject it). A
system block that is not next to a user block cannot be expressed.

Reasoning is sent only with its signature, and only where the plan proves it.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any, cast

from kedge import turns
from kedge.errors import UnsupportedBlock
from kedge.planning import RequestPlan
from kedge.planning.digests import CITATIONS
from kedge.turns.attachments import split_data_url
from kedge.turns.frozen_json import thaw
from kedge.turns.server_fields import NATIVE_KEY
from kedge.wire.anthropic import REDACTED_REASONING
from kedge.wire.message_renderer import Inputs, Message, MessageRenderer, Results

Members = dict[str, Any]

CALL_ID_PATTERN = r"[a-zA-Z0-9_-]+"
"""The call ids that the API accepts. Each may be used only once; other ids are replaced."""
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
FILE_TYPES = ("application/pdf",)
NATIVE_PART_TYPES = ("document", "search_result", "container_upload", "image", "text")
"""Parts of the user's content that may be passed in the form of this API."""


NATIVE_TYPES = ("server_tool_use", "mcp_tool_use", *NATIVE_PART_TYPES)


def render_messages(plan: RequestPlan, provider: str) -> list[Message]:
    """Return the messages of a plan; a block that cannot be expressed raises ``UnsupportedBlock``."""
    return _AnthropicRenderer(provider, CALL_ID_PATTERN).render(plan)


class _AnthropicRenderer(MessageRenderer):
    has_unique_ids = True

    def _render_assistant(self, blocks: Sequence[turns.Block]) -> list[Message]:
        content: list[Members] = []
        for block in blocks:
            match block:
                case turns.AssistantBlock():
                    parts = filter(_has_content, block.parts)
                    content += [self._render_output_part(part, block) for part in parts]
                case turns.ToolCallBlock():
                    content.append(self._render_call(block))
                case turns.ReasoningBlock():
                    content.append(_render_reasoning(block))
                case turns.OpaqueBlock():
                    content.append(self._render_native(block))
                case _:
                    pass
        if not content:
            return []
        return [{"role": "assistant", "content": content}]

    def _render_user(self, results: Results, inputs: Inputs) -> list[Message]:
        content = [self._render_result(block) for block in results]
        for block in inputs:
            if isinstance(block, turns.UserBlock):
                parts = self._render_input_parts(block)
                if not parts:
                    raise self._reject(block, "give it text", "it is empty")
                content += parts
        if not content:
            remedy = "move it directly before or after a user block"
            raise self._reject(inputs[0], remedy, "it is not beside a user block")
        messages: list[Message] = [{"role": "user", "content": content}]
        texts = [block.text for block in inputs if isinstance(block, turns.SystemBlock)]
        if texts:
            messages.append({"role": "system", "content": "\n\n".join(texts)})
        return messages

    def _render_call(self, block: turns.ToolCallBlock) -> Members:
        return {
            "type": "tool_use",
            "id": self._assign_id(block),
            "name": block.name,
            "input": self._parse_arguments(block),
            **_get_native_members(block),
        }

    def _parse_arguments(self, block: turns.ToolCallBlock) -> Members:
        value: object
        try:
            value = json.loads(block.arguments.strip() or "{}")
            json.dumps(value, allow_nan=False)
        except ValueError:
            value = None
        if isinstance(value, dict) and not block.custom:
            return cast("Members", value)
        remedy = "correct the arguments, or remove the call and its result"
        raise self._reject(block, remedy, "its arguments are not a JSON object")

    def _render_native(self, block: turns.OpaqueBlock) -> Members:
        """Convert a block of a kind that only this API has: one of its own answers, or of a known type."""
        is_native = block.metadata.get(turns.NATIVE_API) == NATIVE_KEY
        is_known = block.type in NATIVE_TYPES or block.type.endswith("_tool_result")
        is_summary = block.type == "compaction" and "encrypted_content" not in block.item
        if is_native or is_known or is_summary:
            return thaw(block.item)
        raise self._reject(block, "remove it or write it as text")

    def _render_result(self, block: turns.ToolResultBlock) -> Members:
        content: str | list[Members] = block.text
        if len(block.parts) != 1 or not isinstance(block.parts[0], turns.TextPart):
            content = self._render_input_parts(block)
        call_id = self._resolve_id(block)
        return {"type": "tool_result", "tool_use_id": call_id, "content": content}

    def _render_input_parts(self, block: turns.UserBlock | turns.ToolResultBlock) -> list[Members]:
        parts = filter(_has_content, block.parts)
        return [self._render_input_part(part, block) for part in parts]

    def _render_output_part(self, part: turns.Part, block: turns.Block) -> Members:
        match part:
            case turns.TextPart():
                return {"type": "text", "text": part.text, **_render_citations(part)}
            case turns.RefusalPart():  # this API can express a refusal only as text
                return {"type": "text", "text": part.text}
            case _:
                raise self._reject(block, "write it as text")

    def _render_input_part(self, part: turns.Part, block: turns.Block) -> Members:
        match part:
            case turns.TextPart():
                return {"type": "text", "text": part.text}
            case turns.ImagePart():
                return {"type": "image", "source": self._render_source(part, block)}
            case turns.FilePart():
                document = {"type": "document", "source": self._render_source(part, block)}
                if part.filename:
                    document["title"] = part.filename
                return document
            case turns.OpaquePart() if part.content.get("type") in NATIVE_PART_TYPES:
                return thaw(part.content)
            case _:
                raise self._reject_part(block, "it contains a part of another API")

    def _render_source(self, part: turns.ImagePart | turns.FilePart, block: turns.Block) -> Members:
        if part.file_id:
            return {"type": "file", "file_id": part.file_id}
        if isinstance(part, turns.ImagePart):
            return self._render_image_source(part, block)
        return self._render_file_source(part, block)

    def _render_image_source(self, part: turns.ImagePart, block: turns.Block) -> Members:
        if part.url and not part.url.startswith("data:"):
            return {"type": "url", "url": part.url}
        media_type, data = split_data_url(part.url)
        if media_type not in IMAGE_TYPES:
            detail = f"it contains an image of type {media_type or 'unknown'}"
            raise self._reject_part(block, detail)
        return {"type": "base64", "media_type": media_type, "data": data}

    def _render_file_source(self, part: turns.FilePart, block: turns.Block) -> Members:
        if part.url:
            return {"type": "url", "url": part.url}
        media_type, data = split_data_url(part.data)
        if media_type in FILE_TYPES:
            return {"type": "base64", "media_type": media_type, "data": data}
        if not media_type.startswith("text/"):
            detail = f"it contains a file of type {media_type or 'unknown'}"
            raise self._reject_part(block, detail)
        try:
            text = base64.b64decode("".join(data.split()), validate=True).decode()
        except ValueError:  # not base64, or not UTF-8
            detail = "it contains a text file that cannot be decoded"
            raise self._reject_part(block, detail) from None
        return {"type": "text", "media_type": "text/plain", "data": text}

    def _reject_part(self, block: turns.Block, detail: str) -> UnsupportedBlock:
        return self._reject(block, "remove that part", detail)


def _render_reasoning(block: turns.ReasoningBlock) -> Members:
    if _get_native_item(block) == REDACTED_REASONING:
        return {"type": "redacted_thinking", "data": block.encrypted_content}
    text = "".join(block.texts)
    return {"type": "thinking", "thinking": text, "signature": block.encrypted_content}


def _get_native_members(block: turns.Block) -> Members:
    """Return the fields of a call that only this API has."""
    item = _get_native_item(block)
    if not isinstance(item, turns.FrozenMap):
        return {}
    return thaw(item)


def _get_native_item(block: turns.Block) -> object:
    item = block.extra.get("item")
    if not isinstance(item, turns.FrozenMap):
        return None
    return item.get(NATIVE_KEY)


def _render_citations(part: turns.TextPart) -> Members:
    citations = part.extra.get(CITATIONS)
    if not isinstance(citations, tuple):
        return {}
    return {CITATIONS: thaw(citations)}


def _has_content(part: turns.Part) -> bool:
    """Return whether a part is not empty: this API rejects empty text."""
    return not isinstance(part, turns.TextPart) or bool(part.text.strip())
