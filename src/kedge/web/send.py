"""Start runs: send a message in a conversation and publish its events, or start a workflow.

Attachments are parts of the blocks of a conversation, so they are deleted with it. Lists read only the beginning of
a block, and the page loads images from separate URLs, so that neither reads the content of attachments.

A workflow runs as a task of the server, with models of the server. Its judge is a model with a rubric,
because a judge that is a function would run code chosen by a client.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace
from starlette.responses import Response

from kedge import turns, workflows
from kedge._internal.display import format_size
from kedge.conversation import ConversationStream
from kedge.engines import Middleware
from kedge.errors import InvalidSetting, InvalidWorkflow, NotInStore, StoreError
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
from kedge.turns.attachments import split_data_url
from kedge.web import schemas
from kedge.web.openapi import RequestError
from kedge.web.runs import Run
from kedge.web.service import EDITED_KEY, ConversationService, OpenConversation, read_instructions
from kedge.web.shapes import EditShape, WorkflowShape, shape_plan, shape_reply
from kedge.workflows.roles import new_workflow_id

OpenStream = Callable[[], ConversationStream]


async def start_run(service: ConversationService, name: str, body: schemas.NewRun) -> Run:
    """Start a run that sends a message; the head moves when the answer arrives, so a failed run does not change it.

    Raises:
        KedgeError: The position to continue from, or the model that answers there, is not available; nothing was
            written.
    """
    at = body.previous_response_id or ("" if body.at is None else str(body.at))
    parts = [parse_attachment(each) for each in body.attachments]
    opened = await service.open(name, at, body.model, _build_middleware(body))
    if before := await _find_position_before(service, opened, body, at):
        opened = await service.open(name, before, body.model, _build_middleware(body))
    else:
        check_head(opened, body.head)
    options = {"key": body.key, **_build_options(body, opened)}
    node, keep = opened.node if at else None, None
    blocks: list[turns.Block] = [turns.user([body.message, *parts])]
    if body.edit is not None:
        edit = partial(_edit_user_block, text=body.message, added=parts)
        blocks, node, keep = await _edit_question(service, opened, body.edit, edit)
    stream = partial(opened.conversation.stream, *blocks, at=node, keep=keep, **options)
    return _add_run(service, opened, stream, body.message, node)


async def _find_position_before(
    service: ConversationService, opened: OpenConversation, body: schemas.NewRun, at: str
) -> str:
    """Return the position at which a message was sent before with the same key, if it has been answered since.

    The head has moved to the answer, so that the request is compared with the first one as it was then. Empty if
    the message has no answer, or if its request means the same as before.
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
    """Return the node with the block that an edited question has replaced; empty if there is none."""
    parents = {node.id: node.parent for node in opened.tree.nodes}
    parent = parents.get(question)
    for node, above in parents.items():
        if node < question and parent in (node, above):
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
    options = {"restart": body.restart, **_build_options(body, opened)}
    stream = partial(opened.conversation.stream_resume, body.node, **options)
    message = opened.tree.questions.get(body.node, "")
    return _add_run(service, opened, stream, message, question.parent, body.node)


def _build_options(
    settings: schemas.NewRun | schemas.NewResume, opened: OpenConversation
) -> dict[str, Any]:
    """Return the options of a request; each provider's engine maps their names."""
    members = {"reasoning", "temperature", "top_p", "max_output_tokens"}
    options = settings.model_dump(include=members, exclude_none=True)
    if settings.effort is not None:
        options.setdefault("reasoning", {})["effort"] = settings.effort
    given = {name: value for name, value in options.items() if value != {}}
    return {"streaming": settings.stream, **given, **opened.options}


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
    return turn.insert(0, turns.system(text)) if text else turn


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
    at = opened.node if at is None else at
    run = Run(opened.conversation.id, at, message, question, newest)
    send, find_url = partial(_publish_events, open_stream), partial(_find_unfinished, service)
    return service.runs.start(run, send, find_url)


async def _publish_events(open_stream: OpenStream, run: Run) -> dict[str, Any]:
    """Send a message and publish the events; return the members of the last one."""
    async with open_stream() as stream:
        async for event in stream:
            if encoded := _encode_event(event):
                run.publish(encoded)
    run.reply = reply = stream.reply
    encoded = shape_reply(reply).model_dump(mode="json")
    return {"url": _node_url(run, reply.node), "reply": encoded}


async def _find_unfinished(service: ConversationService, run: Run) -> str:
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


def _node_url(run: Run, node: int) -> str:
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
    block = next((block for block in blocks if block.id == block_id), None)
    parts = block.parts if isinstance(block, turns.UserBlock | turns.ToolResultBlock) else ()
    part = parts[index] if index < len(parts) else None
    match part:
        case turns.ImagePart(url=url) if url.startswith("data:"):
            data, headers = url, dict[str, str]()
        case turns.FilePart(data=data) if data:
            headers = {"content-disposition": format_disposition(part.filename or "attachment")}
        case _:
            raise NotInStore(f"there is no attachment {index} in block {block_id!r}")
    media_type, content = _parse_data_url(data)
    if media_type not in (*schemas.IMAGE_TYPES, *schemas.FILE_TYPES):
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
    media_type, content = split_data_url(url)
    if not (media_type or content):
        raise InvalidSetting("an attachment must be a data URL with base64 content")
    try:
        return media_type.lower(), base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSetting("the base64 content of an attachment is invalid") from None


MAX_WORKFLOWS = 200
"""The maximum number of workflows in a list."""


async def start_workflow(service: ConversationService, body: schemas.NewWorkflow) -> Run:
    """Start a workflow, and return when it is stored.

    Raises:
        InvalidWorkflow: A member that its kind requires is missing; nothing was stored.
        InvalidSetting: The server has no such model; nothing was stored.
    """
    check_workflow(body)
    for model in (body.model, body.judge_model, *(side.model for side in body.sides)):
        service.models.check_name(model)
    run = Run(new_workflow_id(), 0, body.question)

    def on_event(event: object) -> None:
        run.publish({"type": "progress", "event": type(event).__name__})

    async def find_url(run: Run) -> str:
        return f"/workflows/{run.conversation}"

    async def work(run: Run) -> dict[str, Any]:
        await _build_workflow(service, body, run.conversation, on_event)
        return {"url": await find_url(run)}

    service.runs.start(run, work, find_url)
    async for _ in run.follow():  # the first event: its conversations are stored by then
        break
    if run.error is not None:
        raise run.error
    return run


def check_workflow(body: schemas.NewWorkflow) -> None:
    """Raise ``InvalidWorkflow`` for a workflow that cannot run."""
    required = {"question": "", "rubric": "; describe how the answers are judged"}
    if body.kind == "steps":
        required = {"steps": "; add at least one step"}
    for name, advice in required.items():
        if not getattr(body, name):
            raise InvalidWorkflow(f"{body.kind}: {name!r} is missing{advice}")
    if body.kind == "debate" and len(body.sides) < 2:
        raise InvalidWorkflow("debate: 'sides' needs at least two participants")


def _build_workflow(
    service: ConversationService, body: schemas.NewWorkflow, workflow: str, on_event: Any
) -> Awaitable[Any]:
    models = service.models
    engine = models.engine_for(body.model)
    common: dict[str, Any] = {"store": service.store, "workflow": workflow, "on_event": on_event}
    judge = workflows.ModelJudge(models.engine_for(body.judge_model or body.model), body.rubric)
    match body.kind:
        case "refine":
            return workflows.refine(
                body.question, judge=judge, engine=engine, rounds=body.rounds, **common
            )
        case "debate":
            sides = [
                workflows.Side(each.name, models.engine_for(each.model or body.model), each.brief)
                for each in body.sides
            ]
            return workflows.debate(body.question, sides, judge=judge, rounds=body.rounds, **common)
        case "steps":
            return workflows.steps(
                [workflows.Step(each.name, each.prompt) for each in body.steps],
                engine=engine,
                **common,
            )


async def list_known_workflows(service: ConversationService) -> list[workflows.Workflow]:
    """List the newest workflows, the most recently changed first."""
    rows = await workflows.list_workflows(service.store, limit=MAX_WORKFLOWS)
    return [_mark_interrupted(service, row) for row in rows]


async def load_known_workflow(service: ConversationService, name: str) -> workflows.Workflow:
    """Load a workflow."""
    return _mark_interrupted(service, await workflows.load_workflow(service.store, name))


def _mark_interrupted(
    service: ConversationService, workflow: workflows.Workflow
) -> workflows.Workflow:
    """Return a workflow with its status; one that is not running here any more is interrupted."""
    is_over = workflow.status == "running" and not service.runs.list(workflow.id)
    return replace(workflow, status="interrupted") if is_over else workflow


def find_workflow_run(service: ConversationService, name: str) -> Run:
    """Return the run of a workflow.

    Raises:
        NotInStore: It is not running here.
    """
    runs = service.runs.list(name)
    if not runs:
        raise NotInStore(f"workflow {name!r} is not running here")
    return runs[0]


def to_workflow_shape(workflow: workflows.Workflow) -> WorkflowShape:
    """Convert a workflow to its API form."""
    conversations = {chain.role: chain.conversation for chain in workflow.chains}
    return WorkflowShape.of(workflow, conversations=conversations)
