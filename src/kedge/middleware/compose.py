"""The stack of Chat and Conversation: compaction outermost, then the caller's middleware, then tools, then repair."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, Unpack, cast

from kedge.compaction import Compactor
from kedge.engines.base import Engine, Middleware
from kedge.engines.options import ResendLimit
from kedge.engines.stack import StackLayer, with_middleware
from kedge.engines.tool_loop import ToolSelector, is_selector
from kedge.engines.tool_loop import tools as tooling
from kedge.errors import InvalidSetting, UnknownSetting
from kedge.middleware.compact import compact, limit_resends
from kedge.middleware.turn_edits import repair as repairing
from kedge.middleware.turn_edits import system_prompt
from kedge.tools import Approver, Toolbox, Toolset
from kedge.tools.toolbox import build_toolbox
from kedge.turns import Turn
from kedge.usage.tokens import DEFAULT_COUNTER, TokenCounter

Tools = Toolset | ToolSelector
"""A toolbox; tools, functions, toolboxes and definitions; or a function that returns them for a Turn."""


SystemText = str | Callable[[Turn], str]
"""Instructions, or a function that returns them for a Turn."""


class StackSettings(TypedDict, total=False):
    """The keyword arguments of ``with_default_middleware``, with which a stack is built from settings."""

    system: SystemText
    tools: Tools
    approve: Approver | None
    middleware: Sequence[Middleware]
    compactor: Compactor | None
    counter: TokenCounter
    resend_limit: int | ResendLimit | None
    repair: bool


def check_stack(stack: StackSettings, further: Iterable[str], owner: str, advice: str = "") -> None:
    """Reject keyword arguments that are no settings of a stack.

    Args:
        stack: The keyword arguments.
        further: The names of the other settings of the owner, for the error.
        owner: What has these settings.
        advice: What to use for the purpose, if there is no similar name.

    Raises:
        UnknownSetting: There is no setting of this name.
    """
    known = StackSettings.__optional_keys__
    for name in stack.keys() - known:
        raise UnknownSetting(name, {*known, *further}, owner, advice)


def resolve_tools(tools: Tools) -> Toolbox | ToolSelector:
    """Return the toolbox for the ``tools`` of a program, or the function that returns them for a Turn.

    Raises:
        InvalidSetting: It is none of what ``tools`` accepts.
        InvalidTool: A function cannot be a tool, or two tools have the same name.
    """
    return tools if is_selector(tools) else build_toolbox(tools)


def with_default_middleware(
    engine: Engine,
    *,
    innermost: Callable[[Engine], StackLayer] = StackLayer,
    **settings: Unpack[StackSettings],
) -> Engine:
    """Return the engine in its stack; ``innermost`` is the middleware next to the engine."""
    toolbox = resolve_tools(settings.get("tools", ()))
    approve = settings.get("approve")
    middleware: object = settings.get("middleware", ())
    if not isinstance(middleware, Iterable):
        kind = type(middleware).__name__
        raise InvalidSetting(f"middleware must be a list, not {kind}: middleware=[guard(…)]")
    stack = list(cast("Iterable[Middleware]", middleware))
    system = settings.get("system")
    if system:
        stack.insert(0, system_prompt(system))
    compactor = settings.get("compactor")
    resend_limit = settings.get("resend_limit")
    if compactor is not None:
        compaction = compact(
            compactor,
            engine=engine,
            counter=settings.get("counter", DEFAULT_COUNTER),
            resend_limit=resend_limit,
        )
        stack.insert(0, compaction)
    elif resend_limit is not None:
        stack.insert(0, limit_resends(resend_limit))
    # Without tools, an approver still decides about those that are passed with a single message.
    has_tools = not isinstance(toolbox, Toolbox) or toolbox.definitions() or toolbox.sources
    if has_tools or approve is not None:
        stack.append(tooling(toolbox=toolbox, approve=approve))
    if settings.get("repair", True):
        stack.append(repairing())
    return with_middleware(innermost(engine), *stack)
