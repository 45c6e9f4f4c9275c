"""Further endpoints of the Responses API: token counts, compaction and the server's identity."""

from typing import Any, cast

from kedge.engines.request_body import build_input
from kedge.engines.transport import Transport
from kedge.errors import EngineError, RequestRefused, ServerFailed
from kedge.events import Usage, fields
from kedge.planning import RequestPlan
from kedge.turns import Block, block_from_item


async def count_tokens(transport: Transport, plans: tuple[RequestPlan, ...], **params: Any) -> int:
    """Return the token count of the first plan that the server accepts."""
    answer = await _post(transport, "/responses/input_tokens", plans, params)
    tokens = answer.get("input_tokens")
    if not isinstance(tokens, int):
        raise ServerFailed("the server did not return a token count", provider=transport.provider)
    return tokens


async def compact(
    transport: Transport, plans: tuple[RequestPlan, ...], **params: Any
) -> tuple[list[Block], Usage]:
    """Request the compacted items of the first plan that the server accepts."""
    answer = await _post(transport, "/responses/compact", plans, params)
    output = answer.get("output")
    if not isinstance(output, list) or not output:
        raise ServerFailed("the server returned no compacted items", provider=transport.provider)
    blocks = [block_from_item(item) for item in cast("list[dict[str, Any]]", output)]
    return blocks, fields.read_usage(answer) or Usage()


async def identify_server(transport: Transport) -> None:
    """Send a small request, so that the server identifies itself in the response headers."""
    try:
        await transport.request_json("get", "/models")
    except EngineError:
        transport.identity = transport.identity or ""


async def _post(
    transport: Transport, path: str, plans: tuple[RequestPlan, ...], params: dict[str, Any]
) -> dict[str, Any]:
    for plan in plans:
        body = {"input": build_input(plan), **params}
        if plan.instructions is not None:
            body["instructions"] = plan.instructions
        if plan.anchor:
            body["previous_response_id"] = plan.previous_response_id
        try:
            return await transport.request_json("post", path, json=body)
        except RequestRefused as error:
            if plan is not plans[-1] and error.status in (400, 404):
                continue
            raise
    raise AssertionError("there is always a plan")
