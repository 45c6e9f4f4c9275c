"""The Chat Completions API."""

from kedge.engines.chat_completions.engine import ChatCompletionsEngine
from kedge.engines.chat_completions.render import messages_from_blocks

__all__ = ["ChatCompletionsEngine", "messages_from_blocks"]
