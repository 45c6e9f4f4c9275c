"""Calls of tools and their records."""

from typing import Any

import anyio

from kedge.tools import Toolbox, ToolRun, run_calls
from kedge.turns import ToolCallBlock, tool_call


def make_calls(*names: str, **arguments: Any) -> list[ToolCallBlock]:
    """Return calls of these tools, all with the same arguments."""
    return [tool_call(name, arguments, call_id=f"c{i}") for i, name in enumerate(names)]


async def run_call(toolbox: Toolbox, call: ToolCallBlock, **options: Any) -> ToolRun:
    """Run one call and return its record."""
    runs: list[ToolRun] = []
    with anyio.fail_after(300):
        (result,) = await run_calls(toolbox, [call], on_run=runs.append, **options)
    assert [run.result for run in runs] == [result]
    return runs[0]
