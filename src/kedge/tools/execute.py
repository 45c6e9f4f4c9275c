"""Run the tool calls of a model in parallel, with exactly one result for each.

Every failure (an unknown tool, invalid arguments, a denied call, an exception, a timeout) becomes a result
for the model, because a call without a result makes the conversation unsendable. ``on_run`` is called exactly
once for each call, also when the caller is cancelled: finished calls as they finish, the others at the end as
cancelled. Only exceptions that are not an ``Exception``, such as ``KeyboardInterrupt`` (but not ``GeneratorExit``),
are raised, after the other calls were cancelled and reported.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kedge.engines.content_filter import ContentFilters
from kedge.tools.call_runner import Approver, CallContext, CallRunner, OnRun, ToolRun
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
    filters: ContentFilters | None = None,
    text_only: bool = False,
) -> list[ToolResultBlock]:
    """Run tool calls in parallel.

    Args:
        toolbox: The tools that may be called.
        calls: The calls of a model.
        approve: A function that is called before each call that needs approval, one call at a time.
        on_run: A function that receives the record of each finished call; it must not block or raise.
        max_output: Maximum characters of text in one result; longer text is truncated with a note.
        origin: The ``origin`` of the result blocks.
        filters: Content filters for the results, applied before they are truncated.
        text_only: Whether images and files in the results are replaced by descriptions.

    Returns:
        One result for each call, in the order of the calls.
    """
    shown = filters or ContentFilters()
    context = CallContext(toolbox, approve, on_run, max_output, origin, shown, text_only)
    runners = [CallRunner(context, call) for call in calls]
    escaped: list[BaseException] = []
    try:
        async with anyio.create_task_group() as group:
            for runner in runners:
                group.start_soon(_run_call, runner, group, escaped)
    finally:
        results = [runner.get_record().result for runner in runners]
    if escaped:
        raise escaped[0]
    return results


async def iter_runs(
    toolbox: Toolbox,
    calls: Sequence[ToolCallBlock],
    *,
    on_run: OnRun,
    **options: Any,
) -> AsyncGenerator[ToolRun]:
    """Run tool calls in parallel and yield the record of each as soon as it has a result.

    If the caller stops iterating or is cancelled, the remaining calls are cancelled. ``on_run`` also receives
    their records; the other options are those of ``run_calls``.
    """
    done: asyncio.Queue[ToolRun | None] = asyncio.Queue()
    escaped: list[BaseException] = []

    def report(run: ToolRun) -> None:
        on_run(run)
        done.put_nowait(run)

    if len(calls) == 1:  # a single call needs no separate task
        await run_calls(toolbox, calls, on_run=report, **options)
        if run := done.get_nowait():
            yield run
        return

    async def run_all() -> None:
        # SystemExit raised in a task of its own would end the event loop, also that of other callers.
        try:
            await run_calls(toolbox, calls, on_run=report, **options)
        except (SystemExit, KeyboardInterrupt) as error:
            escaped.append(error)

    work = asyncio.ensure_future(run_all())
    work.add_done_callback(lambda _: done.put_nowait(None))
    try:
        while run := await done.get():
            yield run
        await work
        if escaped:
            raise escaped[0]
    finally:
        work.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(work, return_exceptions=True)


async def _run_call(runner: CallRunner, group: TaskGroup, escaped: list[BaseException]) -> None:
    """Run one call; exceptions that must not become results are raised by ``run_calls``."""
    try:
        await runner.run()
    except anyio.get_cancelled_exc_class():
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by run_calls, out of any group
        escaped.append(error)
        group.cancel_scope.cancel()
