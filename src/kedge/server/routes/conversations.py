"""The endpoints of ``/v1/conversations`` and of the items in them."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from kedge.server import coherence, errors, http
from kedge.server.object_forms import Item, normalize_items
from kedge.server.schema import requests
from kedge.server.state import ServerState
from kedge.server.storage.items import StoredItems
from kedge.server.storage.responses import StoredConversation


@http.in_database(requests.check_conversation_create, empty={})
def create(service: ServerState, _: Request, body: Any) -> dict[str, Any]:
    """Answer ``POST /v1/conversations``."""
    if service.settings.zero_data_retention:
        raise errors.CONVERSATION_ZERO_DATA_RETENTION()
    node_key, items = _prepare_items(service, body.get("items") or [], existing=[])
    metadata: dict[str, str] = body.get("metadata") or {}
    return service.conversations.create(metadata, node_key, items).to_json()


@http.in_database()
def retrieve(service: ServerState, request: Request) -> dict[str, Any]:
    """Answer ``GET /v1/conversations/{id}``."""
    return _find_conversation(service, request).to_json()


@http.in_database(requests.check_conversation_update)
def update(service: ServerState, request: Request, body: Any) -> dict[str, Any]:
    """Answer ``POST /v1/conversations/{id}``: replace the metadata."""
    conversation = _find_conversation(service, request)
    service.conversations.set_metadata(conversation.id, body["metadata"] or {})
    return _find_conversation(service, request).to_json()


@http.in_database()
def delete(service: ServerState, request: Request) -> dict[str, Any]:
    """Answer ``DELETE /v1/conversations/{id}``."""
    conversation = _find_conversation(service, request)
    with service.conversations.lock(conversation):
        service.conversations.delete(conversation)
    return {"id": conversation.id, "object": "conversation.deleted", "deleted": True}


@http.in_database()
def list_items(service: ServerState, request: Request) -> dict[str, Any]:
    """Answer ``GET /v1/conversations/{id}/items``, in pages."""
    http.check_include(request)
    items = service.conversations.items(_find_conversation(service, request))
    return http.paginate(items, request.query_params)


@http.in_database(requests.check_conversation_items)
def add_items(service: ServerState, request: Request, body: Any) -> dict[str, Any]:
    """Answer ``POST /v1/conversations/{id}/items``."""
    http.check_include(request)
    conversation = _find_conversation(service, request)
    with service.conversations.lock(conversation):
        existing = service.conversations.items(conversation)
        node_key, items = _prepare_items(service, body["items"], existing)
        if items:
            service.conversations.add(conversation, node_key, items)
    return http.build_list(items)


@http.in_database()
def retrieve_item(service: ServerState, request: Request) -> Item:
    """Answer ``GET /v1/conversations/{id}/items/{item}``."""
    http.check_include(request)
    item_id: str = request.path_params["item"]
    conversation = _find_conversation(service, request)
    for item in service.conversations.items(conversation):
        if item["id"] == item_id:
            return item
    raise errors.CONVERSATION_ITEM_NOT_FOUND(id=item_id, conversation=conversation.id)


@http.in_database()
def delete_item(service: ServerState, request: Request) -> dict[str, Any]:
    """Answer ``DELETE /v1/conversations/{id}/items/{item}``."""
    item_id: str = request.path_params["item"]
    conversation = _find_conversation(service, request)
    with service.conversations.lock(conversation):
        if not service.conversations.remove(conversation, item_id):
            raise errors.CONVERSATION_ITEM_NOT_FOUND(id=item_id, conversation=conversation.id)
    return conversation.to_json()


def _find_conversation(service: ServerState, request: Request) -> StoredConversation:
    conversation_id: str = request.path_params["id"]
    conversation = service.conversations.find(conversation_id)
    if conversation is None:
        raise errors.CONVERSATION_NOT_FOUND(id=conversation_id)
    return conversation


def _prepare_items(
    service: ServerState, new_items: Sequence[Item], existing: Sequence[Item]
) -> tuple[str, list[Item]]:
    """Check new items, and return them in the form in which they are stored, with the key of their node.

    The ids of the items are made of the key.
    """
    node_key = service.nodes.new_key()
    resolved = coherence.resolve_references(new_items, StoredItems(service.nodes))
    coherence.check_duplicate_ids(coherence.EMPTY_COHERENCE.extend(existing), resolved)
    coherence.check_encrypted_content(resolved, service.cipher.decrypt)
    return node_key, normalize_items(resolved, node_key)
