"""Tools: plain typed functions that a model may call."""

from kedge.tools.registry import Toolbox
from kedge.tools.tool import Grammar, Tool, tool

__all__ = ["Grammar", "Tool", "Toolbox", "tool"]
