"""Approval: somebody looks at a call before it runs, and may refuse or edit it.

An approver is a function of the call, sync or async; a sync one runs in a thread, so it may wait for a
person at a terminal. It answers with ``Allow()``, ``Refuse("why")`` or ``Edit(arguments)``; ``True``
and ``False`` do as well. An approver that fails has not approved.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from anyio import to_thread

from kedge.tools.signature import is_async
from kedge.turns import ToolCallBlock, tool_call


@dataclass(frozen=True, slots=True)
class Allow:
    """The call may run as it is."""


@dataclass(frozen=True, slots=True)
class Deny:
    """The call does not run; the model is told the reason."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """The call runs with other arguments; unless ``tell`` is false, the model is told which."""

    arguments: str | Mapping[str, Any]
    tell: bool = True


Decision = Allow | Deny | Edit
Approver = Callable[[ToolCallBlock], Decision | bool | Awaitable[Decision | bool]]


async def request_approval(approve: Approver, call: ToolCallBlock) -> Decision:
    """What the approver says."""
    if is_async(approve):
        said = approve(call)
    else:
        said = await to_thread.run_sync(approve, call, abandon_on_cancel=True)
    decided = await said if isawaitable(said) else said
    match decided:
        case Allow() | Deny() | Edit():
            return decided
        case True:
            return Allow()
        case False:
            return Deny()
        case _:  # pyright: ignore[reportUnnecessaryComparison] - not every caller checks types
            raise TypeError(
                f"an approver answers Allow(), Refuse(reason) or Edit(arguments), not {decided!r:.100}"
            )


def apply_edit(call: ToolCallBlock, edit: Edit) -> ToolCallBlock:
    """The call with the approver's arguments."""
    return tool_call(
        call.name,
        edit.arguments,
        call_id=call.call_id,
        custom=call.custom,
        id=call.id,
        metadata=call.metadata,
        origin=call.origin,
        extra=call.extra,
    )
