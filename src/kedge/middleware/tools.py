"""``tools``: runs what the model calls, and goes on until it answers.

Every round sends the results of the last one; chained, that is all it sends. No call is ever left
without a result: at the limit of rounds the open calls are answered with words that say so, and the model
is asked once more, without tools. Calls of tools that the caller offered and this toolbox does not
have are the caller's to answer: the run ends there, with everything else answered.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.events.run import ToolFinished, ToolStarted, TurnFinished
from kedge.middleware.base import BaseMiddleware
from kedge.observe import count, get_logger, measure
from kedge.planning import find_problems
from kedge.tools import AnyTool, Approver, Toolbox
from kedge.tools.execute import iter_runs
from kedge.turns import ToolCallBlock, ToolResultBlock, Turn, tool_result

log = get_logger(__name__)

NAME = "tools"
LIMIT_TEXT = "Not run: the limit of {rounds} rounds of tool calls is reached. Answer without tools."


def tools(
    *functions: AnyTool | Callable[..., Any],
    toolbox: Toolbox | None = None,
    approve: Approver | None = None,
    max_rounds: int = 16,
) -> Middleware:
    """Offer tools to the model, and run those it calls, for at most ``max_rounds`` rounds.

    ``approve`` is asked before each call, and may refuse it or change its arguments.
    """
    box = toolbox.with_tools(*functions) if toolbox else Toolbox(*functions)

    def wrap(engine: Engine) -> Engine:
        return _ToolsMiddleware(engine, box, approve, max_rounds)

    return wrap


class _ToolsMiddleware(BaseMiddleware):
    name = NAME

    def __init__(
        self, inner: Engine, toolbox: Toolbox, approve: Approver | None, max_rounds: int
    ) -> None:
        super().__init__(inner)
        self.toolbox, self.approve, self.max_rounds = toolbox, approve, max_rounds
        self.definitions = tuple(toolbox.definitions())

    async def events(self, turn: Turn, request: Request) -> Events:
        """The events of every round; the last one ends with the Turn."""
        foreign = {str(tool.get("name")) for tool in request.tools} - set(self.toolbox)
        request = request.with_tools(self.definitions)
        for rounds in range(self.max_rounds + 1):
            async with aclosing(self.inner.events(turn, request)) as events:
                async for event in events:
                    if isinstance(event, TurnFinished):
                        turn = event.turn
                    else:
                        yield event
            calls = find_open_calls(turn)
            ours = [call for call in calls if call.name not in foreign]
            if not calls:
                yield TurnFinished(turn)
                return
            if rounds == self.max_rounds:
                break
            async with aclosing(self._run_calls(turn, ours)) as events:
                async for event in events:
                    if isinstance(event, TurnFinished):
                        turn = event.turn
                    else:
                        yield event
            if len(ours) < len(calls):
                break
            request = _release_tool_choice(request)
        async with aclosing(self._finish_at_limit(turn, request, foreign)) as events:
            async for event in events:
                yield event

    async def _run_calls(self, turn: Turn, calls: Sequence[ToolCallBlock]) -> Events:
        """Run calls side by side, and tell each result as it comes; the Turn with all comes last."""
        for call in calls:
            yield ToolStarted(call)
        results: dict[str, ToolResultBlock] = {}
        finished = iter_runs(self.toolbox, calls, approve=self.approve, origin=NAME)
        async with aclosing(finished) as runs:
            async for run in runs:
                results[run.call.id] = run.result
                count("tool_runs_total", outcome=run.outcome)
                measure("tool_duration_seconds", run.seconds)
                yield ToolFinished(run.call, run.result, run.seconds, run.outcome)
        yield TurnFinished(turn.append(*(results[call.id] for call in calls)))

    async def _finish_at_limit(self, turn: Turn, request: Request, foreign: set[str]) -> Events:
        """Leave no call of ours open: at the limit, answer them and ask for words instead."""
        calls = find_open_calls(turn)
        left = [call for call in calls if call.name not in foreign]
        if not left:
            yield TurnFinished(turn)
            return
        log.warning("the limit of %d rounds of tool calls is reached", self.max_rounds)
        turn = self._reject_calls(turn, left)
        if len(left) < len(calls):  # the model cannot go on before the caller has answered
            yield TurnFinished(turn)
            return
        request = replace(request, params={**request.params, "tool_choice": "none"})
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if not isinstance(event, TurnFinished):
                    yield event
                    continue
                still = [call for call in find_open_calls(event.turn) if call.name not in foreign]
                yield TurnFinished(self._reject_calls(event.turn, still))

    def _reject_calls(self, turn: Turn, calls: Sequence[ToolCallBlock]) -> Turn:
        words = LIMIT_TEXT.format(rounds=self.max_rounds)
        return turn.append(
            *(tool_result(c.call_id, words, custom=c.custom, origin=NAME) for c in calls)
        )


def find_open_calls(turn: Turn) -> list[ToolCallBlock]:
    """The calls of the Turn that have no result yet, in order."""
    waiting = {p.block_id for p in find_problems(turn) if p.kind == "unanswered"}
    if not waiting:
        return []
    return [b for b in turn.blocks if b.id in waiting and isinstance(b, ToolCallBlock)]


def _release_tool_choice(request: Request) -> Request:
    """After the first round the model may answer: a forced choice would be made for ever."""
    choice = request.params.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return request
    return replace(request, params={**request.params, "tool_choice": "auto"})
