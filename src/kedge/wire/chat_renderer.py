"""Render a plan as messages of the Chat Completions API.

Consecutive output of the model is one message with its calls, because this API requires the results directly after it;
two texts without a call between them stay two messages. Content that is only text is sent as a string, which every
server accepts.

Some servers need more to continue an answer: the signatures of Gemini, the reasoning details and annotations of
OpenRouter. What came from a server is sent back to it as it came, and to no other, which might reject it.
"""

from collections.abc import Iterable, Sequence

from kedge import turns
from kedge._internal.argument_types import checked
from kedge.planning import RequestPlan, plan_request
from kedge.turns.frozen_json import thaw
from kedge.turns.server_fields import CHAT_CALL, CHAT_MESSAGE, select_members
from kedge.wire.message_renderer import Inputs, Message, MessageRenderer, Results

RESENT_MEMBERS = ("reasoning_details", "extra_content", "thought_signature")
"""Members of a message that a server needs again to continue it; it may reject others."""
_REASONING_MEMBERS = ("reasoning_content", "reasoning_details")


@checked
def messages_from_blocks(blocks: Iterable[turns.Block]) -> list[Message]:
    """Convert blocks to messages of the Chat Completions API: the reverse of ``blocks_from_messages``.

    System blocks at the start become one message. Reasoning is left out.

    Args:
        blocks: A Turn, or blocks.

    Returns:
        The messages, as a request would contain them.

    Raises:
        UnsupportedBlock: The API has no form for a block.
    """
    plan = plan_request(turns.Turn(blocks), scope="", mode="stateless", now=0.0)
    return render_messages(plan.without_reasoning(), "chat")


def render_messages(
    plan: RequestPlan, provider: str, max_call_id_length: int | str = ""
) -> list[Message]:
    """Return the messages of a plan; a block that cannot be expressed raises ``UnsupportedBlock``."""
    renderer = _ChatRenderer(provider, f".{{1,{max_call_id_length}}}")
    renderer.own = plan.own_responses()
    messages = renderer.render(plan)
    if plan.instructions is not None:
        messages.insert(0, {"role": "system", "content": plan.instructions})
    return messages


class _ChatRenderer(MessageRenderer):
    own: frozenset[str]
    """The responses of this server."""

    def _render_user(self, results: Results, inputs: Inputs) -> list[Message]:
        return [*map(self._render_result, results), *map(self._render_input, inputs)]

    def _render_assistant(self, blocks: Sequence[turns.Block]) -> list[Message]:
        messages: list[Message] = []
        for block in blocks:
            match block:
                case turns.AssistantBlock():
                    parts = [self._render_output_part(part, block) for part in block.parts]
                    message = _open_message(messages, "tool_calls", *_REASONING_MEMBERS)
                    message["content"] = [*message.get("content", ()), *parts]
                case turns.ToolCallBlock():
                    message = messages[-1] if messages else _open_message(messages)
                    message.setdefault("tool_calls", []).append(self._render_call(block))
                case turns.ReasoningBlock():
                    message = _open_message(messages, "tool_calls")
                    if not self._get_members(block, CHAT_MESSAGE):
                        reasoning = message.get("reasoning_content", "") + "".join(block.texts)
                        message["reasoning_content"] = reasoning
                case _:
                    raise self._reject(block, "remove it or write it as text")
            self._add_members(message, block)
        for message in messages:
            if "content" in message:
                message["content"] = _simplify_content(message["content"])
        return messages

    def _add_members(self, message: Message, block: turns.Block) -> None:
        """Add what only this server has to a message: the members that it needs again."""
        members = self._get_members(block, CHAT_MESSAGE)
        message |= {name: members[name] for name in RESENT_MEMBERS if name in members}
        audio = members.get("audio")
        if isinstance(audio, dict) and "id" in audio:
            message["audio"] = {"id": audio["id"]}
        if isinstance(block, turns.AssistantBlock) and block.response_id in self.own:
            annotations = _list_annotations(block)
            if annotations:
                message["annotations"] = [*message.get("annotations", ()), *annotations]

    def _get_members(self, block: turns.Block, name: str) -> Message:
        """Return the members of an answer of this server that Kedge does not interpret."""
        if block.response_id not in self.own:
            return {}
        members = select_members(block.extra, (name,))
        if not members:
            return {}
        return thaw(members[name])

    def _render_call(self, block: turns.ToolCallBlock) -> Message:
        call_id = self._assign_id(block)
        members = self._get_members(block, CHAT_CALL)
        if block.custom:
            function = {"name": block.name, "input": block.arguments}
            return {**members, "id": call_id, "type": "custom", "custom": function}
        function = {"name": block.name, "arguments": block.arguments or "{}"}
        return {**members, "id": call_id, "type": "function", "function": function}

    def _render_result(self, block: turns.ToolResultBlock) -> Message:
        for part in block.parts:
            if not isinstance(part, turns.TextPart):
                remedy = "put it into a user block after the result"
                raise self._reject(block, remedy, "this API accepts only text in results")
        content = _simplify_content([self._render_input_part(part, block) for part in block.parts])
        return {"role": "tool", "tool_call_id": self._resolve_id(block), "content": content}

    def _render_input(self, block: turns.UserBlock | turns.SystemBlock) -> Message:
        if isinstance(block, turns.SystemBlock):
            return {"role": block.role, "content": block.text}
        content = _simplify_content([self._render_input_part(part, block) for part in block.parts])
        return {"role": "user", "content": content}

    def _render_output_part(self, part: turns.Part, block: turns.Block) -> Message:
        match part:
            case turns.TextPart():
                return {"type": "text", "text": part.text}
            case turns.RefusalPart():
                return {"type": "refusal", "refusal": part.text}
            case _:
                raise self._reject(block, "write it as text")

    def _render_input_part(self, part: turns.Part, block: turns.Block) -> Message:
        match part:
            case turns.TextPart():
                return {"type": "text", "text": part.text}
            case turns.ImagePart() if part.url:
                image = {"url": part.url}
                if part.detail != "auto":
                    image["detail"] = part.detail
                return {"type": "image_url", "image_url": image}
            case turns.ImagePart():
                remedy = "pass the image data with kedge.image"
                raise self._reject(block, remedy, "it refers to an image by its file id")
            case turns.FilePart() if not part.url:
                file = {"file_data": part.data} if part.data else {"file_id": part.file_id}
                if part.filename:
                    file["filename"] = part.filename
                return {"type": "file", "file": file}
            case turns.FilePart():
                remedy = "pass the file data with kedge.file"
                raise self._reject(block, remedy, "it refers to a file by its URL")
            case turns.OpaquePart() if _is_native(part):
                return thaw(part.content)
            case _:
                raise self._reject(block, "remove that part", "it contains a part of another API")


def _list_annotations(block: turns.AssistantBlock) -> list[Message]:
    """Return the annotations of an answer in the form of this API, whose members are named by their type."""
    annotations = (each for part in block.parts for each in part.extra.get("annotations", ()))
    return [thaw(each) for each in annotations if each.get("type") in each]


def _open_message(messages: list[Message], *members: str) -> Message:
    """Return the message to extend: the last one if it has any of these members, else a new one."""
    if not messages or not any(name in messages[-1] for name in members):
        messages.append({"role": "assistant"})
    return messages[-1]


def _is_native(part: turns.OpaquePart) -> bool:
    """Return whether an unknown part may be of this API; parts of the Responses API have other names."""
    kind = str(part.content.get("type"))
    return kind == "input_audio" or not kind.startswith(("input_", "output_", "computer_"))


def _simplify_content(parts: list[Message]) -> str | list[Message]:
    """Return a string if the content is one text or empty, else the list of parts."""
    if not parts:
        return ""  # servers reject an empty list
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return parts[0]["text"]
    return parts
