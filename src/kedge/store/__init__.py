"""The store: durable conversations with their trees of nodes and their responses."""

from kedge.events.request_record import RequestRecord
from kedge.security.access_tokens import AccessToken, TokenUse
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
