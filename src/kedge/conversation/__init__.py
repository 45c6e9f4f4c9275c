"""Conversations: with their state in a store (`Conversation`), or as one opaque value (`Chat`)."""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr

if TYPE_CHECKING:
    from kedge.conversation.chat import Chat, ChatReply, ChatStream, State
    from kedge.conversation.chat_state import DISCARD_REASONS, StateReport, new_key
    from kedge.conversation.conversation import Conversation, ConversationSettings
    from kedge.conversation.lookup import find_anchors, with_stored_anchors
    from kedge.conversation.run import ConversationStream, Reply
    from kedge.engines.request_log import CostFunction
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "Chat": "kedge.conversation.chat",
            "ChatReply": "kedge.conversation.chat",
            "ChatStream": "kedge.conversation.chat",
            "Conversation": "kedge.conversation.conversation",
            "ConversationSettings": "kedge.conversation.conversation",
            "ConversationStream": "kedge.conversation.run",
            "CostFunction": "kedge.engines.request_log",
            "DISCARD_REASONS": "kedge.conversation.chat_state",
            "Reply": "kedge.conversation.run",
            "State": "kedge.conversation.chat",
            "StateReport": "kedge.conversation.chat_state",
            "find_anchors": "kedge.conversation.lookup",
            "new_key": "kedge.conversation.chat_state",
            "with_stored_anchors": "kedge.conversation.lookup",
        },
    )

__all__ = [
    "DISCARD_REASONS",
    "Chat",
    "ChatReply",
    "ChatStream",
    "Conversation",
    "ConversationSettings",
    "ConversationStream",
    "CostFunction",
    "Reply",
    "State",
    "StateReport",
    "find_anchors",
    "new_key",
    "with_stored_anchors",
]
