"""Token accounting: evidence about a server's memory from its count of input tokens.

A request that is chained on an anchor sends only the delta, but a correct server counts the full
context. This gives two different bounds. A count above the *upper* bound for the request alone proves that
the server has read more than the request contains: it remembers. A count below the sum of its count for the
anchor, the anchor's output and the *lower* bound of the delta proves that something is missing. Counts
between the two prove nothing: "hi" followed by 2 kB is 533 tokens with memory and 519 without.

The tokenizer of a server is not known. A token has at least one byte, so the number of bytes is an upper
bound. The lower bound is a share of our count, without whitespace, which chat templates strip. Once a
server's counts agree with ours, the share becomes one, and the loss of a single short message is detected.
Tolerances are per block and not a share of the context, because the count of a server with a limited
context may be only a few tokens too low.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple, cast

from kedge.events import Outcome, Usage
from kedge.planning import AnchorRecord, RequestPlan, TokenCounts
from kedge.turns import (
    AssistantBlock,
    Block,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UserBlock,
)

encode_settings = json.JSONEncoder(default=str, sort_keys=True).encode
"""Return values as JSON text for a comparison; values that are not JSON are written as text."""

Verdict = Literal["remembered", "partial", "lost", "foreign", ""]
"""Whether the server read all, some or none of the anchor's context, or more than that, or this is unknown."""

BLOCK_TOLERANCE = 2
"""The maximum number of tokens by which the frame around one block may be smaller than our count."""
MAX_FRAME_TOKENS = 24
"""The maximum number of tokens of the frame around one block."""
UNKNOWN_SHARE = 0.75
"""The minimum ratio of any other tokenizer's count of a text to ours."""
ORDINARY_EXCESS = 2.0
"""The maximum ratio of another tokenizer's count to ours that is assumed of a server that lists what it stored."""
UNBOUNDED = 1 << 62
"""The upper bound of a request with content that cannot be measured."""
_FRAME_TOKENS = 4
_END_OF_THINKING = "</think>"
_CRUDE_TOKEN_CHARS = 12
_TEXT_ONLY = frozenset({TextPart})
_MAX_CHAR_BYTES = 4
_MAX_CACHED_CHARS = 1_024
_MAX_CACHED_TEXTS = 4_096
"""The number of short texts whose counts are cached: at most 4 MB of ASCII."""

_UNCOUNTED_MEMBERS = frozenset(
    {
        "background",
        "conversation",
        "frequency_penalty",
        "include",
        "input",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "presence_penalty",
        "previous_response_id",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "top_logprobs",
        "top_p",
        "user",
    }
)
"""Body members that do not change the number of tokens of the others."""
_COUNT_CHANGING_PARAMS = ("truncation", "context_management", "prompt")
"""Parameters that make a server count other tokens than those of the request."""
_CLIENT_TOOL_TYPES = frozenset({"function", "custom"})
"""Tools that the server does not run; other tools add rounds and results to the usage."""


class SentTokens(NamedTuple):
    """Bounds of the tokens that one request sends besides its instructions and tools."""

    lower: int
    upper: int
    """``UNBOUNDED`` if some of the content cannot be measured: images, files, reasoning."""
    estimate: int
    """Our count; 0 if it is not known."""
    blocks: int
    settings: int
    """Identifies the parameters that change a count: model, instructions, tools, format, effort."""
    has_reasoning: bool = False
    """Whether it has content that the server may count now and drop at a later user message."""
    share: float = 1.0
    """The minimum ratio of the server's count to ours."""


def list_sent(plan: RequestPlan) -> Sequence[Block]:
    """Return the blocks that a plan sends."""
    omitted = {block.id for block in plan.left_out}
    return [each for each in plan.delta if each.id not in omitted] if omitted else plan.delta


def measure_blocks(
    sent: Sequence[Block],
    body: Mapping[str, Any],
    *,
    share: float = UNKNOWN_SHARE,
    excess: float = inf,
    crude: bool = False,
) -> SentTokens | None:
    """Bound the tokens of a request.

    Args:
        sent: The blocks that it sends.
        body: The request body.
        share: The minimum ratio of the server's count to ours.
        excess: The maximum ratio of the server's count to ours; the number of bytes is a bound as well.
        crude: Whether the bounds are computed without a tokenizer, for a server that needs no proof.

    Returns:
        The bounds, or None where a count would be no evidence: hosted tools, truncation, compaction.
    """
    if _changes_count(body):
        return None
    content = _read_content(sent)
    bounds = _bound_texts(content.texts, share, excess, crude=crude)
    return SentTokens(
        lower=bounds.lower,
        upper=UNBOUNDED if content.is_unbounded else bounds.upper,
        estimate=bounds.estimate,
        blocks=len(sent),
        settings=hash_settings(body),
        has_reasoning=content.has_reasoning,
        share=share,
    )


def count_response(
    outcome: Outcome,
    plan: RequestPlan,
    sent: SentTokens | None,
    base: TokenCounts | None,
    *,
    visible: int = 0,
    crude: bool = False,
) -> TokenCounts | None:
    """Return the tokens that the server counted for a response, as the base for the next request.

    What the response adds to the context is bounded by our count of its visible text. The number of output
    tokens that a server reports is no bound: it includes tokens that are not in the next prompt.

    Args:
        outcome: The response.
        plan: The plan of the request.
        sent: The bounds of the tokens that the request sent.
        base: The counts of the anchor that the request was chained on.
        visible: A minimum count of what the request sent without reasoning, if one is known.
        crude: As for ``measure_blocks``.

    Returns:
        The counts, or None where they cannot be compared with later ones.
    """
    usage = outcome.usage
    if usage is None or sent is None or usage.input_tokens <= 0:
        return None
    content = _read_content(outcome.blocks)
    output = _bound_texts(content.texts, 1.0, crude=crude).lower
    is_constant = plan.is_full and usage.input_tokens + usage.cached_tokens < sent.lower
    if is_constant or 0 < usage.output_tokens < int(output * sent.share):
        return None  # fewer tokens than the text has
    reasoning = 0
    if _may_contain_reasoning(plan, sent, base):
        # Servers report another number of reasoning tokens than they count for replayed reasoning.
        bound = max(visible, _bound_visible(plan, sent, base))
        reasoning = max(usage.input_tokens - bound, 0)
    return TokenCounts(
        input=usage.input_tokens,
        cached=usage.cached_tokens,
        output=output,
        reasoning=reasoning,
        own_reasoning=usage.reasoning_tokens or int(content.has_reasoning),
        settings=sent.settings,
    )


def _may_contain_reasoning(plan: RequestPlan, sent: SentTokens, base: TokenCounts | None) -> bool:
    """Return whether the count of a request may contain reasoning that a later one does not contain."""
    if sent.has_reasoning:
        return True
    if plan.is_full or any(isinstance(block, UserBlock) for block in plan.delta):
        return False  # a server that drops reasoning does so at a user message
    return base is None or bool(base.reasoning or base.own_reasoning)


def _bound_visible(plan: RequestPlan, sent: SentTokens, base: TokenCounts | None) -> int:
    """Return the minimum count of the visible text of a request and of the context it continues."""
    if plan.is_full:
        return sent.lower
    if base is None or base.settings != sent.settings:
        return 0
    return expected_tokens(base, sent)


def judge_usage(
    usage: Usage | None,
    base: TokenCounts | None,
    sent: SentTokens | None,
    overhead: int | None,
    *,
    known: bool = False,
) -> Verdict:
    """Judge whether the server read the context of the anchor that a request was chained on.

    Args:
        usage: The token usage reported with the response, if any.
        base: The server's count for the anchor, if it is known.
        sent: The bounds of the tokens that the request sent, if they are known.
        overhead: The upper bound of what the server counts beside the items, for these settings.
        known: Whether the server is known, and therefore counts cached tokens as input tokens.
    """
    if usage is None or usage.input_tokens <= 0 or sent is None:
        return ""
    remembers = overhead is not None and usage.input_tokens > overhead + sent.upper
    missing = False
    if base is not None and base.settings == sent.settings:
        missing = _count_with_cached(usage, base, known) < expected_tokens(base, sent)
    if missing:
        return "partial" if remembers else "lost"
    return "remembered" if remembers else ""


def expected_tokens(base: TokenCounts, sent: SentTokens) -> int:
    """Return the minimum that a server with the context of ``base`` counts for a request."""
    return base.input - base.reasoning + int(base.output * sent.share) + sent.lower


def has_foreign_tokens(
    usage: Usage | None,
    base: TokenCounts | None,
    output: SentTokens | None,
    sent: SentTokens | None,
    *,
    exact: bool,
) -> bool:
    """Return whether the server counted more than the context of a conversation object and the request.

    Args:
        usage: The token usage reported with the response, if any.
        base: The server's count for the last response in the object, if it is known.
        output: The bounds of the tokens of that response, if they are known.
        sent: The bounds of the tokens that the request sent, if they are known.
        exact: Whether the server's counts are known to agree with ours.
    """
    if usage is None or base is None or output is None or sent is None:
        return False
    added = (output, sent)
    if base.settings != sent.settings or base.own_reasoning:
        return False
    limit = sum(each.upper for each in added)
    if exact and limit < UNBOUNDED:
        blocks = sum(each.blocks for each in added)
        limit = sum(each.estimate for each in added) + BLOCK_TOLERANCE * (blocks + 1)
    return usage.input_tokens > base.input + base.cached + limit


def can_prove(anchor: AnchorRecord, sent: SentTokens | None, overhead: int | None) -> bool:
    """Return whether the count of a correct server would prove that it remembers the anchor."""
    base = anchor.counted
    if base is None or sent is None or overhead is None or base.settings != sent.settings:
        return False
    return expected_tokens(base, sent) > overhead + sent.upper


def can_disprove(
    anchor: AnchorRecord, sent: SentTokens | None, overhead: int | None, *, exact: bool
) -> bool:
    """Return whether the count of a server without the anchor's context would show the loss.

    The loss of a short context before a long delta cannot be detected: the delta's tolerance is larger.

    Args:
        anchor: The anchor, with the server's count for it.
        sent: The bounds of the tokens that the request sends.
        overhead: The upper bound of what the server counts beside the items, for these settings.
        exact: Whether the server's counts are known to agree with ours.
    """
    base = anchor.counted
    if base is None or sent is None or overhead is None or base.settings != sent.settings:
        return False
    is_exact = exact and sent.upper < UNBOUNDED
    alone = sent.estimate + BLOCK_TOLERANCE * (sent.blocks + 1) if is_exact else sent.upper
    return overhead + alone < expected_tokens(base, sent)


def agrees_with_estimate(usage: Usage, base: TokenCounts, sent: SentTokens) -> bool | None:
    """Return whether the server's count grew by our count, within the tolerance; None if that is unknown."""
    if sent.upper >= UNBOUNDED or base.reasoning or base.own_reasoning:
        return None
    if not sent.estimate or base.settings != sent.settings:
        return None
    growth = usage.input_tokens - base.input - base.output
    return abs(growth - sent.estimate) <= BLOCK_TOLERANCE * (sent.blocks + 1)


def _count_with_cached(usage: Usage, base: TokenCounts, known: bool) -> int:
    """Return the maximum that the server can have counted, with or without cached tokens in its input.

    Some servers count cached tokens separately. More cached than input tokens prove that. Otherwise
    adding their growth is correct for such a server, and only weakens the test for the others.
    """
    if usage.cached_tokens > usage.input_tokens:
        return usage.input_tokens + usage.cached_tokens
    if known:
        return usage.input_tokens
    return usage.input_tokens + max(usage.cached_tokens - base.cached, 0)


def _changes_count(body: Mapping[str, Any]) -> bool:
    for name in _COUNT_CHANGING_PARAMS:
        if body.get(name) not in (None, "disabled", [], {}):
            return True
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping) and "context" in reasoning:
        return True
    tools = cast("list[Mapping[str, Any]]", body.get("tools") or [])
    return any(tool.get("type") not in _CLIENT_TOOL_TYPES for tool in tools)


class _Content(NamedTuple):
    """The texts that a model reads of some blocks, and whether they contain anything else."""

    texts: list[str]
    is_unbounded: bool
    has_reasoning: bool


def _read_content(blocks: Iterable[Block]) -> _Content:
    texts: list[str] = []
    is_unbounded = has_reasoning = False
    for block in blocks:
        match block:
            case AssistantBlock():
                # Chat templates drop what a model wrote before this tag, at the next user message at the latest.
                text = block.text.rpartition(_END_OF_THINKING)[2]
                has_reasoning = has_reasoning or len(text) < len(block.text)
                texts.append(text)
            case SystemBlock():
                texts.append(block.text)
            case UserBlock() | ToolResultBlock():
                texts.append(block.text)
                is_unbounded = is_unbounded or not _TEXT_ONLY.issuperset(map(type, block.parts))
            case ToolCallBlock():
                texts.append(f"{block.name} {block.arguments}")
            case _:  # reasoning, hosted calls, compactions
                has_reasoning = True
    return _Content(texts, is_unbounded or has_reasoning, has_reasoning)


class _Bounds(NamedTuple):
    """Bounds of a server's count of some texts, and our count; 0 without a tokenizer."""

    lower: int
    upper: int
    estimate: int


def _bound_texts(texts: list[str], share: float, excess: float = inf, *, crude: bool) -> _Bounds:
    frames = MAX_FRAME_TOKENS * len(texts)
    if crude:
        size = sum(len("".join(text.split())) for text in texts)
        upper = sum(map(len, texts)) * _MAX_CHAR_BYTES
        return _Bounds(size // _CRUDE_TOKEN_CHARS, upper + frames, 0)
    measures = [_measure_text(text) for text in texts]
    words = sum(each.words for each in measures)
    return _Bounds(
        lower=int(words * share) + (_FRAME_TOKENS - BLOCK_TOLERANCE) * len(measures),
        upper=sum(int(min(each.upper, each.tokens * excess)) for each in measures) + frames,
        estimate=sum(each.tokens for each in measures) + _FRAME_TOKENS * len(measures),
    )


class _TextMeasure(NamedTuple):
    """Our counts of a text, with normalized and with original whitespace, and its upper bound."""

    words: int
    tokens: int
    upper: int


def _measure_text(text: str) -> _TextMeasure:
    # The texts of a conversation are measured again with every request that sends it in full.
    return _measure_short(text) if len(text) <= _MAX_CACHED_CHARS else _measure_uncached(text)


def _measure_uncached(text: str) -> _TextMeasure:
    from kedge.tokens import count_text  # loads a vocabulary, which proven servers do not need

    return _TextMeasure(
        # Whitespace is counted in many ways, or stripped by the chat template.
        count_text(" ".join(text.split())),
        count_text(text),
        # Templates write results and arguments as JSON, which escapes non-ASCII characters.
        max(len(text.encode("utf-8", "surrogatepass")), len(json.dumps(text)) - 2),
    )


_measure_short = lru_cache(maxsize=_MAX_CACHED_TEXTS)(_measure_uncached)


def hash_settings(body: Mapping[str, Any]) -> int:
    """Return a fingerprint of the members of a body that change how many tokens a server counts."""
    members = [
        f"{encode_settings(name)}: {_encode_setting(body[name])}"
        for name in sorted(body)
        if name not in _UNCOUNTED_MEMBERS
    ]
    form = f"{{{', '.join(members)}}}".encode()
    return int.from_bytes(hashlib.blake2b(form, digest_size=6).digest())


def _encode_setting(value: Any) -> str:
    if type(value) is list:
        return f"[{', '.join(map(_encode_setting, cast('list[Any]', value)))}]"
    text: str | None = getattr(
        value, "settings_text", None
    )  # a definition of a tool stores its own
    return encode_settings(value) if text is None else text
