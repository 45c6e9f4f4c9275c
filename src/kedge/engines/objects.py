"""Server-side conversation objects, for the mode of that name.

An object can move behind our back: somebody else, or a retry of ours, may have appended to it. So before
each send its last item is compared with the one we know, and a difference starts a new object.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from kedge.engines.transport import Transport
from kedge.errors import InvalidTurn, RequestRefused, ServerFailed
from kedge.observe import get_logger
from kedge.planning import get_state, set_state
from kedge.planning.canonical import canonical_json
from kedge.turns import Block, ReasoningBlock, Turn, block_from_item

log = get_logger(__name__)


class ConversationObjects:
    """The conversation objects of one server."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self) -> str:
        """Make an empty object."""
        try:
            made = await self._transport.call("post", "/conversations", json={})
        except RequestRefused as error:
            if error.status == 404:
                error.message = "this server has no conversation objects; use another mode"
            raise
        if not isinstance(made.get("id"), str):
            raise ServerFailed("the server made a conversation object without an id")
        return made["id"]

    async def check(self, turn: Turn) -> Turn:
        """Return the Turn; without its object, if that is no longer what we know."""
        state = get_state(turn)
        if not state.conversation_id:
            return turn
        known = _last_known(turn, state.previous_response_id)
        last = await self._last(state.conversation_id)
        if known is not None and last is not None and _same(last, known):
            return turn
        log.warning(
            "the conversation object is not as we left it; starting a new one",
            conversation_id=state.conversation_id,
            turn_id=turn.id,
        )
        return set_state(turn, replace(state, conversation_id=""))

    async def _last(self, conversation_id: str) -> Mapping[str, Any] | None:
        path = f"/conversations/{conversation_id}/items"
        try:
            listed = await self._transport.call("get", path, order="desc", limit=4)
        except RequestRefused as error:
            if error.status in (404, 410):
                return None
            raise
        items = cast("list[Mapping[str, Any]]", listed.get("data", []))
        return next((item for item in items if item.get("type") != "reasoning"), None)


def _last_known(turn: Turn, response_id: str) -> Block | None:
    """The last block that the object should hold: the end of the newest response in it."""
    for block in reversed(turn.blocks):
        if block.response_id == response_id and not isinstance(block, ReasoningBlock):
            return block
    return None


def _same(item: Mapping[str, Any], known: Block) -> bool:
    if known.item_id and item.get("id"):
        return item["id"] == known.item_id
    try:
        return canonical_json(block_from_item(item)) == canonical_json(known)
    except InvalidTurn:
        return False
