"""Approval of tool calls: an approver allows, denies or edits a call before it runs.

An approver is a function of the call, sync or async; a sync one runs in a thread, so it may wait for
input at a terminal. It returns ``Allow()``, ``Deny("reason")`` or ``Edit(arguments)``; ``True`` and ``False``
mean ``Allow()`` and ``Deny()``. If the approver raises, the call is denied.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from anyio import to_thread
from msgspec.structs import replace

from kedge.tools.signature import is_async
from kedge.turns import ToolCallBlock, tool_call
from kedge.turns.frozen_json import copy_read_only_object


@dataclass(frozen=True, slots=True)
class Allow:
    """Run the call unchanged."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Do not run the call.

    Args:
        reason: The reason, which is returned to the model as the result of the call.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Run the call with other arguments.

    Args:
        arguments: The new arguments, as a mapping or as JSON text.
        tell: Whether the result shows the new arguments to the model.
    """

    arguments: str | Mapping[str, Any]
    tell: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, str):
            object.__setattr__(self, "arguments", copy_read_only_object(self.arguments))


Decision = Allow | Deny | Edit
"""The decision of an approver."""
Approver = Callable[[ToolCallBlock], Decision | bool | Awaitable[Decision | bool]]
"""Decides about a call before it runs, sync or async; True and False are ``Allow`` and ``Deny``."""


async def request_approval(approve: Approver, call: ToolCallBlock) -> Decision:
    """Call the approver and return its decision.

    Raises:
        TypeError: The approver returned a value that is not a decision.
    """
    if is_async(approve):
        returned = approve(call)
    else:
        returned = await to_thread.run_sync(approve, call, abandon_on_cancel=True)
    decided = await returned if isawaitable(returned) else returned
    match decided:
        case Allow() | Deny() | Edit():
            return decided
        case True:
            return Allow()
        case False:
            return Deny()
        case _:  # pyright: ignore[reportUnnecessaryComparison] - not every caller checks types
            raise TypeError(
                f"an approver returns Allow(), Deny(reason) or Edit(arguments), not {decided!r:.100}"
            )


def apply_edit(call: ToolCallBlock, edit: Edit) -> ToolCallBlock:
    """Return the call with the approver's arguments."""
    return replace(call, arguments=tool_call(call.name, edit.arguments).arguments)
