"""The store: conversations that last, with their trees of nodes and their responses."""

from kedge.store.opening import open_store
from kedge.store.rows import (
    Claim,
    ConversationRow,
    Damage,
    Differences,
    Exchange,
    Hit,
    Incident,
    Loaded,
    Node,
    ResponseRow,
    ToolRow,
)
from kedge.store.store import Store
from kedge.store.trees import Accounts

__all__ = [
    "Accounts",
    "Claim",
    "ConversationRow",
    "Damage",
    "Differences",
    "Exchange",
    "Hit",
    "Incident",
    "Loaded",
    "Node",
    "ResponseRow",
    "Store",
    "ToolRow",
    "open_store",
]
