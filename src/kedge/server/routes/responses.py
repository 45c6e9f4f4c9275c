"""The endpoints of ``/v1/responses``."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server import errors, response_object
from kedge.server.background import BackgroundJobs
from kedge.server.compaction import build_compaction_item, compact, retain_user_messages
from kedge.server.http import (
    get_background,
    get_recorded_request,
    get_service,
    paginate,
    parse_integer,
    read_json,
    respond_bytes,
    respond_json,
    validate,
)
from kedge.server.json_codec import Item, decode
from kedge.server.prepare import (
    ModelInput,
    ResponseDraft,
    build_model_input,
    find_history,
    precount_request,
    prepare_response,
    resolve_input,
)
from kedge.server.request_log import WEBSOCKET_SCOPE_KEY
from kedge.server.response_run import ResponseRun
from kedge.server.sse import DONE_FRAME, DisconnectWatcher, EventStream, ReplayStream
from kedge.server.state import ServerState
from kedge.server.storage.ids import make_item_id, make_response_id, new_key
from kedge.server.token_counts import count_items
from kedge.server.validation import (
    check_compact,
    check_create,
    check_input_tokens,
    check_not_empty,
)

if TYPE_CHECKING:
    from kedge.server.storage.context import UnstoredResponses


async def create(request: Request) -> Any:
    """Answer ``POST /v1/responses``, complete or as a stream."""
    body = await read_json(request)
    unstored: UnstoredResponses | None = request.scope.get(WEBSOCKET_SCOPE_KEY)
    validate(request, check_create, body, on_socket=unstored is not None)
    await precount_request(body)
    service = get_service(request)
    draft = prepare_response(service, body, unstored)
    record = get_recorded_request(request)
    if record is not None:
        record.context = tuple(draft.prompt.ask.items)
        record.response_id = draft.request_fields["id"]
    if draft.request_fields["background"]:
        return _start_in_background(get_background(request), service, draft)
    run = ResponseRun(service, draft, unstored, record)
    if draft.prompt.stream:
        return EventStream(run, DONE_FRAME)
    with DisconnectWatcher(run, request.receive) as watcher:
        response = await run.generate(watcher.start)
    return respond_bytes(response or b"")


def _start_in_background(
    background: BackgroundJobs, service: ServerState, draft: ResponseDraft
) -> Any:
    background.check_capacity()
    run = ResponseRun(service, draft)
    log = background.start(run, retain_events=draft.prompt.stream)
    return ReplayStream(log.read(-1)) if draft.prompt.stream else respond_bytes(run.snapshot())


async def retrieve(request: Request) -> Any:
    """Answer ``GET /v1/responses/{id}``, complete or as a replay of its stream."""
    service = get_service(request)
    node = _find_node(service, request)
    if request.query_params.get("stream") == "true":
        return _replay_stream(get_background(request), service.responses.read(node), request)
    return respond_bytes(service.responses.read(node))


def _replay_stream(background: BackgroundJobs, response: bytes, request: Request) -> ReplayStream:
    if not decode(response)["background"]:
        raise errors.NOT_IN_BACKGROUND()
    after = -1
    given = request.query_params.get("starting_after")
    if given is not None:
        after = parse_integer("starting_after", given)
        if after < 0:
            raise errors.INTEGER_TOO_SMALL(path="starting_after", least=0, value=after)
    log = background.get_log(request.path_params["id"])
    if log is None or not log.has_events_after(after):
        raise errors.STREAM_NOT_AVAILABLE()
    return ReplayStream(log.read(after))


async def delete(request: Request) -> Response:
    """Answer ``DELETE /v1/responses/{id}``."""
    service = get_service(request)
    node = _find_node(service, request)
    if get_background(request).get_run(request.path_params["id"]):
        raise errors.CANNOT_DELETE_IN_FLIGHT()
    service.responses.delete(node)
    return respond_json({"id": request.path_params["id"], "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Answer ``POST /v1/responses/{id}/cancel``; cancelling twice has no further effect."""
    service = get_service(request)
    node = _find_node(service, request)
    run = get_background(request).get_run(request.path_params["id"])
    if run is not None:
        run.cancel()
    encoded = service.responses.read(node)
    response = decode(encoded)
    if not response["background"]:
        raise errors.CANNOT_CANCEL_SYNCHRONOUS()
    if response["status"] != "cancelled":
        raise errors.CANNOT_CANCEL_FINISHED(status=response["status"])
    return respond_bytes(encoded)


async def list_input_items(request: Request) -> Response:
    """Answer ``GET /v1/responses/{id}/input_items`` with the complete resolved input, in pages."""
    service = get_service(request)
    node = service.nodes.get(_find_node(service, request))
    items: list[Item] = service.nodes.load_context(node.parent).list_items() + decode(node.input)
    return respond_json(paginate(items, request.query_params))


async def count_input_tokens(request: Request) -> Response:
    """Answer ``POST /v1/responses/input_tokens``."""
    body = await read_json(request)
    validate(request, check_input_tokens, body)
    await precount_request(body)
    service = get_service(request)
    history = find_history(service, body)
    items = resolve_input(service, body.get("input") or [], new_key(0), history)
    tokens = build_model_input(service, body, history, items).tokens
    return respond_json({"object": "response.input_tokens", "input_tokens": tokens})


async def compact_context(request: Request) -> Response:
    """Answer ``POST /v1/responses/compact`` with one compaction item for the full context.

    The hosted API puts the user's messages before it, which the official client's own types do not
    allow. They are inside the compaction item, where a context starts anyway.
    """
    body = await read_json(request)
    validate(request, check_compact, body)
    await precount_request(body)
    service = get_service(request)
    history = find_history(service, body)
    check_not_empty(body)
    key = new_key(0)
    items = resolve_input(service, body.get("input") or [], key, history)
    model_input = build_model_input(service, body, history, items)
    compaction = build_compaction_item(
        service.cipher,
        make_item_id("compaction", key, len(items)),
        await _compact_items(service, body, model_input),
    )
    usage = response_object.build_usage(
        input=model_input.tokens, cached=0, output=count_items([compaction]), reasoning=0
    )
    if service.counts_tokens:
        await service.count_tokens(usage["total_tokens"])
    return respond_json(
        {
            "id": make_response_id(key),
            "object": "response.compaction",
            "created_at": int(service.clock()),
            "output": [compaction],
            "usage": usage,
        }
    )


async def _compact_items(service: ServerState, body: Any, model_input: ModelInput) -> list[Item]:
    """Return what replaces the input, with the model's summary if it writes one."""
    compacted = retain_user_messages(
        compact(model_input.items, model_input.tokens // 2), model_input.items
    )
    model = service.find_model(body["model"]) if body["model"] else service.model
    omitted = compacted.omitted_items
    summary = await model.summarise(omitted) if omitted else ""
    return replace(compacted, summary=summary).items


def _find_node(service: ServerState, request: Request) -> int:
    id: str = request.path_params["id"]
    found = service.responses.find(id)
    if found is None:
        raise errors.RESPONSE_NOT_FOUND(id=id)
    return found[0]
