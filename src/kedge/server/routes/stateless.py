"""Shared code of the endpoints of the stateless APIs."""

from typing import Any

from starlette.requests import Request

from kedge.server.http import get_recorded_request, get_service, respond_bytes, respond_json
from kedge.server.output_writer import OutputWriter
from kedge.server.sse import DisconnectWatcher, EventStream
from kedge.server.stateless_run import PreparedRequest, Serializer, StatelessRun


async def respond(
    request: Request,
    prepared: PreparedRequest,
    response_id: str,
    writer: OutputWriter,
    serializer: Serializer,
) -> Any:
    """Record the request and generate its response, complete or as a stream."""
    recorded = get_recorded_request(request)
    if recorded is not None:
        recorded.context = tuple(prepared.prompt.ask.items)
        recorded.response_id = response_id
    run = StatelessRun(get_service(request), prepared, writer, serializer)
    if prepared.prompt.stream:
        return EventStream(run)
    with DisconnectWatcher(run, request.receive) as watch:
        response = await run.generate(watch.start)
    return respond_bytes(b"") if response is None else respond_json(response)
