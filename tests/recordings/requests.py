"""Check recorded requests: whether Kedge reads their messages, and whether its server accepts them."""

import httpx2

from kedge.errors import InvalidTurn
from kedge.wire import blocks_from_messages
from recordings.exchanges import COMPACT_PATH, PATHS, Exchange, JsonObject

STRICT_HOSTS = {
    "responses": "api.openai.com",
    "chat": "api.openai.com",
    "messages": "api.anthropic.com",
}
"""The provider of each API; requests to others may have parameters that only they know."""
STATE_MEMBERS = ("previous_response_id", "conversation", "container")
"""Members that refer to what only the recorded server has stored."""


def check_messages(exchange: Exchange) -> list[str]:
    """Return why the messages of a recorded request cannot be read as blocks."""
    if exchange.api != "chat" or not exchange.is_answer:
        return []
    try:
        blocks_from_messages(exchange.request.get("messages") or [])
    except InvalidTurn as error:
        return [f"blocks_from_messages: {error}"]
    return []


def is_self_contained(exchange: Exchange) -> bool:
    """Return whether a request that the provider accepted refers to nothing that only the provider has stored."""
    if not exchange.is_answer or any(exchange.request.get(name) for name in STATE_MEMBERS):
        return False
    items = exchange.request.get("input")
    listed = items if isinstance(items, list) else []
    return not any(map(_refers_to_stored_item, listed))


def _refers_to_stored_item(item: JsonObject) -> bool:
    """Return whether an item has only the id of what its server stores; reasoning has it encrypted otherwise."""
    if item.get("type") == "item_reference":
        return True
    has_only_id = bool(item.get("id")) and not item.get("encrypted_content")
    return item.get("type") == "reasoning" and has_only_id


def drop_sealed(request: JsonObject) -> JsonObject:
    """Return a request without what only its provider can decrypt, which another server must reject."""
    items, messages = request.get("input"), request.get("messages")
    if isinstance(items, list):
        return {**request, "input": [item for item in items if not item.get("encrypted_content")]}
    if not messages:
        return request
    dropped = [_drop_thinking(message) for message in messages]
    if dropped == messages:
        return request
    rest = {name: value for name, value in request.items() if name != "thinking"}
    return {**rest, "messages": dropped}


def _drop_thinking(message: JsonObject) -> JsonObject:
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") != "assistant":
        return message
    sealed = ("signature", "data")
    return {**message, "content": [part for part in content if not any(map(part.get, sealed))]}


async def send_to_strict_server(
    exchange: Exchange, client: httpx2.AsyncClient, strict: str, lenient: str
) -> list[str]:
    """Return why the strict server rejects a body that its provider accepted."""
    if not exchange.request or not is_self_contained(exchange):
        return []
    path = COMPACT_PATH if exchange.is_compaction else PATHS[exchange.api]
    url = strict if exchange.host == STRICT_HOSTS[exchange.api] else lenient
    headers = {"anthropic-version": "2023-06-01"} if exchange.api == "messages" else {}
    reply = await client.post(f"{url}{path}", json=drop_sealed(exchange.request), headers=headers)
    return [] if reply.status_code < 400 else [f"rejected by the strict server: {reply.text[:300]}"]
