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
from typing import Any, Literal, NamedTuple, cast

from kedge.events import Outcome, Usage
from kedge.planning import AnchorRecord, RequestPlan, TokenCounts
from kedge.turns import (
    AssistantBlock,
    Block,
    ReasoningBlock,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UserBlock,
)

encode_settings = json.JSONEncoder(default=str, sort_keys=True).encode
"""Return values as JSON text for a comparison; values that are not JSON are written as text."""

Verdict = Literal["remembered", "partial", "lost", ""]
"""Whether the server read all, some or none of the anchor's context, or this is unknown."""

BLOCK_TOLERANCE = 2
"""The maximum number of tokens by which the frame around one block may be smaller than our count."""
MAX_FRAME_TOKENS = 24
"""The maximum number of tokens of the frame around one block."""
UNKNOWN_SHARE = 0.75
"""The minimum ratio of any other tokenizer's count of a text to ours."""
_FRAME_TOKENS = 4
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
    estimate: int
    """Our count."""
    blocks: int
    settings: int
    """Identifies the parameters that change a count: model, instructions, tools, format, effort."""


def measure_request(
    plan: RequestPlan, body: Mapping[str, Any], *, share: float = UNKNOWN_SHARE, crude: bool = False
) -> SentTokens | None:
    """Bound the tokens of a request.

    Args:
        plan: The plan the request was built from.
        body: The request body.
        share: The minimum ratio of the server's count to ours.
        crude: Whether the lower bound is computed without a tokenizer, for a server that needs no proof.

    Returns:
        The bounds, or None where a count would be no evidence: hosted tools, pictures, replayed
        reasoning, truncation, compaction.
    """
    sent: Sequence[Block] = plan.delta
    omitted = {block.id for block in plan.left_out}
    if omitted:
        sent = [block for block in sent if block.id not in omitted]
    return measure_blocks(sent, body, share=share, crude=crude)


def measure_blocks(
    sent: Sequence[Block],
    body: Mapping[str, Any],
    *,
    share: float = UNKNOWN_SHARE,
    crude: bool = False,
) -> SentTokens | None:
    """Bound the tokens of these blocks; the other arguments are those of ``measure_request``."""
    texts = None if _changes_count(body) else _collect_texts(sent)
    if texts is None:
        return None
    settings, blocks = hash_settings(body), len(sent)
    if crude:
        size = sum(len("".join(text.split())) for text in texts)
        upper = sum(map(len, texts)) * _MAX_CHAR_BYTES + MAX_FRAME_TOKENS * blocks
        return SentTokens(size // _CRUDE_TOKEN_CHARS, upper, 0, blocks, settings)
    measures = [_measure_text(text) for text in texts]
    return SentTokens(
        lower=_bound_from_below(measures, share),
        upper=sum(each.upper for each in measures) + MAX_FRAME_TOKENS * blocks,
        estimate=sum(each.tokens for each in measures) + _FRAME_TOKENS * blocks,
        blocks=blocks,
        settings=settings,
    )


def count_response(
    outcome: Outcome,
    plan: RequestPlan,
    sent: SentTokens | None,
    base: TokenCounts | None,
    *,
    share: float = UNKNOWN_SHARE,
    crude: bool = False,
) -> TokenCounts | None:
    """Return the tokens that the server counted for a response, as the base for the next request.

    ``base`` are the counts of the anchor that the request was chained on. The result is None where the
    count cannot be compared with a later one.
    """
    usage = outcome.usage
    if usage is None or sent is None or usage.input_tokens <= 0:
        return None
    if plan.is_full and usage.input_tokens + usage.cached_tokens < sent.lower:
        return None  # such as a constant
    visible = [block for block in outcome.blocks if not isinstance(block, ReasoningBlock)]
    texts = _collect_texts(visible)
    if texts is None:
        return None
    hidden = len(visible) < len(outcome.blocks) and not usage.reasoning_tokens
    reported = max(usage.output_tokens - usage.reasoning_tokens, 0)
    # Where reasoning is not reported, it hides in the output; the text's own size bounds the rest.
    if crude:
        bound = sum(map(len, texts))
    else:
        bound = _bound_from_below(list(map(_measure_text, texts)), share if hidden else 1.0)
    carried = 0
    if base is not None and not any(isinstance(block, UserBlock) for block in plan.delta):
        carried = base.reasoning + base.own_reasoning
    return TokenCounts(
        input=usage.input_tokens,
        cached=usage.cached_tokens,
        output=min(reported, bound),
        reasoning=carried,
        own_reasoning=usage.reasoning_tokens,
        settings=sent.settings,
    )


def judge_usage(
    usage: Usage | None, base: TokenCounts | None, sent: SentTokens | None, overhead: int | None
) -> Verdict:
    """Judge whether the server read the context of the anchor that a request was chained on.

    Args:
        usage: The token usage reported with the response, if any.
        base: The server's count for the anchor, if it is known.
        sent: The bounds of the tokens that the request sent, if they are known.
        overhead: The upper bound of what the server counts beside the items, for these settings.
    """
    if usage is None or usage.input_tokens <= 0 or sent is None:
        return ""
    remembers = overhead is not None and usage.input_tokens > overhead + sent.upper
    missing = False
    if base is not None and base.settings == sent.settings:
        missing = _count_with_cached(usage, base) < expected_tokens(base, sent)
    if missing:
        return "partial" if remembers else "lost"
    return "remembered" if remembers else ""


def expected_tokens(base: TokenCounts, sent: SentTokens) -> int:
    """Return the minimum that a server with the context of ``base`` counts for a request."""
    return base.input - base.reasoning + base.output + sent.lower


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
    alone = sent.estimate + BLOCK_TOLERANCE * (sent.blocks + 1) if exact else sent.upper
    return overhead + alone < expected_tokens(base, sent)


def agrees_with_estimate(usage: Usage, base: TokenCounts, sent: SentTokens) -> bool:
    """Return whether the server's count grew by our count, within the tolerance."""
    growth = usage.input_tokens - base.input - base.output
    return abs(growth - sent.estimate) <= BLOCK_TOLERANCE * (sent.blocks + 1)


def _count_with_cached(usage: Usage, base: TokenCounts) -> int:
    """Return the maximum that the server can have counted, with or without cached tokens in its input.

    Some servers count cached tokens separately. More cached than input tokens prove that. Otherwise
    adding their growth is correct for such a server, and only weakens the test for the others.
    """
    if usage.cached_tokens > usage.input_tokens:
        return usage.input_tokens + usage.cached_tokens
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


def _collect_texts(blocks: Iterable[Block]) -> list[str] | None:
    """Return the texts that a model reads of these blocks; None if some of the content is not text."""
    texts: list[str] = []
    for block in blocks:
        match block:
            case UserBlock() | AssistantBlock() | ToolResultBlock():
                if not _TEXT_ONLY.issuperset(map(type, block.parts)):
                    return None
                texts.append(block.text)
            case SystemBlock():
                texts.append(block.text)
            case ToolCallBlock():
                texts.append(f"{block.name} {block.arguments}")
            case _:  # reasoning, hosted calls, compactions
                return None
    return texts


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


def _bound_from_below(measures: list[_TextMeasure], share: float) -> int:
    tokens = sum(each.words for each in measures)
    return int(tokens * share) + (_FRAME_TOKENS - BLOCK_TOLERANCE) * len(measures)


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
