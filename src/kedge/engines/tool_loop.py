"""``tools``: run the tools that the model calls, until it answers.

Every round sends the results of the last one; in a chained conversation it sends nothing else. Every call
gets a result: at the limit of rounds the open calls are answered with a text about the limit, and a last request
is sent without tools. Calls of tools that the caller offered and that are not in this toolbox are left to
the caller: the run ends there, with all other calls answered. A toolbox may be a function of the
Turn; it is called before each request, and the calls of the answer run with the returned tools.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from msgspec import structs
from typing_extensions import TypeIs

from kedge._internal.arguments import check_count
from kedge.engines.base import Engine, Events, Middleware, find_filters, list_stack, unwrap
from kedge.engines.request import Request
from kedge.engines.stack import BaseMiddleware, with_middleware
from kedge.errors import InvalidSetting
from kedge.events.run import ToolFinished, ToolStarted, TurnFinished
from kedge.observe import count, get_logger, measure
from kedge.planning import RequestPlan, find_problems
from kedge.tools import AnyTool, Approver, Tool, Toolbox, ToolRun, Toolset
from kedge.tools.run import CallContext, iter_runs
from kedge.tools.signature import get_function_name
from kedge.tools.toolbox import build_toolbox
from kedge.turns import ToolCallBlock, ToolResultBlock, Turn, tool_result

log = get_logger(__name__)

ToolSelector = Callable[[Turn], Toolset]
"""Returns the tools to offer for a Turn."""

NAME = "tools"
LIMIT_TEXT = "Not run: the limit of {rounds} rounds of tool calls is reached. Answer without tools."


def tools(
    *functions: AnyTool | Callable[..., Any] | Mapping[str, Any],
    toolbox: Toolset | ToolSelector | None = None,
    approve: Approver | None = None,
    max_rounds: int = 16,
) -> Middleware:
    """Offer tools to the model, and run those it calls.

    Args:
        *functions: Functions or tools to offer; the calls of a definition are left to the caller.
        toolbox: A toolbox or tools to offer in addition to ``functions``, or a function of the Turn that returns
            them, called before each request.
        approve: A function that is called before each call and may deny it or change its arguments.
        max_rounds: The maximum number of rounds of calls before the model must answer without tools.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        InvalidSetting: An option has a wrong type, or ``max_rounds`` is negative.
        InvalidTool: A function cannot be a tool, or two tools have the same name.
    """
    if approve is not None and not callable(approve):
        raise InvalidSetting("approve must be a function that is called with each tool call")
    check_count("max_rounds", max_rounds)
    selector: ToolSelector | None = None
    fixed = Toolbox(*functions)
    if is_selector(toolbox):
        selector = toolbox
    elif toolbox is not None:
        fixed = Toolbox(build_toolbox(toolbox), *functions)

    return lambda engine: _ToolsMiddleware(engine, fixed, selector, max_rounds, approve)


def wrap_in_tool_loop(engine: Engine, functions: Sequence[Any]) -> Engine:
    """Return the engine in a loop that runs these tools, with the approver of its stack."""
    approvers = (layer.approver for layer in list_stack(engine) if layer.approver is not None)
    return with_middleware(engine, tools(*functions, approve=next(approvers, None)))


def is_selector(tools: object) -> TypeIs[ToolSelector]:
    """Return whether this is a function that returns the tools for a Turn, and not a function that is a tool.

    Its only parameter is annotated with ``Turn``. An untyped function, which cannot be a tool, is a selector if
    its only parameter is named ``turn``, or if it is a lambda.
    """
    if not callable(tools) or isinstance(tools, Toolbox | Tool):
        return False
    try:
        parameters = list(signature(tools).parameters.values())
    except (TypeError, ValueError):  # a class or function written in C may have no signature
        return False
    if len(parameters) != 1:
        return False
    [parameter] = parameters
    if parameter.annotation is Parameter.empty:
        return parameter.name == "turn" or get_function_name(tools) == "<lambda>"
    return parameter.annotation in (Turn, "Turn")


@dataclass(eq=False, repr=False)
class _ToolsMiddleware(BaseMiddleware):
    name = NAME
    toolbox: Toolbox
    selector: ToolSelector | None
    max_rounds: int
    approver: Approver | None

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of a request with these tools."""
        request = Request.of(tools=options.pop("tools", ()), filters=find_filters(self.inner))
        offered = self._offer_tools(turn, request)[1]
        return self.inner.plan(turn, **options, tools=offered.tools)

    def _offer_tools(self, turn: Turn, request: Request) -> tuple[Toolbox, Request, set[str]]:
        """Return the toolbox for a Turn, the request with its tools, and the names of those that are only offered.

        The tools may depend on the Turn, and those of a source may have changed since the last request. The
        descriptions of external tools are filtered.
        """
        toolbox = self.toolbox
        if self.selector:
            toolbox = Toolbox(build_toolbox(self.selector(turn)), toolbox)
        edit = request.filters.edit_text if request.filters else None
        offered = (*request.tools, *toolbox.frozen_definitions(edit))
        offered_only = (*request.tools, *toolbox.offered)
        foreign = {str(definition.get("name")) for definition in offered_only} - set(toolbox)
        return toolbox, structs.replace(request, tools=offered), foreign

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of every round; the last event has the Turn."""
        # There is one request before the first round of calls, and one after each round. The calls of the request after
        # the last round are answered with a text about the limit, and a request without tools follows, so that the run
        # ends with an answer: two requests more than rounds.
        for rounds in range(self.max_rounds + 2):
            toolbox, offered, foreign = self._offer_tools(turn, request)
            if rounds > self.max_rounds:
                offered = structs.replace(offered, params={**request.params, "tool_choice": "none"})
            async with aclosing(self.inner.events(turn, offered)) as events:
                async for event in events:
                    if isinstance(event, TurnFinished):
                        turn = event.turn
                    else:
                        yield event
            calls = find_open_calls(turn)
            ours = [call for call in calls if call.name not in foreign]
            if rounds == self.max_rounds and ours:
                log.warning("the limit of %d rounds of tool calls is reached", rounds)
            if rounds >= self.max_rounds:
                turn = self._reject_calls(turn, ours)
            elif calls:
                results: dict[str, ToolResultBlock] = {}
                async with aclosing(self._run_calls(ours, toolbox, request, results)) as events:
                    async for event in events:
                        yield event
                turn = request.filters.apply_to_turn(turn)
                turn = turn.append(*(results[call.id] for call in ours))
            # The caller has to answer its own calls before the model continues.
            if not ours or len(ours) < len(calls):
                break
            if request.params.get("tool_choice") not in (None, "auto", "none"):
                # A forced choice would be repeated in every round.
                request = structs.replace(request, params={**request.params, "tool_choice": "auto"})
        yield TurnFinished(turn)

    async def _run_calls(
        self,
        calls: Sequence[ToolCallBlock],
        toolbox: Toolbox,
        request: Request,
        results: dict[str, ToolResultBlock],
    ) -> Events:
        """Run calls concurrently, and add each result to ``results`` and yield it as it arrives.

        A tool receives the unfiltered arguments. All output (events, results, the Turn with the calls) is filtered,
        because it is sent to the model and stored before a guard outside of this middleware receives it.
        """
        filters = request.filters
        for call in calls:
            yield ToolStarted(filters.apply(call))
        text_only = unwrap(self.inner).text_only_results
        context = CallContext(
            toolbox, self.approver, _count_run, origin=NAME, filters=filters, text_only=text_only
        )
        async with aclosing(iter_runs(context, calls)) as runs:
            async for run in runs:
                results[run.call.id] = run.result
                yield ToolFinished(filters.apply(run.call), run.result, run.seconds, run.outcome)

    def _reject_calls(self, turn: Turn, calls: Sequence[ToolCallBlock]) -> Turn:
        """Return the Turn with a result for calls after the last round."""
        text = LIMIT_TEXT.format(rounds=self.max_rounds)
        results = (tool_result(c.call_id, text, custom=c.custom, origin=NAME) for c in calls)
        return turn.append(*results)


def _count_run(run: ToolRun) -> None:
    count("tool_runs_total", outcome=run.outcome)
    measure("tool_duration_seconds", run.seconds)


def find_open_calls(turn: Turn) -> list[ToolCallBlock]:
    """Return the calls of the Turn that have no result yet, in order."""
    problems = find_problems(turn)
    if not problems:
        return []
    waiting = [p.block_id for p in problems if p.kind == "unanswered"]
    return [b for b in turn.blocks if b.id in waiting and isinstance(b, ToolCallBlock)]
