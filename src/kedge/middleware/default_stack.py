"""The middleware stack of Chat and Conversation.

Compaction is outermost, then the caller's middleware, then tools, and repair next to the engine.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kedge.compaction import Compactor
from kedge.engines import Engine, Middleware
from kedge.middleware import compact, with_middleware
from kedge.middleware.repair import repair as repairing
from kedge.middleware.tools import ToolSelector
from kedge.middleware.tools import tools as tooling
from kedge.tokens import DEFAULT_COUNTER, TokenCounter
from kedge.tools import AnyTool, Approver, Toolbox

Tools = Toolbox | Iterable[AnyTool | Callable[..., Any] | Toolbox] | ToolSelector
"""A toolbox; tools, functions and toolboxes; or a function that returns them for a Turn."""


def with_default_middleware(
    engine: Engine,
    *,
    tools: Tools = (),
    approve: Approver | None = None,
    middleware: Sequence[Middleware] = (),
    compactor: Compactor | None = None,
    counter: TokenCounter = DEFAULT_COUNTER,
    resend_limit: int | None = None,
    repair: bool = True,
    innermost: Sequence[Middleware] = (),
) -> Engine:
    """Return the engine in its stack; ``innermost`` middleware gets a Turn exactly as it is sent."""
    toolbox = tools if isinstance(tools, Toolbox) or callable(tools) else Toolbox(*tools)
    stack = [*middleware]
    if compactor is not None:
        stack.insert(
            0, compact(compactor, engine=engine, counter=counter, resend_limit=resend_limit)
        )
    if not isinstance(toolbox, Toolbox) or toolbox or toolbox.sources:
        stack.append(tooling(toolbox=toolbox, approve=approve))
    if repair:
        stack.append(repairing())
    return with_middleware(engine, *stack, *innermost)
