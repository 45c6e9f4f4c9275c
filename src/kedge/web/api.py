"""The JSON API: conversations, turns, chains, plans and statistics."""

import math
from collections.abc import AsyncGenerator
from dataclasses import asdict
from functools import cache
from typing import Any

from msgspec import structs
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kedge
from kedge.analytics import Selection, analyze, analyze_conversations, analyze_over_time
from kedge.conversation import Conversation
from kedge.conversation.anchor_index import add_candidates
from kedge.conversation.recorded_model import MODEL_KEY
from kedge.engines.responses import delete_unused_objects
from kedge.errors import NotInStore
from kedge.providers.practice_memory import erase_deleted
from kedge.server.sse import EventStreamResponse, encode_data
from kedge.store import ConversationRow
from kedge.store.proxied_requests import MAX_PROXIED
from kedge.store.summaries import (
    list_labels,
    list_summaries,
    load_attached,
)
from kedge.store.tree import build_response_graph, read_tree
from kedge.turns import dump_block, system, user
from kedge.web import schemas
from kedge.web.attachments import format_disposition, serve_attachment
from kedge.web.openapi import (
    ApiCall,
    Operation,
    RequestError,
    build_openapi,
)
from kedge.web.runs import TurnRun
from kedge.web.send import (
    TurnRequest,
    edit_block,
    resolve_resume,
    resolve_turn,
    start_run,
)
from kedge.web.server_requests import find_chain, flush_requests
from kedge.web.shapes import (
    shape_conversation,
    shape_node,
    shape_overview,
    shape_plan,
    shape_reply,
    shape_request,
)
from kedge.web.transcript import find_matches
from kedge.web.workflows import (
    find_workflow_run,
    list_with_runs,
    load_running,
    start_workflow,
    to_workflow_shape,
)

DAY = 86_400.0
JSONL = "application/jsonl"
EVENT_STREAM = EventStreamResponse.media_type
MAX_TURN_BYTES = 14_000_000
"""The maximum size of a request body with a message and its attachments."""
RUN_HEADER = "x-kedge-run"
"""The header of an event stream with the id of its run."""


async def list_conversations(call: ApiCall) -> BaseModel:
    """List conversations."""
    query: schemas.ListQuery = call.query
    page = await call.service.find(query)
    return schemas.ConversationPage(
        data=[shape_overview(summary, call.service.status(summary)) for summary in page.rows],
        total=page.total,
        limit=query.limit,
        offset=query.offset,
    )


async def create_conversation(call: ApiCall) -> BaseModel:
    """Create a conversation."""
    body: schemas.NewConversation = call.body
    service = call.service
    service.models.check_name(body.model)
    conversation = await Conversation.create(
        service.models.engine,
        store=service.store,
        title=body.title,
        tags=body.tags,
        blocks=[system(body.system)] if body.system else [],
        mode=body.mode,
        ttl=body.ttl,
        data={MODEL_KEY: body.model} if body.model else {},
        **service.settings,
    )
    return shape_conversation(conversation.row)


async def read_conversation(call: ApiCall) -> BaseModel:
    """Return a conversation with its totals."""
    row = await call.service.store.conversation(call.path_text("id"))
    summaries, _ = await list_summaries(
        call.service.store, show="all", ids=[row.id], scheduled=True
    )
    return shape_overview(summaries[0], call.service.status(summaries[0]))


async def change_conversation(call: ApiCall) -> BaseModel:
    """Change the title or tags, archive or restore."""
    body: schemas.ConversationUpdate = call.body
    row = await call.service.store.update(
        call.path_text("id"), title=body.title, tags=body.tags, archived=body.archived
    )
    return shape_conversation(row)


async def delete_conversation(call: ApiCall) -> Response:
    """Stop the runs of a conversation and delete it permanently, now or after some time."""
    row = await call.service.store.conversation(call.path_text("id"))
    await call.service.runs.stop_all(row.id)
    if call.query.undo:
        await call.service.deletions.schedule(call.service.store, row, call.query.undo)
    else:
        await call.service.store.delete(row)
        await erase_deleted(call.service.store)
        for engine in call.service.models.engines:
            await delete_unused_objects(engine, call.service.store)
    return Response(status_code=204)


async def undo_deletion(call: ApiCall) -> BaseModel:
    """Retain a conversation that is about to be deleted."""
    row = await call.service.deletions.undo(call.service.store, call.path_text("id"))
    return shape_conversation(row)


async def search_messages(call: ApiCall) -> BaseModel:
    """Search the text of all messages, forks included."""
    query: schemas.SearchQuery = call.query
    hits = await call.service.store.search(query.q, **query.model_dump(exclude={"q"}))
    data = [
        schemas.HitShape(**structs.asdict(hit), matches=find_matches(hit.excerpt, query.q))
        for hit in hits
    ]
    return schemas.SearchPage(data=data, limit=query.limit, offset=query.offset)


async def read_turns(call: ApiCall) -> BaseModel:
    """Return the blocks of a conversation."""
    row, node = await _resolve_node(call)
    query: schemas.PathQuery = call.query
    total = (await call.service.store.node(row, node)).length
    if query.last is None:
        blocks, offset = (await call.service.store.load(row, node)).blocks, query.offset
        blocks = blocks[offset : None if query.limit is None else offset + query.limit]
    else:
        blocks = await call.service.store.last_blocks(row, query.last, node)
        offset = total - len(blocks)
    return schemas.TurnPage(
        conversation=row.id,
        node=node,
        blocks=[dump_block(block) for block in blocks],
        offset=offset,
        total=total,
    )


async def take_turn(call: ApiCall) -> BaseModel | Response:
    """Send a message and return the answer, complete or as server-sent events."""
    body: schemas.NewTurn = call.body
    request = await resolve_turn(call.service, call.path_text("id"), body)
    return await _run(call, request, stream=body.stream)


async def resume_turn(call: ApiCall) -> BaseModel | Response:
    """Send a question without an answer again, and return the answer."""
    body: schemas.NewResume = call.body
    request = await resolve_resume(call.service, call.path_text("id"), body)
    return await _run(call, request, stream=body.stream)


async def edit_conversation(call: ApiCall) -> BaseModel:
    """Replace the text of a block; nothing is sent."""
    return await edit_block(call.service, call.path_text("id"), call.body)


async def _run(call: ApiCall, request: TurnRequest, *, stream: bool) -> BaseModel | Response:
    run = start_run(call.service, request, streaming=stream)
    if stream:
        return _follow(run)
    await run.wait()
    if run.reply is not None:
        return shape_reply(run.reply)
    if run.error is not None:
        raise run.error
    if run.status == "failed":
        raise RequestError(500, "bug", "internal error; the log has the details")
    raise RequestError(409, "cancelled", "the turn was stopped; what it stored is in the chain")


def _follow(run: TurnRun) -> EventStreamResponse:
    """Return the events of a run from its first one, as server-sent events."""

    async def encoded_events() -> AsyncGenerator[bytes]:
        async for event in run.follow():
            yield encode_data(event) if event else b": still running\n\n"

    return EventStreamResponse(encoded_events(), headers={RUN_HEADER: run.id})


async def list_runs(call: ApiCall) -> BaseModel:
    """Return the running turns of a conversation, and its head."""
    row = await call.service.store.conversation(call.path_text("id"))
    data = [schemas.RunShape.model_validate(run) for run in call.service.runs.list(row.id)]
    return schemas.RunList(head=row.head, data=data)


async def follow_run(call: ApiCall) -> Response:
    """Return the events of a turn from its first one, while it runs or after it has ended."""
    return _follow(_find_run(call))


async def stop_run(call: ApiCall) -> BaseModel:
    """Stop a turn; the partial answer is stored."""
    run = _find_run(call)
    await run.stop()
    return schemas.RunShape.model_validate(run)


def _find_run(call: ApiCall) -> TurnRun:
    run = call.service.runs.get(call.path_text("id"), call.path_text("run"))
    if run is None:
        raise NotInStore("there is no such run; it may have ended before the server was started")
    return run


async def read_chain(call: ApiCall) -> BaseModel:
    """Return the tree of responses, complete or a page of it."""
    query: schemas.ChainQuery = call.query
    row = await call.service.store.conversation(call.path_text("id"))
    tree = await read_tree(call.service.store, row)
    chain = build_response_graph(tree, call.service.clock())
    stored = {node.id: node for node in tree.nodes}
    listed = sorted(chain.nodes, key=lambda node: node.id)
    rest = [node for node in listed if node.id > query.after]
    nodes = rest[: query.limit]
    return schemas.ChainShape(
        conversation=row.id,
        head=chain.head,
        nodes=[
            shape_node(
                stored[node.id],
                tree.responses.get(node.id),
                parent=node.parent,
                label=node.label,
                marks=list(node.marks),
            )
            for node in nodes
        ],
        total=len(listed),
        has_more=len(rest) > len(nodes),
    )


async def plan_turn(call: ApiCall) -> BaseModel:
    """Plan the next request; nothing is sent."""
    query: schemas.PlanQuery = call.query
    opened = await call.service.open(call.path_text("id"), query.at)
    row = opened.conversation.row
    turn = (await call.service.store.load(row, opened.node)).turn(row.id)
    turn = turn.append(user(query.text)) if query.text else turn
    engine, store = opened.conversation.engine, call.service.store
    options = {"streaming": True, **opened.options}
    options = await add_candidates(engine, store, turn, options, row.retention)
    return shape_plan(engine.plan(turn, **options))


async def read_plan(call: ApiCall) -> BaseModel:
    """Return the plan of a past request."""
    card = await call.service.load_plan_card(call.path_text("id"), call.path_int("node"))
    return shape_request(card.row)


async def fork_conversation(call: ApiCall) -> BaseModel:
    """Create a conversation that continues from a position in this one."""
    body: schemas.NewFork = call.body
    service = call.service
    opened = await Conversation.open(
        service.models.engine, store=service.store, id=call.path_text("id")
    )
    forked = await opened.fork(body.previous_response_id or body.block or body.at, title=body.title)
    return shape_conversation(forked.row)


async def compare_branches(call: ApiCall) -> BaseModel:
    """Compare the paths to two positions block by block."""
    query: schemas.CompareQuery = call.query
    comparison = await call.service.compare(call.path_text("id"), query.left, query.right)
    return schemas.ComparisonShape.model_validate(comparison)


async def read_attachment(call: ApiCall) -> Response:
    """Return the content of an attachment of a message."""
    store, block = call.service.store, call.path_text("block")
    row = await store.conversation(call.path_text("id"))
    return serve_attachment(await load_attached(store, row, block), block, call.path_int("index"))


async def list_choices(call: ApiCall) -> BaseModel:
    """Return the tags and models of the conversations, and the models that can answer."""
    tags, models = await list_labels(call.service.store)
    return schemas.ChoicesShape(tags=tags, models=models, choices=list(call.service.models.names))


async def list_requests(call: ApiCall) -> BaseModel:
    """List the requests of other programs, newest first."""
    query: schemas.RequestQuery = call.query
    await flush_requests(call.request)
    store = call.service.store
    rows = await store.list_proxied(limit=query.limit, before=query.before)
    totals = await store.sum_proxied()
    return schemas.ProxiedPage.model_validate({**asdict(totals), "data": rows})


async def read_request(call: ApiCall) -> BaseModel:
    """Return a request of another program, with its bodies if they are stored."""
    await flush_requests(call.request)
    store = call.service.store
    row = await store.get_proxied(call.path_int("number"))
    before, after = find_chain(await store.list_proxied(limit=MAX_PROXIED), row)
    names = set(schemas.ProxiedShape.model_fields)
    members = {name: getattr(row, name) for name in names}
    members["before"] = [each.id for each in before]
    members["after"] = [each.id for each in after]
    members["request"], members["response"] = map(_decode_body, (row.request, row.response))
    return schemas.ProxiedDetail.model_validate(members)


def _decode_body(body: bytes | None) -> str | None:
    return None if body is None else body.decode("utf-8", "replace")


async def export_conversation(call: ApiCall) -> Response:
    """Export a conversation as JSON lines."""
    row = await call.service.store.conversation(call.path_text("id"))
    lines = await call.service.store.export(row)
    headers = {"content-disposition": format_disposition(f"{row.id}.jsonl")}
    return Response(lines, media_type=JSONL, headers=headers)


async def list_started_workflows(call: ApiCall) -> BaseModel:
    """List the newest workflows, the most recently changed first."""
    data = [to_workflow_shape(row, run) for row, run in await list_with_runs(call.service)]
    return schemas.WorkflowPage(data=data)


async def create_workflow(call: ApiCall) -> BaseModel:
    """Start a workflow."""
    run = await start_workflow(call.service, call.body)
    return to_workflow_shape(*await load_running(call.service, run.conversation))


async def read_workflow(call: ApiCall) -> BaseModel:
    """Return a workflow."""
    return to_workflow_shape(*await load_running(call.service, call.path_text("id")))


async def follow_workflow(call: ApiCall) -> Response:
    """Return the events of a workflow that is running, as server-sent events."""
    return _follow(find_workflow_run(call.service, call.path_text("id")))


async def stop_workflow(call: ApiCall) -> BaseModel:
    """Stop a workflow; what it stored remains."""
    await find_workflow_run(call.service, call.path_text("id")).stop()
    return to_workflow_shape(*await load_running(call.service, call.path_text("id")))


async def read_analytics(call: ApiCall) -> BaseModel:
    """Return statistics of the responses in a time range."""
    selection = _build_selection(call)
    return schemas.AnalyticsShape.model_validate(await analyze(call.service.store, selection))


async def read_analytics_over_time(call: ApiCall) -> BaseModel:
    """Return statistics of intervals of a time range."""
    query: schemas.BucketQuery = call.query
    selection = _build_selection(call)
    buckets = await analyze_over_time(call.service.store, selection, buckets=query.buckets)
    return schemas.BucketList(data=list(buckets))


async def read_analytics_by_conversation(call: ApiCall) -> BaseModel:
    """Return statistics of the conversations with the most requests in a time range."""
    conversations = await analyze_conversations(call.service.store, _build_selection(call))
    return schemas.ConversationStatsList(data=list(conversations))


def _build_selection(call: ApiCall) -> Selection:
    query: schemas.RangeQuery = call.query
    until = math.nextafter(call.service.clock(), math.inf) if query.until is None else query.until
    since = max(until - DAY, 0.0) if query.since is None else query.since
    return Selection(since, until, query.model, query.provider, query.conversation)


async def _resolve_node(call: ApiCall) -> tuple[ConversationRow, int]:
    row = await call.service.store.conversation(call.path_text("id"))
    return row, (await call.service.store.find_node(row, call.query.at)).id


_CONVERSATION_PATH = "/api/conversations/{id}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET", "/api/conversations", list_conversations, "List conversations",
        schemas.ConversationPage, query=schemas.ListQuery,
    ),
    Operation(
        "POST", "/api/conversations", create_conversation, "Create a conversation",
        schemas.ConversationShape, body=schemas.NewConversation, status=201,
    ),
    Operation(
        "GET", _CONVERSATION_PATH, read_conversation, "Read a conversation", schemas.OverviewShape, errors=(404,)
    ),
    Operation(
        "PATCH", _CONVERSATION_PATH, change_conversation, "Rename, tag or archive a conversation",
        schemas.ConversationShape, body=schemas.ConversationUpdate, errors=(404,),
    ),
    Operation(
        "DELETE", _CONVERSATION_PATH, delete_conversation, "Delete a conversation permanently",
        query=schemas.DeleteQuery, status=204, errors=(404,),
    ),
    Operation(
        "POST", f"{_CONVERSATION_PATH}/restore", undo_deletion, "Undo the deletion of a conversation",
        schemas.ConversationShape, errors=(404,),
    ),
    Operation(
        "GET", "/api/search", search_messages, "Search the text of all messages", schemas.SearchPage,
        query=schemas.SearchQuery,
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/turns", read_turns, "Read the blocks of a conversation", schemas.TurnPage,
        query=schemas.PathQuery, errors=(404,),
    ),
    Operation(
        "POST", f"{_CONVERSATION_PATH}/turns", take_turn, "Send a message and get the answer", schemas.TurnShape,
        body=schemas.NewTurn, media_type=EVENT_STREAM, errors=(404, 409, 502, 503), max_bytes=MAX_TURN_BYTES,
    ),
    Operation(
        "POST", f"{_CONVERSATION_PATH}/resume", resume_turn, "Send a question without an answer again",
        schemas.TurnShape, body=schemas.NewResume, media_type=EVENT_STREAM, errors=(404, 409, 502, 503),
    ),
    Operation(
        "POST", f"{_CONVERSATION_PATH}/edit", edit_conversation, "Replace the text of a block without sending it",
        schemas.EditShape, body=schemas.BlockEdit, errors=(404, 409),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/runs", list_runs, "List the running turns", schemas.RunList, errors=(404,)
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/runs/{{run}}", follow_run, "Follow the events of a turn",
        media_type=EVENT_STREAM, errors=(404,),
    ),
    Operation(
        "POST", f"{_CONVERSATION_PATH}/runs/{{run}}/stop", stop_run, "Stop a turn and store the partial answer",
        schemas.RunShape, errors=(404,),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/chain", read_chain, "Read the tree of responses", schemas.ChainShape,
        query=schemas.ChainQuery, errors=(404,),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/plan", plan_turn, "Plan the next request without sending it",
        schemas.PlanShape, query=schemas.PlanQuery, errors=(404,),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/plans/{{node:number}}", read_plan, "Read the plan of a past request",
        schemas.PlanShape, errors=(404,),
    ),
    Operation(
        "POST", f"{_CONVERSATION_PATH}/fork", fork_conversation, "Fork a conversation", schemas.ConversationShape,
        body=schemas.NewFork, status=201, errors=(404,),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/compare", compare_branches, "Compare two branches block by block",
        schemas.ComparisonShape, query=schemas.CompareQuery, errors=(404,),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/attachments/{{block}}/{{index:number}}", read_attachment,
        "Read an attachment of a message", media_type="application/octet-stream", errors=(400, 404),
    ),
    Operation(
        "GET", f"{_CONVERSATION_PATH}/export", export_conversation, "Export a conversation", media_type=JSONL,
        errors=(404,),
    ),
    Operation("GET", "/api/workflows", list_started_workflows, "List workflows", schemas.WorkflowPage),
    Operation(
        "POST", "/api/workflows", create_workflow, "Start a workflow", schemas.WorkflowShape,
        body=schemas.NewWorkflow, status=201, errors=(502, 503),
    ),
    Operation(
        "GET", "/api/workflows/{id}", read_workflow, "Read a workflow", schemas.WorkflowShape, errors=(404,)
    ),
    Operation(
        "GET", "/api/workflows/{id}/events", follow_workflow, "Follow a running workflow",
        media_type=EVENT_STREAM, errors=(404,),
    ),
    Operation(
        "POST", "/api/workflows/{id}/stop", stop_workflow, "Stop a workflow", schemas.WorkflowShape, errors=(404,)
    ),
    Operation(
        "GET", "/api/analytics", read_analytics, "Read statistics of a time range",
        schemas.AnalyticsShape, query=schemas.RangeQuery,
    ),
    Operation(
        "GET", "/api/analytics/over-time", read_analytics_over_time, "Read statistics of intervals of a time range",
        schemas.BucketList, query=schemas.BucketQuery,
    ),
    Operation(
        "GET", "/api/analytics/conversations", read_analytics_by_conversation,
        "Read statistics of the conversations with the most requests", schemas.ConversationStatsList,
        query=schemas.RangeQuery,
    ),
    Operation(
        "GET", "/api/choices", list_choices, "List tags and models", schemas.ChoicesShape,
    ),
    Operation(
        "GET", "/api/requests", list_requests, "List the requests of other programs", schemas.ProxiedPage,
        query=schemas.RequestQuery,
    ),
    Operation(
        "GET", "/api/requests/{number:number}", read_request, "Read a request of another program",
        schemas.ProxiedDetail, errors=(404,),
    ),
)  # fmt: skip
"""All operations of the API."""


@cache
def get_openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of the API, which is built when it is first needed."""
    return build_openapi(OPERATIONS, kedge.__version__)


async def read_openapi(_: Request) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(get_openapi_document())
