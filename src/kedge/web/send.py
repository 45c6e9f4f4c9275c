"""Start runs: send a message in a conversation, or a stored question again, and publish the events."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from kedge import turns
from kedge._internal.display import format_size
from kedge.conversation import ConversationStream
from kedge.engines import Middleware
from kedge.errors import InvalidSetting, NotInStore, StoreError
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
from kedge.presentation.wording import HEALING_TEXTS
from kedge.store.tree import iter_block_ranges, path_to, read_tree
from kedge.web import schemas
from kedge.web.attachments import parse_attachment
from kedge.web.openapi import RequestError
from kedge.web.runs import Run
from kedge.web.service import EDITED_KEY, ConversationService, OpenConversation, read_instructions
from kedge.web.shapes import EditShape, shape_plan, shape_reply

OpenStream = Callable[[], ConversationStream]


async def start_run(service: ConversationService, name: str, body: schemas.NewRun) -> Run:
    """Start a run that sends a message; the head moves when the answer arrives, so a failed run does not change it.

    Raises:
        KedgeError: The position to continue from, or the model that answers there, is not available; nothing was
            written.
    """
    parts = [parse_attachment(attachment) for attachment in body.attachments]
    at = _read_position(body)
    middleware = _build_middleware(body)
    opened = await service.open(name, at, body.model, middleware)
    before = await _find_position_before(service, opened, body, at)
    if before:
        opened = await service.open(name, before, body.model, middleware)
    else:
        check_head(opened, body.head)

    blocks: list[turns.Block] = [turns.user([body.message, *parts])]
    node = opened.node if at else None
    keep: int | None = None
    if body.edit is not None:
        edit = partial(_edit_user_block, text=body.message, added=parts)
        blocks, node, keep = await _edit_question(service, opened, body.edit, edit)

    options = _build_options(body, opened)
    stream = opened.conversation.stream
    open_stream = partial(stream, *blocks, at=node, keep=keep, key=body.key, **options)
    return _add_run(service, opened, open_stream, body.message, node)


def _read_position(body: schemas.NewRun) -> str:
    """Return the node or the response id to continue from; empty for the head."""
    if body.previous_response_id:
        return body.previous_response_id
    return "" if body.at is None else str(body.at)


async def _find_position_before(
    service: ConversationService, opened: OpenConversation, body: schemas.NewRun, at: str
) -> str:
    """Return the position that the first request with the same key continued from, if it was answered; else empty.

    The answer has moved the head, so "after the head" and "this block of the path" mean something else now. A request
    that names its position, or has the current head, means the same as before, and needs no position.
    """
    row = opened.conversation.row
    is_moved = body.head is not None and body.head != row.head
    is_on_path = body.edit is None or bool(at)
    if not body.key or (is_on_path and not is_moved):
        return ""
    claim = await service.store.find_claim(row, body.key)
    if claim is None or not claim.answer:
        return ""
    if at:
        return at
    if body.head is not None:
        return str(body.head)
    return await _find_edited(service, opened, claim.question, body.edit or "")


async def _find_edited(
    service: ConversationService, opened: OpenConversation, question: int, block_id: str
) -> str:
    """Return the node with the block that an edited question has replaced; empty if there is none.

    The block was added by the parent of the question, or by a sibling of the question that is older.
    """
    parents = {node.id: node.parent for node in opened.tree.nodes}
    parent = parents.get(question)
    for node, parent_of_node in parents.items():
        if node < question and parent in (node, parent_of_node):
            loaded = await service.store.load(opened.conversation.row, node)
            if any(block.id == block_id for block in loaded.blocks):
                return str(node)
    return ""


async def start_resume(service: ConversationService, name: str, body: schemas.NewResume) -> Run:
    """Start a run that sends a stored question again.

    Raises:
        KedgeError: If there is no such question, or its model is not available; nothing was written.
    """
    opened = await service.open(name, str(body.node), body.model, _build_middleware(body))
    check_head(opened, body.head)
    question = next(node for node in opened.tree.nodes if node.id == body.node)
    if question.kind != "asked":
        raise NotInStore(f"node {body.node} is not a question; pass the node of a question")
    options = _build_options(body, opened)
    resume = opened.conversation.stream_resume
    open_stream = partial(resume, body.node, restart=body.restart, **options)
    message = opened.tree.questions.get(body.node, "")
    return _add_run(service, opened, open_stream, message, question.parent, body.node)


def _build_options(
    settings: schemas.NewRun | schemas.NewResume, opened: OpenConversation
) -> dict[str, Any]:
    """Return the options of a request; each provider's engine maps their names."""
    members = {"reasoning", "temperature", "top_p", "max_output_tokens"}
    options = settings.model_dump(include=members, exclude_none=True)
    reasoning = options.pop("reasoning", {})
    if settings.effort is not None:
        reasoning["effort"] = settings.effort
    if reasoning:
        options["reasoning"] = reasoning
    return {"streaming": settings.stream, **options, **opened.options}


def _build_middleware(settings: schemas.RequestSettings) -> tuple[Middleware, ...]:
    text = settings.system
    if text is None:
        return ()
    return (two_phase(lambda turn: _replace_instructions(turn, text), name="settings"),)


def _replace_instructions(turn: turns.Turn, text: str) -> turns.Turn:
    """Replace the leading system text of a Turn; no digest includes it, so anchors remain valid."""
    if read_instructions(turn.blocks) == text:
        return turn
    for block in turn.leading:
        turn = turn.remove(block.id)
    if text:
        turn = turn.insert(0, turns.system(text))
    return turn


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
    edit: Callable[[turns.Block], turns.Block],
) -> tuple[list[turns.Block], int, int | None]:
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
    raise _missing_block(block_id, opened.node)


def _missing_block(block_id: str, node: int) -> NotInStore:
    return NotInStore(f"there is no block {block_id!r} on the path to node {node}")


def _edit_user_block(
    block: turns.Block, text: str, added: Sequence[turns.Part] = ()
) -> turns.Block:
    """Replace the text of a user block that is sent again; images and files are retained."""
    if not isinstance(block, turns.UserBlock):
        raise InvalidSetting("only user messages can be edited and sent again")
    return _replace_text(block, text, added, {**block.metadata, EDITED_KEY: block.id})


def _replace_text(
    block: turns.Block,
    text: str,
    added: Sequence[turns.Part] = (),
    metadata: Mapping[str, Any] | None = None,
) -> turns.Block:
    match block:
        case turns.UserBlock():
            rest = (part for part in block.parts if not isinstance(part, turns.TextPart))
            return turns.user([turns.TextPart(text), *rest, *added], metadata=metadata or {})
        case turns.AssistantBlock():
            return turns.assistant(text)
        case turns.SystemBlock():
            return turns.system(text, role=block.role)
        case _:
            raise InvalidSetting(
                "only messages of the user, the model and the system can be edited"
            )


async def edit_block(service: ConversationService, name: str, body: schemas.BlockEdit) -> EditShape:
    """Replace the text of a block on the path to the head; nothing is sent.

    Raises:
        InvalidSetting: The block has no text that can be replaced.
        NotInStore: There is no such block.
        HeadConflict: The head has moved.
    """
    opened = await service.open(name)
    check_head(opened, body.head)
    conversation = opened.conversation
    old = next((block for block in conversation.turn.blocks if block.id == body.block), None)
    if old is None:
        raise _missing_block(body.block, opened.node)
    node = await conversation.edit(body.block, _replace_text(old, body.text))
    return EditShape(conversation=conversation.id, node=node.id)


def _add_run(
    service: ConversationService,
    opened: OpenConversation,
    open_stream: OpenStream,
    message: str,
    at: int | None,
    question: int = 0,
) -> Run:
    """Start a run that sends a message after a node, by default the head; it continues if the client disconnects."""
    newest = max((node.id for node in opened.tree.nodes), default=0)
    if at is None:
        at = opened.node
    run = Run(opened.conversation.id, at, message, question, newest)
    work = partial(_publish_events, open_stream)
    find_url = partial(_find_unfinished, service)
    return service.runs.start(run, work, find_url)


async def _publish_events(open_stream: OpenStream, run: Run) -> dict[str, Any]:
    """Send a message and publish the events; return the members of the last one."""
    async with open_stream() as stream:
        async for event in stream:
            encoded = _encode_event(event)
            if encoded is not None:
                run.publish(encoded)
    reply = stream.reply
    run.reply = reply
    url = _build_url(run, reply.node)
    return {"url": url, "reply": shape_reply(reply).model_dump(mode="json")}


async def _find_unfinished(service: ConversationService, run: Run) -> str:
    """Return the URL of the last node that an unfinished run stored; empty if it stored none."""
    try:
        tree = await read_tree(service.store, await service.store.conversation(run.conversation))
    except StoreError:
        return ""
    start = run.question or run.at
    stored = {start}
    for node in tree.nodes:  # parents come before their children
        if node.parent in stored and node.id > run.newest:
            stored.add(node.id)
    stored.remove(start)
    return _build_url(run, max(stored)) if stored else ""


def _build_url(run: Run, node: int) -> str:
    return f"/conversations/{quote(run.conversation, safe='')}?at={node}"


def _encode_event(event: Event) -> dict[str, Any] | None:
    match event:
        case TextDelta(delta=delta) | RefusalDelta(delta=delta):
            return {"type": "text", "delta": delta}
        case ReasoningDelta(delta=delta):
            return {"type": "reasoning", "delta": delta}
        case RequestPlanned(plan=plan):
            words = format_headline(plan, sizes=False)
            encoded = shape_plan(plan).model_dump(mode="json")
            return {"type": "plan", "words": words, "plan": encoded}
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
