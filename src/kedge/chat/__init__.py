"""Chat: conversations whose complete state is one opaque value that the caller stores."""

from kedge.chat.chat import Chat, ChatReply, ChatStream, State
from kedge.chat.state import DISCARD_REASONS, StateReport, new_key

__all__ = ["DISCARD_REASONS", "Chat", "ChatReply", "ChatStream", "State", "StateReport", "new_key"]
