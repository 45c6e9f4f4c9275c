"""Running the calls of a model: in parallel, each to exactly one result, in the order of the calls.

Whatever happens to a call (an unknown tool, wrong arguments, a refusal, an exception, too little time)
becomes a result that tells the model, for a call without a result spoils the conversation. So
``on_run`` is called exactly once for each call, also when the caller is cancelled: what was completed
is delivered as it completes, the rest at the end, as cancelled. Only what is no ``Exception``, such as
``KeyboardInterrupt``, passes through, once the other calls were cancelled and delivered.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import anyio
from anyio.abc import TaskGroup

from kedge.tools.approval import Approver
from kedge.tools.call_runner import CallContext, CallRunner, OnRun, ToolRun
from kedge.tools.output import MAX_OUTPUT
from kedge.tools.registry import Toolbox
from kedge.turns import ToolCallBlock, ToolResultBlock


async def run_calls(
    toolbox: Toolbox,
    calls: Sequence[ToolCallBlock],
    *,
    approve: Approver | None = None,
    on_run: OnRun | None = None,
    max_output: int = MAX_OUTPUT,
    origin: str = "tools",
) -> list[ToolResultBlock]:
    """Run calls side by side and give their results in the order of the calls.

    ``approve`` is asked before a call runs, about one call at a time. ``on_run`` gets the record of
    each call as soon as it has a result; it must neither block nor fail. Text beyond ``max_output``
    characters is cut, visibly. The results carry ``origin``.
    """
    terms = CallContext(toolbox, approve, on_run, max_output, origin, anyio.Lock())
    settling = [CallRunner(terms, call) for call in calls]
    escaped: list[BaseException] = []
    try:
        async with anyio.create_task_group() as group:
            for each in settling:
                group.start_soon(_run_call, each, group, escaped)
    finally:
        results = [each.get_record().result for each in settling]
    if escaped:
        raise escaped[0]
    return results


async def iter_runs(
    toolbox: Toolbox, calls: Sequence[ToolCallBlock], *, approve: Approver | None, origin: str
) -> AsyncGenerator[ToolRun]:
    """Run calls side by side and give the record of each as soon as it has a result.

    Whoever leaves early, or is cancelled, has what was finished by then; the rest is cancelled.
    """
    if len(calls) == 1:  # nothing finishes before it, so it needs no task of its own
        runs: list[ToolRun] = []
        await run_calls(toolbox, calls, approve=approve, on_run=runs.append, origin=origin)
        yield runs[0]
        return
    done: asyncio.Queue[ToolRun | None] = asyncio.Queue()
    work = asyncio.ensure_future(
        run_calls(toolbox, calls, approve=approve, on_run=done.put_nowait, origin=origin)
    )
    work.add_done_callback(lambda _: done.put_nowait(None))
    try:
        while run := await done.get():
            yield run
        await work
    finally:
        work.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(work, return_exceptions=True)


async def _run_call(runner: CallRunner, group: TaskGroup, escaped: list[BaseException]) -> None:
    """Bring one call to its result; what must not become one is raised by ``run_calls``."""
    try:
        await runner.run()
    except anyio.get_cancelled_exc_class():
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by run_calls, out of any group
        escaped.append(error)
        group.cancel_scope.cancel()
