"""The endpoints of ``/v1/conversations`` and of the items in them."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kedge.server import errors
from kedge.server.coherence import check_sealed, resolve
from kedge.server.http import answer_json, listed, page, read_json, service_of
from kedge.server.ids import new_key
from kedge.server.items import written_out
from kedge.server.service import Service
from kedge.server.talks import Conversation
from kedge.server.validation import (
    check_conversation_create,
    check_conversation_items,
    check_conversation_update,
)
from kedge.server.wire import Item


async def create(request: Request) -> Response:
    """Answer ``POST /v1/conversations``."""
    body = await read_json(request, empty={})
    check_conversation_create(body)
    service = service_of(request)
    if service.settings.zero_data_retention:
        raise errors.CONVERSATION_ZERO_DATA_RETENTION()
    key, items = _new_items(service, body.get("items") or [], known=[])
    made = service.conversations.create(body.get("metadata") or {}, key, items)
    return answer_json(made.resource())


async def retrieve(request: Request) -> Response:
    """Answer ``GET /v1/conversations/{id}``."""
    return answer_json(_find(service_of(request), request).resource())


async def update(request: Request) -> Response:
    """Answer ``POST /v1/conversations/{id}``: replace the metadata."""
    body = await read_json(request)
    check_conversation_update(body)
    service = service_of(request)
    found = _find(service, request)
    service.conversations.set_metadata(found.id, body["metadata"] or {})
    return answer_json(_find(service, request).resource())


async def delete(request: Request) -> Response:
    """Answer ``DELETE /v1/conversations/{id}``."""
    service = service_of(request)
    found = _find(service, request)
    with service.conversations.lock(found.id):
        service.conversations.delete(found)
    return answer_json({"id": found.id, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    """Answer ``GET /v1/conversations/{id}/items``, in pages."""
    service = service_of(request)
    items = service.conversations.items(_find(service, request))
    return answer_json(page(items, request.query_params))


async def add_items(request: Request) -> Response:
    """Answer ``POST /v1/conversations/{id}/items``."""
    body = await read_json(request)
    check_conversation_items(body)
    service = service_of(request)
    found = _find(service, request)
    with service.conversations.lock(found.id):
        known = service.conversations.items(found)
        key, items = _new_items(service, body["items"], known)
        if items:
            service.conversations.add(found, key, items)
    return answer_json(listed(items))


async def retrieve_item(request: Request) -> Response:
    """Answer ``GET /v1/conversations/{id}/items/{item}``."""
    service = service_of(request)
    found = _find(service, request)
    id: str = request.path_params["item"]
    for item in service.conversations.items(found):
        if item["id"] == id:
            return answer_json(item)
    raise errors.CONVERSATION_ITEM_NOT_FOUND(id=id, conversation=found.id)


async def delete_item(request: Request) -> Response:
    """Answer ``DELETE /v1/conversations/{id}/items/{item}``."""
    service = service_of(request)
    found = _find(service, request)
    id: str = request.path_params["item"]
    with service.conversations.lock(found.id):
        if not service.conversations.remove(found, id):
            raise errors.CONVERSATION_ITEM_NOT_FOUND(id=id, conversation=found.id)
    return answer_json(found.resource())


def _find(service: Service, request: Request) -> Conversation:
    id: str = request.path_params["id"]
    found = service.conversations.find(id)
    if found is None:
        raise errors.CONVERSATION_NOT_FOUND(id=id)
    return found


def _new_items(
    service: Service, sent: Sequence[Item], known: Sequence[Item]
) -> tuple[str, list[Item]]:
    key = new_key(service.nodes.next_number())
    referred = resolve(sent, service.known)
    check_sealed(referred, service.sealer.open)
    items = written_out(referred, key)
    ids = {item["id"] for item in known}
    for item in items:
        if item["id"] in ids:
            raise errors.DUPLICATE_ITEM(id=item["id"])
        ids.add(item["id"])
    return key, items
