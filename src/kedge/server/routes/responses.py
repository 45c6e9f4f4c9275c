"""The endpoints of ``/v1/responses``."""

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kedge._internal.json_text import decode, encode
from kedge._internal.responsive import compute
from kedge.server import errors, http, object_forms, prepare, token_counting
from kedge.server.access import read_header
from kedge.server.background import BackgroundJobs, EventLog, enqueue_run
from kedge.server.encrypted_content import build_compaction_item, compact, retain_user_messages
from kedge.server.models import ModelUsage
from kedge.server.object_forms import Item
from kedge.server.prepare import ModelInput, ResponseDraft
from kedge.server.request_log import RECORD_KEY, WEBSOCKET_SCOPE_KEY, RecordedRequest
from kedge.server.response_run import ResponseRun, build_repeated_events, respond
from kedge.server.schema import requests
from kedge.server.schema.validators import Integer
from kedge.server.sse import encode_events, replay
from kedge.server.state import ServerState

if TYPE_CHECKING:
    from kedge.server.storage.context import LaneMemory

MAX_KEY_LENGTH = 255
"""The maximum length of an ``Idempotency-Key``."""
EVENT_NUMBER = Integer(minimum=0, maximum=2**53 - 1)
"""The number of an event: at most the largest integer that every JSON parser reads exactly."""


async def create(request: Request) -> Any:
    """Answer ``POST /v1/responses``, complete or as a stream.

    A request with an ``Idempotency-Key`` that was answered before gets the same response again.
    """
    unstored: LaneMemory | None = request.scope.get(WEBSOCKET_SCOPE_KEY)
    on_socket = unstored is not None
    checked = await http.read_checked(request, partial(requests.check_create, on_socket=on_socket))
    await prepare.precount_request(checked.body, is_long=checked.is_long)
    key: str | None = None
    if not on_socket:
        key = _get_idempotency_key(request)
    if key is not None:
        service = http.get_service(request)
        repeated = await service.run(_find_repeated, service, checked.body, key, is_long=True)
        if repeated is not None:
            node, encoded = repeated
            return await _repeat_response(request, node, encoded, checked.body.get("stream"))

    draft = await _prepare_draft(request, checked, unstored, key)
    run, log = await _start_run(request, draft, unstored)
    if log is None:
        return await respond(request, run)
    background: BackgroundJobs = request.app.state.background
    background.start(run, log)
    if run.is_streamed:
        return replay(log.read(-1))
    return http.respond_encoded(run.snapshot())


async def _prepare_draft(
    request: Request,
    checked: http.CheckedBody[Any],
    unstored: "LaneMemory | None",
    idempotency_key: str | None,
) -> ResponseDraft:
    """Load the context of a request, and prepare the prompt and the stored form of its response."""
    service = http.get_service(request)
    body = checked.body
    resolve = partial(prepare.resolve_request, service, body, service.nodes.new_key, unstored)
    reads_much = checked.is_long or prepare.reads_history(service, body, unstored)
    resolved = await service.run(resolve, is_long=reads_much)
    build = partial(
        prepare.build_draft,
        service,
        body,
        resolved,
        on_socket=unstored is not None,
        idempotency_key=idempotency_key,
    )
    return await compute(build, is_long=checked.is_long or resolved.is_long)


async def _start_run(
    request: Request, draft: ResponseDraft, unstored: "LaneMemory | None"
) -> tuple[ResponseRun, EventLog | None]:
    """Reserve the tokens of a response and create its run; see `_create_run`."""
    service = http.get_service(request)
    max_tokens = 0 if draft.skip_model else draft.prompt.max_tokens
    reservation = await service.reserve_tokens(draft.usage.input, max_tokens)
    try:
        create_run = partial(_create_run, request, draft, unstored)
        run, log = await service.run(create_run, is_long=draft.is_large)
    except BaseException:
        await service.access.settle(reservation, 0)
        raise
    run.reservation = reservation
    return run, log


def _create_run(
    request: Request, draft: ResponseDraft, unstored: "LaneMemory | None"
) -> tuple[ResponseRun, EventLog | None]:
    """Return the run of a response, with the events so far if it is generated in the background."""
    service = http.get_service(request)
    if draft.request_fields["background"]:
        background: BackgroundJobs = request.app.state.background
        background.check_capacity()
    record: RecordedRequest | None = request.scope.get(RECORD_KEY)
    run = ResponseRun(service, draft, unstored, record)
    try:
        if run.is_background:
            return run, service.transact(lambda: enqueue_run(run))
        if draft.idempotency_key is not None:
            run.begin()
    except BaseException:
        run.end()
        raise
    return run, None


def _get_idempotency_key(request: Request) -> str | None:
    value = read_header(request.scope, b"idempotency-key")
    if len(value) > MAX_KEY_LENGTH:
        raise errors.IDEMPOTENCY_KEY_TOO_LONG(most=MAX_KEY_LENGTH)
    return value.decode("latin-1") or None  # an empty value is no key


def _find_repeated(
    service: ServerState, body: Any, idempotency_key: str
) -> tuple[int, bytes] | None:
    """Return the node of the response to an earlier request with this key, and the response as JSON, or None."""
    earlier = service.responses.find_repeated(idempotency_key)
    if earlier is None:
        return None
    if earlier.is_expired:
        service.responses.drop_idempotency_key(earlier.node)
        return None
    if earlier.body != encode(body):
        raise errors.IDEMPOTENCY_KEY_REUSED()
    if earlier.status in object_forms.UNFINISHED_STATUSES and not body.get("background"):
        if service.claims is None or not service.claims.is_lost(earlier.node):
            raise errors.IDEMPOTENCY_KEY_IN_USE()
        service.claims.fail_lost()
    elif earlier.status not in {"failed", "cancelled"}:
        return earlier.node, service.responses.read(earlier.node)
    service.responses.drop_idempotency_key(earlier.node)
    return None


async def _repeat_response(
    request: Request, node: int, encoded: bytes, streamed: bool | None
) -> Any:
    if not streamed:
        return http.respond_encoded(encoded)
    response = decode(encoded)
    if response["background"]:
        background: BackgroundJobs = request.app.state.background
        service = http.get_service(request)
        stored = await background.open_stream(service, response["id"], node, -1)
        if stored is not None:
            return replay(stored)

    async def frames() -> AsyncIterator[bytes]:
        yield b"".join(encode_events(build_repeated_events(response)))

    return replay(frames())


async def retrieve(request: Request) -> Any:
    """Answer ``GET /v1/responses/{id}``, complete or as a replay of its stream."""
    http.check_include(request)
    service = http.get_service(request)
    stream = request.query_params.get("stream", "false")
    if stream not in ("true", "false"):
        raise errors.INVALID_VALUE(path="stream", value=stream, supported="'true' and 'false'")
    if stream == "true":
        return await _replay_stream(service, request)
    return http.respond_encoded(await service.run(_read_response, service, request, is_long=True))


async def _replay_stream(service: ServerState, request: Request) -> Response:
    node, _, is_background = await service.run(_find_response, service, request)
    if not is_background:
        raise errors.NOT_IN_BACKGROUND()
    after = -1
    parameter = request.query_params.get("starting_after")
    if parameter is not None:
        after = http.parse_integer("starting_after", parameter, EVENT_NUMBER)
    background: BackgroundJobs = request.app.state.background
    frames = await background.open_stream(service, request.path_params["id"], node, after)
    if frames is None:
        raise errors.STREAM_NOT_AVAILABLE()
    return replay(frames)


@http.in_database()
def delete(service: ServerState, request: Request) -> dict[str, Any]:
    """Answer ``DELETE /v1/responses/{id}``."""
    node, status, _ = _find_response(service, request)
    if status in object_forms.UNFINISHED_STATUSES:
        raise errors.CANNOT_DELETE_IN_FLIGHT()
    service.responses.delete(node)
    return {"id": request.path_params["id"], "object": "response", "deleted": True}


async def cancel(request: Request) -> Response:
    """Answer ``POST /v1/responses/{id}/cancel``; cancelling twice has no further effect."""
    service = http.get_service(request)
    await service.run(_find_response, service, request)
    background: BackgroundJobs = request.app.state.background
    run = background.jobs.get(request.path_params["id"])
    if run is not None:
        run.cancel()
    cancelled = await service.run(_cancel_response, service, request, is_long=True)
    return http.respond_encoded(cancelled)


def _cancel_response(service: ServerState, request: Request) -> bytes:
    node, status, is_background = _find_response(service, request)
    if not is_background:
        raise errors.CANNOT_CANCEL_SYNCHRONOUS()
    if status in object_forms.UNFINISHED_STATUSES:  # another server generates it
        service.responses.cancel(node)
        _, status, _ = _find_response(service, request)
    if status != "cancelled":
        raise errors.CANNOT_CANCEL_FINISHED(status=status)
    return _read_response(service, request)


@http.in_database()
def list_input_items(service: ServerState, request: Request) -> dict[str, Any]:
    """Answer ``GET /v1/responses/{id}/input_items`` with the complete resolved input, in pages."""
    http.check_include(request)
    node, _, _ = _find_response(service, request)
    try:
        items = service.nodes.list_input(node)
    except LookupError:
        raise errors.RESPONSE_NOT_FOUND(id=request.path_params["id"]) from None
    return http.paginate(items, request.query_params)


async def count_input_tokens(request: Request) -> Response:
    """Answer ``POST /v1/responses/input_tokens``."""
    checked = await http.read_checked(request, requests.check_input_tokens)
    await prepare.precount_request(checked.body, is_long=checked.is_long)
    _, _, model_input = await _count_input(request, checked, needs_input=False)
    return http.respond_json(
        {"object": "response.input_tokens", "input_tokens": model_input.tokens}
    )


async def _count_input(
    request: Request, checked: http.CheckedBody[Any], *, needs_input: bool
) -> tuple[str, list[Item], ModelInput]:
    """Return the key of a request, its items in full form, and the input of a model."""
    service = http.get_service(request)
    new_key = object_forms.new_unstored_key
    resolve = partial(
        prepare.resolve_request, service, checked.body, new_key, needs_input=needs_input
    )
    reads_much = checked.is_long or prepare.reads_history(service, checked.body)
    resolved = await service.run(resolve, is_long=reads_much)
    count = partial(prepare.count_input, service, checked.body, resolved)
    items, model_input = await compute(count, is_long=checked.is_long or resolved.is_long)
    return resolved.key, items, model_input


async def compact_context(request: Request) -> Response:
    """Answer ``POST /v1/responses/compact`` with one compaction item for the full context.

    The hosted API puts the user's messages before it, which the types of the official client do not
    allow. Here they are inside the compaction item, where a context starts anyway.
    """
    checked = await http.read_checked(request, requests.check_compact)
    service = http.get_service(request)
    service.cipher.require("input")
    await prepare.precount_request(checked.body, is_long=checked.is_long)
    key, items, model_input = await _count_input(request, checked, needs_input=True)
    reservation = await service.reserve_tokens(model_input.tokens, None)
    used = ModelUsage(0, 0)
    try:
        compaction = build_compaction_item(
            service.cipher,
            object_forms.make_item_id("compaction", key, len(items)),
            await _compact_items(service, checked.body, model_input),
        )
        used = ModelUsage(model_input.tokens, token_counting.count_items([compaction]))
    finally:
        await service.access.settle(reservation, used.total)
    return http.respond_json(
        {
            "id": f"resp_{key}",
            "object": "response.compaction",
            "created_at": int(service.clock()),
            "output": [compaction],
            "usage": object_forms.build_usage(used),
        }
    )


async def _compact_items(service: ServerState, body: Any, model_input: ModelInput) -> list[Item]:
    """Return the replacement of the input, with the model's summary if it writes one."""
    compacted = retain_user_messages(
        compact(model_input.items, model_input.tokens // 2), model_input.items
    )
    model = service.find_model(body["model"]) if body["model"] else service.model
    return (await prepare.summarize(model, compacted)).items


def _find_response(service: ServerState, request: Request) -> tuple[int, str, bool]:
    """Return the node, the status, and whether it is in the background, of the response in the path of a request."""
    id: str = request.path_params["id"]
    response = service.responses.find(id)
    if response is None:
        raise errors.RESPONSE_NOT_FOUND(id=id)
    return response


def _read_response(service: ServerState, request: Request) -> bytes:
    """Return the response in the path of a request as JSON."""
    node, _, _ = _find_response(service, request)
    try:
        return service.responses.read(node)
    except LookupError:
        raise errors.RESPONSE_NOT_FOUND(id=request.path_params["id"]) from None
