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

The modules are loaded when a name is first used: engines need only ``kedge.tools.definitions``.
"""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr

if TYPE_CHECKING:
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
    from kedge.tools.toolbox import AnyTool, Grammar, Tool, Toolbox, Toolset, ToolSource, tool
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "Allow": "kedge.tools.run",
            "AnyTool": "kedge.tools.toolbox",
            "Approver": "kedge.tools.run",
            "Decision": "kedge.tools.run",
            "Deny": "kedge.tools.run",
            "Edit": "kedge.tools.run",
            "Grammar": "kedge.tools.toolbox",
            "MAX_OUTPUT": "kedge.tools.invoke",
            "OnRun": "kedge.tools.run",
            "Tool": "kedge.tools.toolbox",
            "ToolFailed": "kedge.errors",
            "ToolOutcome": "kedge.tools.run",
            "ToolRun": "kedge.tools.run",
            "ToolSource": "kedge.tools.toolbox",
            "Toolbox": "kedge.tools.toolbox",
            "Toolset": "kedge.tools.toolbox",
            "run_calls": "kedge.tools.run",
            "tool": "kedge.tools.toolbox",
        },
    )

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
