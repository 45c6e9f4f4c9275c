"""The JSON API: conversations, runs, response trees, plans and statistics."""

import math
from collections.abc import AsyncGenerator, Callable
from functools import cache
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kedge
from kedge._internal.responsive import compute
from kedge.analytics import Selection, analyze, analyze_conversations, analyze_over_time
from kedge.conversation import Conversation
from kedge.conversation.lookup import MODEL_KEY, add_candidates
from kedge.engines.responses import delete_unused_objects
from kedge.errors import NotInStore
from kedge.presentation.response_tree import build_response_tree
from kedge.server.sse import EventStreamResponse, encode_data
from kedge.store.conversations import reject_scheduled
from kedge.store.nodes import parse_position
from kedge.store.summaries import list_labels, load_attached
from kedge.store.tree import read_tree
from kedge.turns import dump_block, system, user
from kedge.web import attachments, schemas, send, shapes, workflow_runs
from kedge.web.openapi import ApiCall, Handler, Operation, RequestError, build_openapi
from kedge.web.runs import Run
from kedge.web.server_requests import flush_requests, load_request
from kedge.web.transcript import find_matches

F = TypeVar("F", bound=Handler)
DAY = 86_400.0
JSONL = "application/jsonl"
EVENT_STREAM = EventStreamResponse.media_type
MAX_MESSAGE_BYTES = 14_000_000
"""The maximum size of a request body with a message and its attachments."""
RUN_HEADER = "x-kedge-run"
"""The header of an event stream with the id of its run."""


OPERATIONS: list[Operation] = []
"""All operations of the API."""


def operation(method: str, path: str, **options: Any) -> Callable[[F], F]:
    """Return a decorator that adds a handler to the operations; see `Operation`."""

    def add(handler: F) -> F:
        OPERATIONS.append(Operation(method, path, handler, **options))
        return handler

    return add


@operation("GET", "/api/conversations")
async def list_conversations(call: ApiCall, query: schemas.ListQuery) -> shapes.ConversationPage:
    """List conversations."""
    rows, total, _ = await call.service.find(query)
    return shapes.ConversationPage(
        data=[shapes.shape_overview(row, call.service.status(row)) for row in rows],
        total=total,
        limit=query.limit,
        offset=query.offset,
    )


@operation("POST", "/api/conversations", status=201)
async def create_conversation(
    call: ApiCall, body: schemas.NewConversation
) -> shapes.ConversationShape:
    """Create a conversation."""
    service = call.service
    service.models.check_name(body.model)
    conversation = await Conversation.create(
        service.models.engine,
        store=service.store,
        title=body.title,
        tags=body.tags,
        blocks=[system(body.system)] if body.system else [],
        mode=body.mode,
        retention=body.retention,
        ttl=body.ttl,
        data={MODEL_KEY: body.model} if body.model else {},
        **service.settings,
    )
    return shapes.ConversationShape.model_validate(conversation.row)


@operation("GET", "/api/conversations/{id}")
async def read_conversation(call: ApiCall) -> shapes.OverviewShape:
    """Read a conversation."""
    summary = await call.service.summarize(await call.store.conversation(call.id))
    return shapes.shape_overview(summary, call.service.status(summary))


@operation("PATCH", "/api/conversations/{id}")
async def change_conversation(
    call: ApiCall, body: schemas.ConversationUpdate
) -> shapes.ConversationShape:
    """Rename, tag or archive a conversation, or change its mode, retention or expiry."""
    members = body.model_dump(exclude_unset=True)
    row = await call.store.update_with(call.id, lambda _: members)
    return shapes.ConversationShape.model_validate(row)


@operation("DELETE", "/api/conversations/{id}", status=204)
async def delete_conversation(call: ApiCall, query: schemas.DeleteQuery) -> Response:
    """Delete a conversation permanently."""
    row = await call.store.conversation(call.id)
    if query.undo:
        # Before the runs are stopped, so that none is started meanwhile; their answers are still stored.
        await call.service.deletions.schedule(call.store, row, query.undo)
        await call.service.runs.stop_all(row.id)
    else:
        await call.service.runs.stop_all(row.id)
        await call.store.delete(row)
        for engine in call.service.models.engines:
            await delete_unused_objects(engine, call.store)
    return Response(status_code=204)


@operation("POST", "/api/conversations/{id}/restore")
async def undo_deletion(call: ApiCall) -> shapes.ConversationShape:
    """Undo the deletion of a conversation."""
    row = await call.service.deletions.undo(call.store, call.id)
    return shapes.ConversationShape.model_validate(row)


@operation("GET", "/api/search")
async def search_messages(call: ApiCall, query: schemas.SearchQuery) -> shapes.SearchPage:
    """Search the text of all messages."""
    hits = await call.store.search(query.q, **query.model_dump(exclude={"q"}))
    data = [shapes.HitShape.of(hit, matches=find_matches(hit.excerpt, query.q)) for hit in hits]
    return shapes.SearchPage(data=data, limit=query.limit, offset=query.offset)


@operation("GET", "/api/conversations/{id}/turns", is_large=True)
async def read_turn(call: ApiCall, query: schemas.PathQuery) -> shapes.TurnPage:
    """Read the blocks of a conversation."""
    row = await call.store.conversation(call.id)
    node = await call.store.find_node(row, parse_position(query.at))
    if query.last is None:
        loaded = await call.store.load(row, node.id)
        blocks = loaded.blocks[query.offset :][: query.limit]
        offset = query.offset
    else:
        blocks = await call.store.last_blocks(row, query.last, node.id)
        offset = node.length - len(blocks)
    return shapes.TurnPage(
        conversation=row.id,
        node=node.id,
        blocks=await compute(lambda: list(map(dump_block, blocks))),
        offset=offset,
        total=node.length,
    )


@operation(
    "POST",
    "/api/conversations/{id}/runs",
    media_type=EVENT_STREAM,
    errors=(409, 502, 503),
    max_bytes=MAX_MESSAGE_BYTES,
)
async def start_run(call: ApiCall, body: schemas.NewRun) -> shapes.ReplyShape | Response:
    """Send a message and get the answer."""
    return await _answer(await send.start_run(call.service, call.id, body), stream=body.stream)


@operation(
    "POST", "/api/conversations/{id}/resume", media_type=EVENT_STREAM, errors=(409, 502, 503)
)
async def resume_run(call: ApiCall, body: schemas.NewResume) -> shapes.ReplyShape | Response:
    """Send a question without an answer again."""
    return await _answer(await send.start_resume(call.service, call.id, body), stream=body.stream)


@operation("POST", "/api/conversations/{id}/edit", errors=(409,))
async def edit_conversation(call: ApiCall, body: schemas.BlockEdit) -> shapes.EditShape:
    """Replace the text of a block without sending it."""
    return await send.edit_block(call.service, call.id, body)


async def _answer(run: Run, *, stream: bool) -> shapes.ReplyShape | Response:
    if stream:
        return _follow(run)
    await run.wait()
    if run.reply is not None:
        return shapes.shape_reply(run.reply)
    if run.error is not None:
        raise run.error
    if run.status == "failed":
        raise RequestError(500, "bug", "internal error; the log has the details")
    raise RequestError(
        409, "cancelled", "the run was stopped; what it stored is in the response tree"
    )


def _follow(run: Run) -> EventStreamResponse:
    """Return the events of a run from its first one, as server-sent events."""

    async def encoded_events() -> AsyncGenerator[bytes]:
        async for event in run.follow():
            yield encode_data(event) if event else b": still running\n\n"

    return EventStreamResponse(encoded_events(), headers={RUN_HEADER: run.id})


@operation("GET", "/api/conversations/{id}/runs")
async def list_runs(call: ApiCall) -> shapes.RunList:
    """List the active runs."""
    row = await call.store.conversation(call.id)
    reject_scheduled(row)
    data = [shapes.RunShape.model_validate(run) for run in call.service.runs.list(row.id)]
    return shapes.RunList(head=row.head, data=data)


@operation("GET", "/api/conversations/{id}/runs/{run}", media_type=EVENT_STREAM)
async def follow_run(call: ApiCall) -> Response:
    """Follow the events of a run."""
    return _follow(_find_run(call))


@operation("POST", "/api/conversations/{id}/runs/{run}/stop")
async def stop_run(call: ApiCall) -> shapes.RunShape:
    """Stop a run and store the partial answer."""
    run = _find_run(call)
    await run.stop()
    return shapes.RunShape.model_validate(run)


def _find_run(call: ApiCall) -> Run:
    run = call.service.runs.get(call.id, call.path["run"])
    if run is None:
        raise NotInStore("there is no such run; it may have ended before the server was started")
    return run


@operation("GET", "/api/conversations/{id}/tree")
async def read_response_tree(call: ApiCall, query: schemas.TreeQuery) -> shapes.ResponseTreeShape:
    """Read the response tree."""
    row = await call.store.conversation(call.id)
    tree = await read_tree(call.store, row)
    response_tree = build_response_tree(tree, call.service.clock())
    stored = {node.id: node for node in tree.nodes}
    ordered = sorted(response_tree.nodes, key=lambda node: node.id)
    rest = [node for node in ordered if node.id > query.after]
    nodes = rest[: query.limit]
    return shapes.ResponseTreeShape(
        conversation=row.id,
        head=response_tree.head,
        nodes=[
            shapes.shape_node(
                stored[node.id],
                tree.responses.get(node.id),
                node.marks,
                parent=node.parent,
                label=node.label,
            )
            for node in nodes
        ],
        total=len(ordered),
        has_more=len(rest) > len(nodes),
    )


@operation("GET", "/api/conversations/{id}/plan")
async def plan_request(call: ApiCall, query: schemas.PlanQuery) -> shapes.PlanShape:
    """Plan the next request without sending it."""
    opened = await call.service.open(call.id, query.at)
    row = opened.conversation.row
    turn = (await call.store.load(row, opened.node)).turn(row.id)
    if query.message:
        turn = turn.append(user(query.message))
    engine = opened.conversation.engine
    options = {"streaming": True, **opened.options}
    options = await add_candidates(engine, call.store, turn, options, row.retention)
    return shapes.shape_plan(engine.plan(turn, **options))


@operation("GET", "/api/conversations/{id}/plans/{node:number}")
async def read_plan(call: ApiCall) -> shapes.PlanShape:
    """Read the plan of a past request."""
    card = await call.service.load_plan_card(call.id, call.path["node"])
    return shapes.shape_request(card.row)


@operation("POST", "/api/conversations/{id}/fork", status=201)
async def fork_conversation(call: ApiCall, body: schemas.NewFork) -> shapes.ConversationShape:
    """Fork a conversation."""
    service = call.service
    opened = await Conversation.open(service.models.engine, store=service.store, id=call.id)
    forked = await opened.fork(body.previous_response_id or body.block or body.at, title=body.title)
    return shapes.ConversationShape.model_validate(forked.row)


@operation("GET", "/api/conversations/{id}/compare")
async def compare_branches(call: ApiCall, query: schemas.CompareQuery) -> shapes.ComparisonShape:
    """Compare two branches block by block."""
    comparison = await call.service.compare(call.id, query.left, query.right)
    return shapes.ComparisonShape.model_validate(comparison)


@operation(
    "GET",
    "/api/conversations/{id}/attachments/{block}/{index:number}",
    media_type="application/octet-stream",
    errors=(400,),
)
async def read_attachment(call: ApiCall) -> Response:
    """Read an attachment of a message."""
    block_id = call.path["block"]
    row = await call.store.conversation(call.id)
    blocks = await load_attached(call.store, row, block_id)
    return attachments.serve_attachment(blocks, block_id, call.path["index"])


@operation("GET", "/api/session")
async def read_session(call: ApiCall) -> shapes.SessionShape:
    """Read whose token or session a request was sent with."""
    return shapes.SessionShape(user=call.store.namespace)


@operation("GET", "/api/choices")
async def list_choices(call: ApiCall) -> shapes.ChoicesShape:
    """List tags and models."""
    tags, models = await list_labels(call.store)
    return shapes.ChoicesShape(tags=tags, models=models, choices=list(call.service.models.names))


@operation("GET", "/api/requests")
async def list_requests(call: ApiCall, query: schemas.RequestQuery) -> shapes.ProxiedPage:
    """List the requests of other programs."""
    await flush_requests(call.request)
    rows = await call.store.list_proxied(limit=query.limit, before=query.before)
    totals = await call.store.sum_proxied()
    return shapes.ProxiedPage.of(totals, data=rows)


@operation("GET", "/api/requests/{number:number}")
async def read_request(call: ApiCall) -> shapes.ProxiedDetail:
    """Read a request of another program."""
    row, before, after = await load_request(call.request, call.store)
    return shapes.ProxiedDetail.of(
        row,
        request=row.request and row.request.decode("utf-8", "replace"),
        response=row.response and row.response.decode("utf-8", "replace"),
        before=[previous.id for previous in before],
        after=[later.id for later in after],
    )


@operation("GET", "/api/conversations/{id}/export", media_type=JSONL)
async def export_conversation(call: ApiCall) -> Response:
    """Export a conversation."""
    row = await call.store.conversation(call.id)
    lines = await call.store.export(row)
    headers = {"content-disposition": attachments.format_disposition(f"{row.id}.jsonl")}
    return Response(lines, media_type=JSONL, headers=headers)


@operation("GET", "/api/workflows")
async def list_started_workflows(call: ApiCall) -> shapes.WorkflowPage:
    """List workflows."""
    rows = await workflow_runs.list_known_workflows(call.service)
    return shapes.WorkflowPage(data=list(map(shapes.shape_workflow, rows)))


@operation("POST", "/api/workflows", status=201, errors=(502, 503))
async def create_workflow(call: ApiCall, body: schemas.NewWorkflow) -> shapes.WorkflowShape:
    """Start a workflow."""
    run = await workflow_runs.start_workflow(call.service, body)
    return shapes.shape_workflow(
        await workflow_runs.load_known_workflow(call.service, run.conversation)
    )


@operation("GET", "/api/workflows/{id}")
async def read_workflow(call: ApiCall) -> shapes.WorkflowShape:
    """Read a workflow."""
    return shapes.shape_workflow(await workflow_runs.load_known_workflow(call.service, call.id))


@operation("GET", "/api/workflows/{id}/events", media_type=EVENT_STREAM)
async def follow_workflow(call: ApiCall) -> Response:
    """Follow a running workflow."""
    return _follow(workflow_runs.find_workflow_run(call.service, call.id))


@operation("POST", "/api/workflows/{id}/stop")
async def stop_workflow(call: ApiCall) -> shapes.WorkflowShape:
    """Stop a workflow."""
    await workflow_runs.find_workflow_run(call.service, call.id).stop()
    return shapes.shape_workflow(await workflow_runs.load_known_workflow(call.service, call.id))


@operation("GET", "/api/analytics")
async def read_analytics(call: ApiCall, query: schemas.RangeQuery) -> shapes.AnalyticsShape:
    """Read statistics of a time range."""
    selection = _build_selection(call, query)
    return shapes.AnalyticsShape.model_validate(await analyze(call.store, selection))


@operation("GET", "/api/analytics/over-time")
async def read_analytics_over_time(call: ApiCall, query: schemas.BucketQuery) -> shapes.BucketList:
    """Read statistics of intervals of a time range."""
    selection = _build_selection(call, query)
    buckets = await analyze_over_time(call.store, selection, buckets=query.buckets)
    return shapes.BucketList(data=list(buckets))


@operation("GET", "/api/analytics/conversations")
async def read_analytics_by_conversation(
    call: ApiCall, query: schemas.RangeQuery
) -> shapes.ConversationStatsList:
    """Read statistics of the conversations with the most requests."""
    conversations = await analyze_conversations(call.store, _build_selection(call, query))
    return shapes.ConversationStatsList(data=list(conversations))


def _build_selection(call: ApiCall, query: schemas.RangeQuery) -> Selection:
    until = query.until
    if until is None:
        until = math.nextafter(call.service.clock(), math.inf)
    since = query.since
    if since is None:
        since = max(until - DAY, 0.0)
    return Selection(since, until, query.model, query.provider, query.conversation)


@cache
def get_openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of the API, which is built when it is first needed."""
    return build_openapi(OPERATIONS, kedge.__version__)


async def read_openapi(_: Request) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(get_openapi_document())
