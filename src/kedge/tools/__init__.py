"""Tools: plain typed functions that a model may call, and the running of its calls.

``tool`` makes a Tool of a function, a ``Toolbox`` holds them by name, and ``run_calls`` answers the
calls of a model: validated, approved, in parallel, each with exactly one result.
"""

from kedge.tools.approval import Allow, Approve, Decision, Edit, Refuse
from kedge.tools.execute import run_calls
from kedge.tools.output import MAX_OUTPUT
from kedge.tools.record import OnRun, Outcome, ToolRun
from kedge.tools.registry import AnyTool, Toolbox
from kedge.tools.tool import Grammar, Tool, tool

__all__ = [
    "MAX_OUTPUT",
    "Allow",
    "AnyTool",
    "Approve",
    "Decision",
    "Edit",
    "Grammar",
    "OnRun",
    "Outcome",
    "Refuse",
    "Tool",
    "ToolRun",
    "Toolbox",
    "run_calls",
    "tool",
]
