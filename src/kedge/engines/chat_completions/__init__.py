"""The Chat Completions API."""

from kedge.engines.chat_completions.engine import ChatCompletionsEngine

__all__ = ["ChatCompletionsEngine"]
