"""The JSON API: conversations, turns, chains, plans and figures, for the page and for anybody else."""

import math
from collections.abc import AsyncGenerator
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kedge.analytics import Selection, analyse
from kedge.conversation import Conversation
from kedge.store import ConversationRow
from kedge.store.overview import Overview, overview, tree_of
from kedge.turns import dump_block, system, user
from kedge.web import models
from kedge.web.chains import chain_of
from kedge.web.desk import find_node, overview_status
from kedge.web.finding import find_conversations
from kedge.web.operations import Call, Operation, encode_event, openapi
from kedge.web.turns import options_of, place, plan_shape, tell, turn_shape

DAY = 86_400.0
JSONL = "application/jsonl"


async def list_conversations(call: Call) -> BaseModel:
    """A page of conversations."""
    asked: models.ListQuery = call.query
    rows, total = await find_conversations(call.desk.store, asked)
    now = call.desk.clock()
    return models.ConversationPage(
        data=[_overview_shape(each, now) for each in rows],
        total=total,
        limit=asked.limit,
        offset=asked.offset,
    )


async def create_conversation(call: Call) -> BaseModel:
    """A new conversation."""
    given: models.NewConversation = call.body
    made = await Conversation.create(
        call.desk.store,
        call.desk.engine,
        title=given.title,
        tags=given.tags,
        blocks=[system(given.system)] if given.system else [],
        mode=given.mode,
    )
    return _shape(made.row)


async def read_conversation(call: Call) -> BaseModel:
    """One conversation with its sums."""
    row = await call.desk.store.conversation(call.text("id"))
    found, _ = await overview(call.desk.store, shown="all", only=[row.id])
    return _overview_shape(found[0], call.desk.clock())


async def change_conversation(call: Call) -> BaseModel:
    """Another title, other tags, put away or back."""
    given: models.Changes = call.body
    row = await call.desk.store.update(
        call.text("id"), title=given.title, tags=given.tags, archived=given.archived
    )
    return _shape(row)


async def delete_conversation(call: Call) -> Response:
    """Delete a conversation for good."""
    await call.desk.store.delete(call.text("id"))
    return Response(status_code=204)


async def read_turns(call: Call) -> BaseModel:
    """What was said, as blocks."""
    row, node = await _place(call)
    loaded = await call.desk.store.load(row, node)
    return models.TurnPage(
        conversation=row.id, node=node, blocks=[dump_block(block) for block in loaded.blocks]
    )


async def take_turn(call: Call) -> BaseModel | Response:
    """Say something, and get the answer: whole, or as server-sent events."""
    given: models.NewTurn = call.body
    ask = await place(call.desk, call.text("id"), given)
    if not given.stream:
        reply = await ask.talk.send(*ask.blocks, at=ask.at, **options_of(given))
        return turn_shape(reply)

    async def told() -> AsyncGenerator[bytes]:
        async for event in tell(ask, given):
            yield encode_event(event)

    return StreamingResponse(told(), media_type="text/event-stream")


async def read_chain(call: Call) -> BaseModel:
    """The tree of responses."""
    row = await call.desk.store.conversation(call.text("id"))
    tree = await tree_of(call.desk.store, row)
    chain = chain_of(tree, call.desk.clock())
    stored = {node.id: node for node in tree.nodes}
    return models.ChainShape(
        conversation=row.id,
        head=int(chain.head or 0),
        nodes=[
            models.NodeShape(
                node=int(node.id),
                parent=int(node.parent or 0),
                kind=stored[int(node.id)].kind,
                label=node.label,
                marks=sorted(node.marks),
                created_at=stored[int(node.id)].created_at,
                response=_response(tree.responses.get(int(node.id))),
            )
            for node in chain.nodes
        ],
    )


async def plan_turn(call: Call) -> BaseModel:
    """What would be sent now, and why: nothing is sent."""
    asked: models.PlanQuery = call.query
    row, node = await _place(call)
    turn = (await call.desk.store.load(row, node)).turn(row.id)
    turn = turn.append(user(asked.text)) if asked.text else turn
    return plan_shape(call.desk.engine.plan(turn))


async def read_plan(call: Call) -> BaseModel:
    """What a past request sent, and why."""
    card = await call.desk.card(call.text("id"), call.number("node"))
    row = card.row
    return models.PlanShape(
        mode=row.mode,
        previous_response_id=row.anchor,
        delta_blocks=row.sent_blocks,
        full_blocks=row.sent_blocks + row.saved_blocks,
        delta_bytes=row.sent_bytes,
        full_bytes=row.sent_bytes + row.saved_bytes,
        rejected=[models.RefusedShape.model_validate(each) for each in card.refused],
        problems=[],
        explanation="\n".join((card.headline, *card.notes)),
    )


async def fork_conversation(call: Call) -> BaseModel:
    """A conversation of its own that goes on from somewhere in this one."""
    given: models.NewFork = call.body
    store = call.desk.store
    row = await store.conversation(call.text("id"))
    at = given.previous_response_id or (str(given.at) if given.at is not None else "")
    node = find_node(await tree_of(store, row), at) if at else row.head
    return _shape(await store.fork(row, node, given.title or row.title))


async def export_conversation(call: Call) -> Response:
    """A conversation with everything that belongs to it, one JSON object a line."""
    row = await call.desk.store.conversation(call.text("id"))
    name = f'attachment; filename="{row.id}.jsonl"'
    lines = await call.desk.store.export(row)
    return Response(lines, media_type=JSONL, headers={"content-disposition": name})


async def read_analytics(call: Call) -> BaseModel:
    """The responses of a range of time, added up."""
    asked: models.RangeQuery = call.query
    until = math.nextafter(call.desk.clock(), math.inf) if asked.until is None else asked.until
    since = max(until - DAY, 0.0) if asked.since is None else asked.since
    selection = Selection(since, until, asked.model, asked.provider, asked.conversation)
    return models.AnalyticsShape.model_validate(await analyse(call.desk.store, selection))


async def _place(call: Call) -> tuple[ConversationRow, int]:
    row = await call.desk.store.conversation(call.text("id"))
    if not call.query.at:
        return row, row.head
    return row, find_node(await tree_of(call.desk.store, row), call.query.at)


def _shape(row: ConversationRow) -> models.ConversationShape:
    return models.ConversationShape.model_validate(_members(row))


def _members(row: ConversationRow) -> dict[str, Any]:
    names = models.ConversationShape.model_fields
    return {**{name: getattr(row, name) for name in names}, "tags": list(row.tags)}


def _overview_shape(each: Overview, now: float) -> models.OverviewShape:
    return models.OverviewShape.model_validate(
        {
            **_members(each.row),
            "first_words": each.first_words,
            "last_answer": each.last_answer,
            "status": overview_status(each, now),
            "responses": each.responses,
            "forks": each.forks,
            "input_tokens": each.input_tokens,
            "cached_tokens": each.cached_tokens,
            "output_tokens": each.output_tokens,
            "cost": each.cost,
            "median_seconds": each.seconds,
            "expires_at": each.expires_at,
            "model": each.model,
        }
    )


def _response(row: object) -> models.ResponseShape | None:
    if row is None:
        return None
    names = set(models.ResponseShape.model_fields) - {"response_id"}
    members = {name: getattr(row, name) for name in names}
    members["response_id"] = getattr(row, "provider_response_id", "")
    return models.ResponseShape.model_validate(members)


_ONE = "/api/conversations/{id}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET", "/api/conversations", list_conversations, "List conversations",
        models.ConversationPage, query=models.ListQuery,
    ),
    Operation(
        "POST", "/api/conversations", create_conversation, "Start a conversation",
        models.ConversationShape, body=models.NewConversation, status=201,
    ),
    Operation(
        "GET", _ONE, read_conversation, "Read a conversation", models.OverviewShape, errors=(404,)
    ),
    Operation(
        "PATCH", _ONE, change_conversation, "Rename, tag or archive a conversation",
        models.ConversationShape, body=models.Changes, errors=(404,),
    ),
    Operation(
        "DELETE", _ONE, delete_conversation, "Delete a conversation for good", status=204, errors=(404,)
    ),
    Operation(
        "GET", f"{_ONE}/turns", read_turns, "Read what was said", models.TurnPage,
        query=models.PathQuery, errors=(404,),
    ),
    Operation(
        "POST", f"{_ONE}/turns", take_turn, "Say something and get the answer", models.TurnShape,
        body=models.NewTurn, media="text/event-stream", errors=(404, 409, 502, 503),
    ),
    Operation(
        "GET", f"{_ONE}/chain", read_chain, "Read the tree of responses", models.ChainShape,
        errors=(404,),
    ),
    Operation(
        "GET", f"{_ONE}/plan", plan_turn, "Plan the next request without sending it",
        models.PlanShape, query=models.PlanQuery, errors=(404,),
    ),
    Operation(
        "GET", f"{_ONE}/plans/{{node:int}}", read_plan, "Read the plan of a past request",
        models.PlanShape, errors=(404,),
    ),
    Operation(
        "POST", f"{_ONE}/fork", fork_conversation, "Fork a conversation", models.ConversationShape,
        body=models.NewFork, status=201, errors=(404,),
    ),
    Operation(
        "GET", f"{_ONE}/export", export_conversation, "Export a conversation", media=JSONL,
        errors=(404,),
    ),
    Operation(
        "GET", "/api/analytics", read_analytics, "Add up the responses of a range of time",
        models.AnalyticsShape, query=models.RangeQuery,
    ),
)  # fmt: skip
"""Everything that the API can do."""

DOCUMENT = openapi(OPERATIONS, version("kedge"))


async def read_openapi(_: Request) -> Response:
    """The OpenAPI document."""
    return JSONResponse(DOCUMENT)
