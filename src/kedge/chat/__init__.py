"""Chat: conversations whose whole state is one opaque value that its owner keeps."""

from kedge.chat.answer import Answer, ChatStream
from kedge.chat.chat import Chat, State
from kedge.chat.inspecting import StateReport
from kedge.chat.sealing import new_key
from kedge.chat.state import REASONS

__all__ = ["REASONS", "Answer", "Chat", "ChatStream", "State", "StateReport", "new_key"]
