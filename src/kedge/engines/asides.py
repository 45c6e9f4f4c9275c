"""Requests beside the conversation: how many tokens is it, and make it shorter.

Both endpoints take a context as ``/responses`` does, so a plan says what to send. If the server no longer
has the anchor, everything is sent, once.
"""

from typing import Any, cast

from kedge.engines.transport import Transport
from kedge.errors import RequestRefused, ServerFailed
from kedge.events import Usage, reading
from kedge.planning import RequestPlan
from kedge.turns import Block, block_from_item


async def count_tokens(transport: Transport, plans: tuple[RequestPlan, ...], **more: Any) -> int:
    """Ask how many tokens the context of the first plan that the server takes has."""
    told = await _post(transport, "/responses/input_tokens", plans, more)
    tokens = told.get("input_tokens")
    if not isinstance(tokens, int):
        raise ServerFailed("the server did not say how many tokens", provider=transport.provider)
    return tokens


async def compact(
    transport: Transport, plans: tuple[RequestPlan, ...], **more: Any
) -> tuple[list[Block], Usage]:
    """Ask for the items that stand for the context of the first plan that the server takes."""
    told = await _post(transport, "/responses/compact", plans, more)
    output = told.get("output")
    if not isinstance(output, list) or not output:
        raise ServerFailed("the server gave nothing back", provider=transport.provider)
    blocks = [block_from_item(item) for item in cast("list[dict[str, Any]]", output)]
    return blocks, reading.usage(told) or Usage()


async def _post(
    transport: Transport, path: str, plans: tuple[RequestPlan, ...], more: dict[str, Any]
) -> dict[str, Any]:
    for plan in plans:
        body = {"input": plan.input(), **more}
        if plan.instructions is not None:
            body["instructions"] = plan.instructions
        if plan.anchor:
            body["previous_response_id"] = plan.previous_response_id
        try:
            return await transport.call("post", path, json=body)
        except RequestRefused as error:
            if plan is not plans[-1] and error.status in (400, 404):
                continue
            raise
    raise AssertionError("there is always a plan")
