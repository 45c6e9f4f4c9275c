"""Conversations that last: an engine with its middleware, and a place in a store."""

from kedge.conversation.conversation import Conversation
from kedge.conversation.recall import find_anchors, recall
from kedge.conversation.reply import Reply
from kedge.conversation.running import ConversationStream
from kedge.conversation.taking import Price

__all__ = [
    "Conversation",
    "ConversationStream",
    "Price",
    "Reply",
    "find_anchors",
    "recall",
]
