"""The Messages API of Anthropic."""

from kedge.engines.anthropic.engine import AnthropicEngine

__all__ = ["AnthropicEngine"]
