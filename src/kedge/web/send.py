"""Send a message in a conversation as a run, publish the events of the turn, and serve its attachments.

Attachments are parts of the blocks of a conversation, so they are deleted with it. Lists read only the beginning of
a block, and the page loads images from separate URLs, so that neither reads the content of attachments.
"""

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from kedge.conversation import ConversationStream
from kedge.engines import Middleware
from kedge.errors import InvalidSetting, KedgeError, NotInStore, StoreError
from kedge.events import Event, ReasoningDelta, RefusalDelta, TextDelta
from kedge.events.run import (
    AnswerFinished,
    Healed,
    RequestPlanned,
    RequestSent,
    ServerForgot,
    ToolFinished,
    ToolStarted,
)
from kedge.middleware import two_phase
from kedge.planning.explain import format_headline
from kedge.store.tree import path_to, read_tree
from kedge.text.display import HEALING_TEXTS, format_size
from kedge.turns import (
    AssistantBlock,
    Block,
    FilePart,
    ImagePart,
    Part,
    SystemBlock,
    TextPart,
    ToolResultBlock,
    Turn,
    UserBlock,
    assistant,
    file,
    image,
    system,
    user,
)
from kedge.web.openapi import RequestError
from kedge.web.runs import TurnRun
from kedge.web.schemas import (
    FILE_TYPES,
    IMAGE_TYPES,
    MAX_ATTACHMENT_BYTES,
    BlockEdit,
    NewAttachment,
    NewResume,
    NewTurn,
    RequestSettings,
)
from kedge.web.service import (
    EDITED_KEY,
    ConversationService,
    OpenConversation,
    read_instructions,
)
from kedge.web.shapes import EditShape, shape_plan, shape_reply
from kedge.web.transcript import iter_block_ranges


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A message to send, or a stored question to send again, and the node to continue from.

    The head moves when the answer arrives, so it is unchanged after a failed turn.
    """

    opened: OpenConversation
    blocks: Sequence[Block] = ()
    at: int | None = None
    """The node to continue from; None for the head."""
    keep: int | None = None
    """The number of blocks of that node's path to continue after; None for all."""
    question: int = 0
    """A stored question to continue with, instead of the message."""
    restart: bool = False
    """Whether to start again at the question, instead of after its last stored step."""
    text: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The idempotency key and the options of the request."""

    def stream(self, **options: Any) -> ConversationStream:
        """Return the stream of the turn."""
        conversation = self.opened.conversation
        options |= self.options
        if self.question:
            return conversation.stream_resume(self.question, restart=self.restart, **options)
        return conversation.stream(*self.blocks, at=self.at, keep=self.keep, **options)


async def resolve_turn(service: ConversationService, name: str, body: NewTurn) -> TurnRequest:
    """Resolve the position to continue from, the model that answers there, and the message.

    Raises:
        KedgeError: If one of them is not available; nothing was written.
    """
    at = body.previous_response_id or ("" if body.at is None else str(body.at))
    parts = [parse_attachment(each) for each in body.attachments]
    opened = await service.open(name, at, body.model, _build_middleware(body))
    check_head(opened, body.head)
    options = {"key": body.key, **_build_options(body), **opened.options}
    if body.edit is not None:
        edit = partial(_edit_user_block, text=body.text, added=parts)
        blocks, parent, keep = await _edit_question(service, opened, body.edit, edit)
        return TurnRequest(opened, blocks, parent, keep, text=body.text, options=options)
    node = opened.node if at else None
    message = user([body.text, *parts])
    return TurnRequest(opened, [message], node, text=body.text, options=options)


async def resolve_resume(service: ConversationService, name: str, body: NewResume) -> TurnRequest:
    """Resolve a stored question to send again.

    Raises:
        KedgeError: If there is no such question, or its model is not available; nothing was written.
    """
    opened = await service.open(name, str(body.node), body.model, _build_middleware(body))
    check_head(opened, body.head)
    question = next(node for node in opened.tree.nodes if node.id == body.node)
    if question.kind != "asked":
        raise NotInStore(f"node {body.node} is not a question; pass the node of a question")
    return TurnRequest(
        opened,
        at=question.parent,
        question=body.node,
        restart=body.restart,
        text=opened.tree.questions.get(body.node, ""),
        options={**_build_options(body), **opened.options},
    )


def _build_options(settings: RequestSettings) -> dict[str, Any]:
    """Return the options of a request; each provider's engine maps their names."""
    members = {"reasoning", "temperature", "top_p", "max_output_tokens"}
    options = settings.model_dump(include=members, exclude_none=True)
    if settings.effort is not None:
        options.setdefault("reasoning", {})["effort"] = settings.effort
    return {name: value for name, value in options.items() if value != {}}


def _build_middleware(settings: RequestSettings) -> tuple[Middleware, ...]:
    text = settings.system
    if text is None:
        return ()
    return (two_phase(lambda turn: _replace_instructions(turn, text), name="settings"),)


def _replace_instructions(turn: Turn, text: str) -> Turn:
    """Replace the leading system text of a Turn; no digest includes it, so anchors remain valid."""
    if read_instructions(turn.blocks) == text:
        return turn
    for block in turn.leading:
        turn = turn.remove(block.id)
    return turn.insert(0, system(text)) if text else turn


def check_head(opened: OpenConversation, head: int | None) -> None:
    """Reject a request whose head is not the current one; nothing was written."""
    current = opened.conversation.row.head
    if head is not None and head != current:
        raise RequestError(
            409,
            "head_conflict",
            f"the conversation was continued elsewhere: its head is node {current}; read it, or send again "
            f"with head {current} to continue from here on a new branch",
        )


async def _edit_question(
    service: ConversationService,
    opened: OpenConversation,
    block_id: str,
    edit: Callable[[Block], Block],
) -> tuple[list[Block], int, int | None]:
    """Return an edited question, the node to continue from, and the number of its blocks that remain.

    A question that was appended by a node is sent again after the node before it, with its other
    blocks. In a rewritten history the edited block follows the blocks before it.
    """
    path = path_to(opened.tree, opened.node)
    lengths = {node.id: node.length for node in path}
    blocks = (await service.store.load(opened.conversation.row, opened.node)).blocks
    index = next((index for index, block in enumerate(blocks) if block.id == block_id), -1)
    for node, start, stop in iter_block_ranges(path):
        if start <= index < stop:
            new = edit(blocks[index])
            if node.kind == "asked" and start == lengths[node.parent]:
                return [*blocks[start:index], new, *blocks[index + 1 : stop]], node.parent, None
            return [new], node.id, index
    raise NotInStore(f"there is no block {block_id!r} on the path to node {opened.node}")


def _edit_user_block(block: Block, text: str, added: Sequence[Part] = ()) -> Block:
    """Replace the text of a user block that is sent again; images and files are retained."""
    if not isinstance(block, UserBlock):
        raise InvalidSetting("only user messages can be edited and sent again")
    return _replace_text(block, text, added, {**block.metadata, EDITED_KEY: block.id})


def _replace_text(
    block: Block, text: str, added: Sequence[Part] = (), metadata: Mapping[str, Any] | None = None
) -> Block:
    match block:
        case UserBlock():
            rest = (part for part in block.parts if not isinstance(part, TextPart))
            return user([TextPart(text), *rest, *added], metadata=metadata or {})
        case AssistantBlock():
            return assistant(text)
        case SystemBlock():
            return system(text, role=block.role)
        case _:
            raise InvalidSetting(
                "only messages of the user, the model and the system can be edited"
            )


async def edit_block(service: ConversationService, name: str, body: BlockEdit) -> EditShape:
    """Replace the text of a block on the path to the head; nothing is sent.

    Raises:
        InvalidSetting: The block has no text that can be replaced.
        HeadConflict: The head has moved.
    """
    opened = await service.open(name)
    check_head(opened, body.head)
    conversation = opened.conversation
    old = conversation.turn.blocks[conversation.turn.index(body.block)]
    node = await conversation.edit(body.block, _replace_text(old, body.text))
    return EditShape(conversation=conversation.id, node=node.id)


def start_run(service: ConversationService, request: TurnRequest, *, streaming: bool) -> TurnRun:
    """Start a run that sends a message; it continues if the client disconnects."""
    opened = request.opened
    run = TurnRun(
        opened.conversation.id,
        opened.node if request.at is None else request.at,
        request.text,
        request.question,
        max((node.id for node in opened.tree.nodes), default=0),
    )
    return service.runs.start(run, partial(_run_turn, service, request, streaming))


async def _run_turn(
    service: ConversationService, request: TurnRequest, streaming: bool, run: TurnRun
) -> None:
    """Send a message and publish the events; the last one is ``done``, ``cancelled`` or ``error``."""
    try:
        async with request.stream(streaming=streaming) as stream:
            async for event in stream:
                if encoded := _encode_event(event):
                    run.publish(encoded)
        run.reply = reply = stream.reply
        turn = shape_reply(reply).model_dump(mode="json")
        run.finish("done", {"type": "done", "url": _node_url(run, reply.node), "turn": turn})
    except asyncio.CancelledError:
        url = await _find_unfinished(service, run)
        run.finish("cancelled", {"type": "cancelled", "url": url})
        raise
    except KedgeError as error:
        run.error = error
        url = await _find_unfinished(service, run)
        code, message = type(error).__name__, str(error)
        run.finish("failed", {"type": "error", "code": code, "message": message, "url": url})


async def _find_unfinished(service: ConversationService, run: TurnRun) -> str:
    """Return the URL of the last node that an unfinished run stored; empty if it stored none."""
    try:
        tree = await read_tree(service.store, await service.store.conversation(run.conversation))
    except StoreError:
        return ""
    below, last = {run.question or run.at}, 0
    for node in tree.nodes:  # parents come before their children
        if node.parent in below and node.id > run.newest:
            below.add(node.id)
            last = max(last, node.id)
    return _node_url(run, last) if last else ""


def _node_url(run: TurnRun, node: int) -> str:
    return f"/conversations/{quote(run.conversation, safe='')}?at={node}"


def _encode_event(event: Event) -> dict[str, Any] | None:
    match event:
        case TextDelta(delta=delta) | RefusalDelta(delta=delta):
            return {"type": "text", "delta": delta}
        case ReasoningDelta(delta=delta):
            return {"type": "reasoning", "delta": delta}
        case RequestPlanned(plan=plan):
            words = format_headline(plan, sizes=False)
            return {
                "type": "plan",
                "words": words,
                "plan": shape_plan(plan).model_dump(mode="json"),
            }
        case RequestSent(body_bytes=size, full_bytes=full):
            words = f"{format_size(size)} of {format_size(full)}."
            return {"type": "sent", "body_bytes": size, "full_bytes": full, "words": words}
        case ToolStarted(call=call):
            return {"type": "tool", "name": call.name, "call_id": call.call_id}
        case ToolFinished(call=call, outcome=outcome):
            return {"type": "tool_done", "name": call.name, "outcome": outcome}
        case Healed(reason=reason):
            return {"type": "healed", "reason": reason, "words": HEALING_TEXTS.get(reason, reason)}
        case ServerForgot():
            return {"type": "forgot", "words": "the server answered without the earlier context"}
        case AnswerFinished(outcome=outcome):
            return {"type": "answered", "response_id": outcome.response_id}
        case _:
            return None


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
