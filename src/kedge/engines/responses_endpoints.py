"""Further endpoints of the Responses API: token counts, compaction and conversation objects.

A conversation object can change independently: another client, or a retry, may have appended to it. So
before each send its last item is compared with the last known one, and a difference starts a new object.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from kedge.engines.request_body import build_input
from kedge.engines.transport import Transport
from kedge.errors import EngineError, InvalidTurn, RequestRefused, ServerFailed
from kedge.events import Usage, fields
from kedge.observe import get_logger
from kedge.planning import RequestPlan, get_state, set_state
from kedge.planning.canonical import is_copy
from kedge.turns import Block, ReasoningBlock, Turn, block_from_item
from kedge.urls import quote_segment


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


log = get_logger("kedge.engines.responses_endpoints")


class ConversationObjects:
    """The conversation objects of one server."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self) -> str:
        """Create an empty object."""
        try:
            created = await self._transport.request_json("post", "/conversations", json={})
        except RequestRefused as error:
            if error.status == 404:
                error.message = "this server has no conversation objects; use another mode"
            raise
        if not isinstance(created.get("id"), str):
            raise ServerFailed("the server returned a conversation object without an id")
        return created["id"]

    async def detach_if_changed(self, turn: Turn) -> Turn:
        """Return the Turn, detached from its conversation object if that has changed."""
        state = get_state(turn)
        if not state.conversation_id:
            return turn
        expected = _find_last_block(turn, state.previous_response_id)
        last = await self._fetch_last_item(state.conversation_id)
        if expected is not None and last is not None and _is_same_item(last, expected):
            return turn
        log.warning(
            "the conversation object has changed; starting a new one",
            conversation_id=state.conversation_id,
            turn_id=turn.id,
        )
        return set_state(turn, replace(state, conversation_id=""))

    async def _fetch_last_item(self, conversation_id: str) -> Mapping[str, Any] | None:
        path = f"/conversations/{quote_segment(conversation_id)}/items"
        try:
            listed = await self._transport.request_json("get", path, order="desc", limit=4)
        except RequestRefused as error:
            if error.status in (404, 410):
                return None
            raise
        items = cast("list[Mapping[str, Any]]", listed.get("data", []))
        return next((item for item in items if item.get("type") != "reasoning"), None)


def _find_last_block(turn: Turn, response_id: str) -> Block | None:
    """Return the last block that the object should have: the end of the newest response in it."""
    for block in reversed(turn.blocks):
        if block.response_id == response_id and not isinstance(block, ReasoningBlock):
            return block
    return None


def _is_same_item(item: Mapping[str, Any], block: Block) -> bool:
    if block.item_id and item.get("id"):
        return item["id"] == block.item_id
    try:
        return is_copy(block_from_item(item), block)
    except InvalidTurn:
        return False
