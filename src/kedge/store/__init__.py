"""The store: durable conversations with their trees of nodes and their responses."""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr

if TYPE_CHECKING:
    from kedge._internal.access_tokens import AccessToken, TokenUse
    from kedge.events.request_record import RequestRecord
    from kedge.store.open import open_store
    from kedge.store.proxied_requests import ProxiedRequest, ProxyTotals
    from kedge.store.records import (
        Claim,
        ConversationRow,
        Damage,
        Differences,
        Hit,
        Incident,
        LoadedPath,
        Node,
        StoredExchange,
        Telemetry,
        ToolRow,
        UnansweredQuestion,
    )
    from kedge.store.store import Store
    from kedge.store.token_registry import TokenRegistry
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "AccessToken": "kedge._internal.access_tokens",
            "Claim": "kedge.store.records",
            "ConversationRow": "kedge.store.records",
            "Damage": "kedge.store.records",
            "Differences": "kedge.store.records",
            "Hit": "kedge.store.records",
            "Incident": "kedge.store.records",
            "LoadedPath": "kedge.store.records",
            "Node": "kedge.store.records",
            "ProxiedRequest": "kedge.store.proxied_requests",
            "ProxyTotals": "kedge.store.proxied_requests",
            "RequestRecord": "kedge.events.request_record",
            "Store": "kedge.store.store",
            "StoredExchange": "kedge.store.records",
            "Telemetry": "kedge.store.records",
            "TokenRegistry": "kedge.store.token_registry",
            "TokenUse": "kedge._internal.access_tokens",
            "ToolRow": "kedge.store.records",
            "UnansweredQuestion": "kedge.store.records",
            "open_store": "kedge.store.open",
        },
    )

__all__ = [
    "AccessToken",
    "Claim",
    "ConversationRow",
    "Damage",
    "Differences",
    "Hit",
    "Incident",
    "LoadedPath",
    "Node",
    "ProxiedRequest",
    "ProxyTotals",
    "RequestRecord",
    "Store",
    "StoredExchange",
    "Telemetry",
    "TokenRegistry",
    "TokenUse",
    "ToolRow",
    "UnansweredQuestion",
    "open_store",
]
