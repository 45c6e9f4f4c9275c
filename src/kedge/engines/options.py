"""The options of a run, in the forms in which a caller writes them, and their checks.

An option that is no body member of a request says how the request is sent: in which mode, with which tools, or what
happens with an answer.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from kedge._internal.argument_types import check_members
from kedge._internal.arguments import check_callback, check_count, list_arguments
from kedge.engines.params import EXTRA_BODY, KNOWN_PARAMS, BodyParams
from kedge.errors import UnsupportedParameter
from kedge.planning import AnchorRecord, Mode, RequestPlan
from kedge.planning.anchors import validate_mode
from kedge.tools.definitions import OfferedTools, list_tools, split_tools
from kedge.turns import SystemBlock, Turn

WireTap = Callable[[bytes, bytes, int | None], None]
"""Called with the body of a request, the body of its reply, and the reply's status, if there was one."""
BeforeSend = Callable[[Turn], Awaitable[None]]
"""Awaited with each Turn exactly as it is about to be sent."""
EphemeralBlocks = str | SystemBlock | Iterable[str | SystemBlock]
"""System text that is sent with the requests of one run and is not part of any Turn."""


class ResendLimit(msgspec.Struct, frozen=True):
    """The largest full send after a loss or a change; a longer history is compacted first, or an error.

    Args:
        max_bytes: The maximum size of all blocks.
        max_blocks: The maximum number of blocks.
    """

    max_bytes: int | None = None
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        for limit in filter(None, (self.max_bytes, self.max_blocks)):
            check_count("resend_limit", limit)

    def is_exceeded(self, plan: RequestPlan) -> bool:
        """Return whether a full send of this plan's Turn is longer."""
        sizes = ((plan.full_bytes, self.max_bytes), (plan.full_blocks, self.max_blocks))
        return any(limit is not None and size > limit for size, limit in sizes)


def to_resend_limit(limit: int | ResendLimit | None) -> ResendLimit | None:
    """Return a limit that was given as a number of bytes, as a `ResendLimit`."""
    if limit is None or isinstance(limit, ResendLimit):
        return limit
    return ResendLimit(limit)


class RequestOptions(BodyParams, total=False):
    """The keyword arguments of ``run``, ``ask``, ``stream``, ``send`` and ``plan``.

    Attributes:
        model: The model to use instead of the engine's.
        mode: The mode to use instead of the conversation's or the engine's.
        tools: Tools to offer: an iterable of functions, tools, toolboxes and definitions in the form of the
            Responses API, or one of these. A run calls functions, tools and toolboxes, with the approver of the
            stack; calls of definitions are left to the caller.
        candidates: Further anchors that may be used, such as those of a store's index.
        streaming: Whether the answer is streamed.
        resend_limit: Raise ``ResendTooLong`` in place of a full send of more bytes, or blocks, of a conversation that
            has an answer to continue: after a loss, an edit, expiry, or while the server is doubted.
        tap: Called with each request body, reply body and status.
        before_send: Awaited with each Turn before it is sent.
        output_retries: How often an answer that does not match ``output`` is requested again.
        ephemeral: System text or system blocks of this run only: sent, but not part of the Turn.
        heal: Whether a request that the server cannot continue is sent again in another form; if not, its error is
            raised at once.
        keep_reasoning: Whether to request encrypted reasoning, so that it can be sent again after the server has lost
            a response; Turns and states are smaller without.
        extra_body: Members of the request body that Kedge does not know.
    """

    model: str
    mode: Mode | None
    tools: OfferedTools
    candidates: tuple[AnchorRecord, ...]
    streaming: bool
    resend_limit: int | ResendLimit | None
    tap: WireTap | None
    before_send: BeforeSend | None
    output_retries: int
    ephemeral: EphemeralBlocks
    heal: bool
    keep_reasoning: bool
    extra_body: Mapping[str, Any]


OPTION_NAMES = frozenset(RequestOptions.__optional_keys__) - KNOWN_PARAMS - {EXTRA_BODY}
"""The names of the options that are not members of the request body."""


def _join_ephemeral(blocks: EphemeralBlocks) -> str:
    value: Any = blocks
    entries: list[Any] = [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        entries = [*value]
    texts: list[str] = []
    for entry in entries:
        match entry:
            case str():
                texts.append(entry)
            case SystemBlock():
                texts.append(entry.text)
            case _:
                remedy = "pass text or system blocks; append other blocks to the Turn"
                raise UnsupportedParameter("ephemeral", remedy)
    return "\n\n".join(texts)


def _define_tools(tools: OfferedTools) -> tuple[Mapping[str, Any], ...]:
    functions, definitions = split_tools(tools)
    if not functions:
        return definitions
    from kedge.tools.toolbox import Toolbox  # which takes time to import

    toolbox = Toolbox(*functions)
    return (*definitions, *toolbox.frozen_definitions())


def _list_candidates(candidates: Iterable[AnchorRecord]) -> tuple[AnchorRecord, ...]:
    return tuple(list_arguments("candidates", AnchorRecord, candidates))


def _check_tap(tap: Any) -> Any:
    if tap is not None:
        check_callback("tap", tap)
    return tap


def _check_value(name: str, value: Any) -> Any:
    """Return the value of an option, or raise ``InvalidSetting`` if it has another type than in ``RequestOptions``."""
    check_members({name: value}, RequestOptions)
    return value


OPTION_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "mode": validate_mode,
    "resend_limit": to_resend_limit,
    "output_retries": partial(check_count, "output_retries"),
    "tools": _define_tools,
    "candidates": _list_candidates,
    "tap": _check_tap,
    "before_send": partial(_check_value, "before_send"),
    "heal": partial(_check_value, "heal"),
    "keep_reasoning": partial(_check_value, "keep_reasoning"),
    "model": partial(_check_value, "model"),
    "streaming": partial(_check_value, "streaming"),
    "ephemeral": _join_ephemeral,
}
"""Checks and converts the options that a caller may write in several forms."""


_LISTED_OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "tools": list_tools,
    "candidates": _list_candidates,
    "ephemeral": _join_ephemeral,
}


def list_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that can be read several times: an iterator would be empty the second time."""
    return {
        name: _LISTED_OPTIONS[name](value) if name in _LISTED_OPTIONS else value
        for name, value in options.items()
    }
