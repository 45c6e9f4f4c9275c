"""The endpoints of ``/v1/conversations`` and of the items in them."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kedge.server import errors
from kedge.server.coherence import check_encrypted_content, resolve_references
from kedge.server.http import build_list, get_service, paginate, read_json, respond_json, validate
from kedge.server.item_forms import normalize_items
from kedge.server.json_codec import Item
from kedge.server.prepare import precount_request
from kedge.server.state import ServerState
from kedge.server.storage.conversations import StoredConversation
from kedge.server.storage.ids import new_key
from kedge.server.validation import (
    check_conversation_create,
    check_conversation_items,
    check_conversation_update,
)


async def create(request: Request) -> Response:
    """Answer ``POST /v1/conversations``."""
    body = await read_json(request, empty={})
    validate(request, check_conversation_create, body)
    await precount_request({"input": body.get("items")})
    service = get_service(request)
    if service.settings.zero_data_retention:
        raise errors.CONVERSATION_ZERO_DATA_RETENTION()
    key, items = _prepare_items(service, body.get("items") or [], existing=[])
    made = service.conversations.create(body.get("metadata") or {}, key, items)
    return respond_json(made.to_json())


async def retrieve(request: Request) -> Response:
    """Answer ``GET /v1/conversations/{id}``."""
    return respond_json(_find_conversation(get_service(request), request).to_json())


async def update(request: Request) -> Response:
    """Answer ``POST /v1/conversations/{id}``: replace the metadata."""
    body = await read_json(request)
    validate(request, check_conversation_update, body)
    service = get_service(request)
    found = _find_conversation(service, request)
    service.conversations.set_metadata(found.id, body["metadata"] or {})
    return respond_json(_find_conversation(service, request).to_json())


async def delete(request: Request) -> Response:
    """Answer ``DELETE /v1/conversations/{id}``."""
    service = get_service(request)
    found = _find_conversation(service, request)
    with service.conversations.lock(found.id):
        service.conversations.delete(found)
    return respond_json({"id": found.id, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    """Answer ``GET /v1/conversations/{id}/items``, in pages."""
    service = get_service(request)
    items = service.conversations.items(_find_conversation(service, request))
    return respond_json(paginate(items, request.query_params))


async def add_items(request: Request) -> Response:
    """Answer ``POST /v1/conversations/{id}/items``."""
    body = await read_json(request)
    validate(request, check_conversation_items, body)
    await precount_request({"input": body["items"]})
    service = get_service(request)
    found = _find_conversation(service, request)
    with service.conversations.lock(found.id):
        known = service.conversations.items(found)
        key, items = _prepare_items(service, body["items"], known)
        if items:
            service.conversations.add(found, key, items)
    return respond_json(build_list(items))


async def retrieve_item(request: Request) -> Response:
    """Answer ``GET /v1/conversations/{id}/items/{item}``."""
    service = get_service(request)
    found = _find_conversation(service, request)
    id: str = request.path_params["item"]
    for item in service.conversations.items(found):
        if item["id"] == id:
            return respond_json(item)
    raise errors.CONVERSATION_ITEM_NOT_FOUND(id=id, conversation=found.id)


async def delete_item(request: Request) -> Response:
    """Answer ``DELETE /v1/conversations/{id}/items/{item}``."""
    service = get_service(request)
    found = _find_conversation(service, request)
    id: str = request.path_params["item"]
    with service.conversations.lock(found.id):
        if not service.conversations.remove(found, id):
            raise errors.CONVERSATION_ITEM_NOT_FOUND(id=id, conversation=found.id)
    return respond_json(found.to_json())


def _find_conversation(service: ServerState, request: Request) -> StoredConversation:
    id: str = request.path_params["id"]
    found = service.conversations.find(id)
    if found is None:
        raise errors.CONVERSATION_NOT_FOUND(id=id)
    return found


def _prepare_items(
    service: ServerState, sent: Sequence[Item], existing: Sequence[Item]
) -> tuple[str, list[Item]]:
    key = new_key(service.nodes.next_number())
    referred = resolve_references(sent, service.item_lookup)
    check_encrypted_content(referred, service.cipher.decrypt)
    items = normalize_items(referred, key)
    ids = {item["id"] for item in existing}
    for item in items:
        if item["id"] in ids:
            raise errors.DUPLICATE_ITEM(id=item["id"])
        ids.add(item["id"])
    return key, items
