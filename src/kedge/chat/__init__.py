"""Chat: conversations whose complete state is one opaque value that the caller stores."""

from kedge.chat.answer import Answer, ChatStream
from kedge.chat.chat import Chat, State
from kedge.chat.state import DISCARD_REASONS, StateReport, new_key

__all__ = ["DISCARD_REASONS", "Answer", "Chat", "ChatStream", "State", "StateReport", "new_key"]
