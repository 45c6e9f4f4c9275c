"""Durable conversations: an engine with its middleware, and a position in a store."""

from kedge.conversation.conversation import Conversation, ConversationSettings
from kedge.conversation.lookup import find_anchors, with_stored_anchors
from kedge.conversation.run import ConversationStream, Reply
from kedge.engines.request_log import CostFunction

__all__ = [
    "Conversation",
    "ConversationSettings",
    "ConversationStream",
    "CostFunction",
    "Reply",
    "find_anchors",
    "with_stored_anchors",
]
