"""Tools: typed functions that a model may call, and the execution of its calls.

``tool`` creates a Tool from a function, a ``Toolbox`` maps names to tools, and ``run_calls`` runs the calls
of a model: validated, approved, in parallel, each with exactly one result.
"""

from kedge.errors import ToolFailed
from kedge.tools.call_runner import (
    Allow,
    Approver,
    Decision,
    Deny,
    Edit,
    OnRun,
    ToolOutcome,
    ToolRun,
    run_calls,
)
from kedge.tools.output import MAX_OUTPUT
from kedge.tools.tool import AnyTool, Grammar, Tool, Toolbox, ToolSource, tool

__all__ = [
    "MAX_OUTPUT",
    "Allow",
    "AnyTool",
    "Approver",
    "Decision",
    "Deny",
    "Edit",
    "Grammar",
    "OnRun",
    "Tool",
    "ToolFailed",
    "ToolOutcome",
    "ToolRun",
    "ToolSource",
    "Toolbox",
    "run_calls",
    "tool",
]
