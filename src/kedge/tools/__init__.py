"""Tools: typed functions that a model may call, and the execution of its calls.

``tool`` creates a Tool from a function, a ``Toolbox`` maps names to tools, and ``run_calls`` runs the calls
of a model: validated, approved, in parallel, each with exactly one result.

Every failure (an unknown tool, invalid arguments, a denied call, an exception, a timeout) becomes a result
for the model, because a call without a result makes the conversation unsendable. ``on_run`` is called exactly
once for each call, also when the caller is cancelled: finished calls as they finish, the others at the end as
cancelled. Only exceptions that are not an ``Exception``, such as ``KeyboardInterrupt`` (but not ``GeneratorExit``),
are raised, after the other calls were cancelled and reported.

One call: find the tool, parse the arguments, request approval, run, retry. A step that ends the execution early
raises ``_EarlyResult``: an outcome and a text for the model.

An approver is a function of the call, sync or async; a sync one runs in a thread, so it may wait for
input at a terminal. It returns ``Allow()``, ``Deny("reason")`` or ``Edit(arguments)``; ``True`` and ``False``
mean ``Allow()`` and ``Deny()``. If the approver raises, the call is denied.
"""

from kedge.errors import ToolFailed
from kedge.tools.invoke import MAX_OUTPUT
from kedge.tools.run import (
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
from kedge.tools.tool import AnyTool, Grammar, Tool, Toolbox, Toolset, ToolSource, tool

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
    "Toolset",
    "run_calls",
    "tool",
]
