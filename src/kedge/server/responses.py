"""The endpoints of ``/v1/responses``."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server import errors, resource
from kedge.server.access import SOCKET
from kedge.server.answering import Run
from kedge.server.background import Background
from kedge.server.compaction import compact, compaction_item
from kedge.server.draft import Draft, View, draft, find_past, taken_in, view_of
from kedge.server.http import (
    answer,
    answer_json,
    background_of,
    exchange_of,
    page,
    read_json,
    service_of,
    whole_number,
)
from kedge.server.ids import item_id, new_key, response_id
from kedge.server.service import Service
from kedge.server.sse import EventStream, Replay, Watch
from kedge.server.validation import (
    check_compact,
    check_create,
    check_input_tokens,
    check_not_empty,
)
from kedge.server.wire import Item, decode
from kedge.tokens import count_items

if TYPE_CHECKING:
    from kedge.server.sockets.memory import Place


async def create(request: Request) -> Any:
    """Answer ``POST /v1/responses``, whole or as a stream."""
    body = await read_json(request)
    place: Place | None = request.scope.get(SOCKET)
    check_create(body, on_socket=place is not None)
    service = service_of(request)
    made = draft(service, body, place)
    exchange = exchange_of(request)
    if exchange is not None:
        exchange.context = tuple(made.prompt.ask.items)
        exchange.response_id = made.asked["id"]
    if made.asked["background"]:
        return _in_background(background_of(request), service, made)
    run = Run(service, made, place)
    run.witness = exchange
    if made.prompt.live:
        return EventStream(run)
    with Watch(run, request.receive) as watch:
        whole = await run.whole(watch.start)
    return answer(whole or b"")


def _in_background(background: Background, service: Service, made: Draft) -> Any:
    background.check_room()
    run = Run(service, made)
    log = background.start(run, watched=made.prompt.live)
    return Replay(log.read(-1)) if made.prompt.live else answer(run.snapshot())


async def retrieve(request: Request) -> Any:
    """Answer ``GET /v1/responses/{id}``, whole or as the stream that it was."""
    service = service_of(request)
    node = _node(service, request)
    if request.query_params.get("stream") == "true":
        return _replayed(background_of(request), service.responses.read(node), request)
    return answer(service.responses.read(node))


def _replayed(background: Background, response: bytes, request: Request) -> Replay:
    if not decode(response)["background"]:
        raise errors.NOT_IN_BACKGROUND()
    after = -1
    given = request.query_params.get("starting_after")
    if given is not None:
        after = whole_number("starting_after", given)
        if after < 0:
            raise errors.INTEGER_TOO_SMALL(path="starting_after", least=0, value=after)
    log = background.log(request.path_params["id"])
    if log is None or not log.holds(after):
        raise errors.STREAM_NOT_KEPT()
    return Replay(log.read(after))


async def delete(request: Request) -> Response:
    """Answer ``DELETE /v1/responses/{id}``."""
    service = service_of(request)
    node = _node(service, request)
    if background_of(request).running(request.path_params["id"]):
        raise errors.CANNOT_DELETE()
    service.responses.delete(node)
    return answer_json({"id": request.path_params["id"], "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Answer ``POST /v1/responses/{id}/cancel``; once cancelled, to cancel again changes nothing."""
    service = service_of(request)
    node = _node(service, request)
    run = background_of(request).running(request.path_params["id"])
    if run is not None:
        run.cancel()
    whole = service.responses.read(node)
    response = decode(whole)
    if not response["background"]:
        raise errors.CANNOT_CANCEL()
    if response["status"] != "cancelled":
        raise errors.CANNOT_CANCEL_ENDED(status=response["status"])
    return answer(whole)


async def input_items(request: Request) -> Response:
    """Answer ``GET /v1/responses/{id}/input_items``: the whole resolved input, in pages."""
    service = service_of(request)
    node = service.nodes.get(_node(service, request))
    items: list[Item] = service.nodes.context(node.parent).whole() + decode(node.input)
    return answer_json(page(items, request.query_params))


async def input_tokens(request: Request) -> Response:
    """Answer ``POST /v1/responses/input_tokens``."""
    body = await read_json(request)
    check_input_tokens(body)
    service = service_of(request)
    past = find_past(service, body)
    items = taken_in(service, body.get("input") or [], new_key(0), past)
    tokens = view_of(service, body, past, items).tokens
    return answer_json({"object": "response.input_tokens", "input_tokens": tokens})


async def compact_context(request: Request) -> Response:
    """Answer ``POST /v1/responses/compact``: the user's messages and one compaction item."""
    body = await read_json(request)
    check_compact(body)
    service = service_of(request)
    past = find_past(service, body)
    check_not_empty(body)
    key = new_key(0)
    items = taken_in(service, body.get("input") or [], key, past)
    view = view_of(service, body, past, items)
    said = [item for item in view.items if item.get("role") == "user"]
    sealed = compaction_item(
        service.sealer,
        item_id("compaction", key, len(items)),
        await _kept(service, body, view),
    )
    output = [*said, sealed]
    usage = resource.usage(input=view.tokens, cached=0, output=count_items([sealed]), reasoning=0)
    return answer_json(
        {
            "id": response_id(key),
            "object": "response.compaction",
            "created_at": int(service.clock()),
            "output": output,
            "usage": usage,
        }
    )


async def _kept(service: Service, body: Any, view: View) -> list[Item]:
    """What stands for a view once it is compacted, with the model's own summary if it has one."""
    made = compact(view.items, view.tokens // 2)
    model = service.find_model(body["model"]) if body["model"] else service.model
    summary = await model.summarise(made.left_out) if made.left_out else ""
    return replace(made, summary=summary).items


def _node(service: Service, request: Request) -> int:
    id: str = request.path_params["id"]
    found = service.responses.find(id)
    if found is None:
        raise errors.RESPONSE_NOT_FOUND(id=id)
    return found[0]
