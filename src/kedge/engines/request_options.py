"""The options of a request: how a Turn is sent, and the parameters of the provider's API."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kedge.planning import AnchorRecord, Mode, RequestPlan
from kedge.turns import SystemBlock, Turn

WireTap = Callable[[bytes, bytes, int | None], None]
"""Called with the body of a request, the body of its reply, and the reply's status, if there was one."""


OfferedTools = Mapping[str, Any] | Iterable[Any]
"""A toolbox, or functions, tools, toolboxes and tool definitions."""

BeforeSend = Callable[[Turn], Awaitable[None]]
"""Awaited with each Turn exactly as it is about to be sent."""


EphemeralBlocks = str | SystemBlock | Iterable[str | SystemBlock]
"""System text that is sent with the requests of one run and is not part of any Turn."""


@dataclass(frozen=True, slots=True)
class ResendLimit:
    """The largest full send after a loss or a change; a longer history is compacted first, or an error.

    Args:
        max_bytes: The maximum size of all blocks.
        max_blocks: The maximum number of blocks.
    """

    max_bytes: int | None = None
    max_blocks: int | None = None

    def is_exceeded(self, plan: RequestPlan) -> bool:
        """Return whether a full send of this plan's Turn is longer."""
        sizes = ((plan.full_bytes, self.max_bytes), (plan.full_blocks, self.max_blocks))
        return any(limit is not None and size > limit for size, limit in sizes)


def to_resend_limit(limit: int | ResendLimit | None) -> ResendLimit:
    """Return a limit that was given as a number of bytes, or None for no limit, as a `ResendLimit`."""
    return limit if isinstance(limit, ResendLimit) else ResendLimit(limit)


class BodyParams(TypedDict, total=False):
    """Body members of the Responses, Chat Completions and Messages APIs that a caller may set."""

    background: bool
    cache_control: Mapping[str, Any]
    context_management: Sequence[Mapping[str, Any]]
    frequency_penalty: float
    include: Sequence[str]
    logit_bias: Mapping[str, float]
    logprobs: bool
    max_completion_tokens: int
    max_output_tokens: int
    max_tokens: int
    max_tool_calls: int
    metadata: Mapping[str, Any]
    moderation: Mapping[str, Any]
    n: int
    output_config: Mapping[str, Any]
    parallel_tool_calls: bool
    presence_penalty: float
    prompt: Mapping[str, Any]
    prompt_cache_key: str
    prompt_cache_retention: str
    reasoning: Mapping[str, Any]
    reasoning_effort: str
    response_format: Mapping[str, Any]
    safety_identifier: str
    seed: int
    service_tier: str
    stop: str | Sequence[str]
    stop_sequences: Sequence[str]
    store: bool
    stream_options: Mapping[str, Any]
    temperature: float
    text: Mapping[str, Any]
    thinking: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    top_k: int
    top_logprobs: int
    top_p: float
    truncation: str
    user: str
    verbosity: str


class RequestOptions(BodyParams, total=False):
    """The keyword arguments of ``run``, ``ask``, ``stream``, ``send`` and ``plan``.

    Attributes:
        model: The model to use instead of the engine's.
        mode: The mode to use instead of the conversation's or the engine's.
        tools: Tools to offer: a toolbox, or an iterable of functions, tools, toolboxes and definitions in the form of
            the Responses API. A run calls functions, tools and toolboxes, with the approver of the stack; calls of
            definitions are left to the caller.
        candidates: Further anchors that may be used, such as those of a store's index.
        streaming: Whether the answer is streamed.
        resend_limit: Raise ``ResendTooLong`` instead of healing by a full send of more bytes, or blocks.
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


KNOWN_PARAMS = frozenset(BodyParams.__optional_keys__)
"""The names of all body members that a caller may set."""
EXTRA_BODY = "extra_body"
"""The option whose mapping is merged into the request body unchanged."""
OPTION_NAMES = frozenset(RequestOptions.__optional_keys__) - KNOWN_PARAMS - {EXTRA_BODY}
"""The names of the options that are not members of the request body."""
