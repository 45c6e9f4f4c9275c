"""Check the tool results that a caller passes, before they are sent or stored.

A wrong result in a stored history is removed by the middleware ``repair``. A result that the caller passes now must
not be removed: the model would be told that its tool was not run.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from kedge.errors import UnmatchedResult
from kedge.planning.digests import CallKey, Problem, ProblemKind, call_effect
from kedge.planning.plan import find_problems
from kedge.turns import Block, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn
from kedge.turns.turn import count_common_blocks

MAX_LISTED_CALLS = 5
"""The maximum number of open calls in an error."""
_WRONG_RESULTS = frozenset({"orphan", "answered_twice"})


def check_added_results(before: Turn, after: Turn) -> None:
    """Raise an error if a change of a Turn adds a tool result that belongs to no open call.

    Args:
        before: The Turn before the change. Its own problems are no error, because ``repair`` is for them.
        after: The Turn after the change.

    Raises:
        UnmatchedResult: A new result has no call before it, or its call has another result.
    """
    common = count_common_blocks(before, after)
    added = _count_results(after[common:]) - _count_results(before[common:])
    if not added:
        return
    known_problems = _count_problems(before)
    for problem in find_problems(after):
        key = problem.kind, problem.call_id
        if known_problems[key]:
            known_problems[key] -= 1
        elif problem.kind in _WRONG_RESULTS and problem.call_id in added:
            raise _build_error(problem, after)


def _count_results(blocks: Iterable[Block]) -> Counter[str]:
    """Return the number of results for each call id.

    They are not compared by block, because a history that a program rebuilt has the same results with other block ids.
    """
    effects = filter(None, map(call_effect, blocks))
    return Counter(keys[0][1] for opens, keys in effects if not opens)


def _count_problems(turn: Turn) -> Counter[tuple[ProblemKind, str]]:
    return Counter((problem.kind, problem.call_id) for problem in find_problems(turn))


class _Call(msgspec.Struct):
    """A call of a Turn, and whether it has a result."""

    block: Block
    keys: tuple[CallKey, ...]
    is_answered: bool = False

    @property
    def call_id(self) -> str:
        return self.keys[0][1]

    def __str__(self) -> str:
        if isinstance(self.block, ToolCallBlock):
            return f"{self.call_id} ({self.block.name})"
        return self.call_id


def _list_calls(turn: Turn) -> list[_Call]:
    """Return the calls of a Turn in order."""
    calls: list[_Call] = []
    open_calls: dict[CallKey, _Call] = {}
    for block in turn:
        effect = call_effect(block)
        if effect is None:
            continue
        opens, keys = effect
        if opens:
            call = _Call(block, keys)
            calls.append(call)
            open_calls.update(dict.fromkeys(keys, call))
        elif keys[0] in open_calls:
            answered = open_calls[keys[0]]
            answered.is_answered = True
            for key in answered.keys:
                open_calls.pop(key, None)
    return calls


def _build_error(problem: Problem, turn: Turn) -> UnmatchedResult:
    """Return the error for a result, with the right id if it is known."""
    result_id = problem.call_id
    if problem.kind == "answered_twice":
        return UnmatchedResult(
            f"the call {result_id} has a result already; leave the new one out", result_id
        )
    calls = _list_calls(turn)
    for call in calls:
        if result_id == call.call_id:
            remedy = _describe_mismatch(call, turn[turn.index(problem.block_id)])
            return UnmatchedResult(f"the result for call {call} {remedy}", result_id, result_id)
        if result_id in (call.block.id, call.block.item_id):
            kind = "block" if result_id == call.block.id else "item"
            remedy = f"use its call_id, {call.call_id}"
            if call.is_answered:
                remedy = "which has a result already"
            message = f"{result_id} is the id of the {kind} of call {call}, {remedy}"
            return UnmatchedResult(message, result_id, call.call_id)
    open_calls = [str(call) for call in calls if not call.is_answered]
    return UnmatchedResult(
        f"no call has the call_id {result_id} here; {_describe_open(open_calls)}", result_id
    )


def _describe_mismatch(call: _Call, result: Block) -> str:
    """Return why a result with the id of a call is not its result, and what to do."""
    effect = call_effect(result)
    call_family, _ = call.keys[0]
    if effect is not None and effect[1][0][0] == call_family:
        return "is before its call; move it after the call"
    if isinstance(call.block, ToolCallBlock) and isinstance(result, ToolResultBlock):
        return f"is of another kind than the call; use tool_result(…, custom={call.block.custom})"
    kind: str = call.block.kind
    if isinstance(call.block, OpaqueBlock):
        kind = call.block.type
    return f"is of another kind than the call; pass the result of a {kind}"


def _describe_open(calls: list[str]) -> str:
    if not calls:
        return "no call is open"
    names = calls[:MAX_LISTED_CALLS]
    if len(calls) > MAX_LISTED_CALLS:
        names.append("…")
    return f"open calls: {', '.join(names)}"
