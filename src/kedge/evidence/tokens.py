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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple, cast

import msgspec

from kedge.events import Outcome, Usage
from kedge.planning import RequestPlan, TokenCounts
from kedge.turns import Block, TextPart, UserBlock
from kedge.turns.frozen_json import to_encodable
from kedge.usage.tokens import MAX_CACHED_SHORT, MAX_SHORT_TEXT, count_text

_encode_sorted = msgspec.json.Encoder(order="sorted", enc_hook=to_encodable).encode

Verdict = Literal["remembered", "partial", "lost", ""]
"""Whether the server read all, some or none of the anchor's context, or this is unknown."""

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
_ORDINARY_TOKEN_BYTES = 3
_TEXT_ONLY = frozenset({TextPart})
_MAX_CHAR_BYTES = 4

_UNCOUNTED_NAMES = """
    background conversation frequency_penalty include input max_output_tokens max_tool_calls metadata
    parallel_tool_calls presence_penalty previous_response_id prompt_cache_key prompt_cache_retention
    safety_identifier service_tier store stream stream_options temperature top_logprobs top_p user
"""
_UNCOUNTED_MEMBERS = frozenset(_UNCOUNTED_NAMES.split())
"""Body members that do not change the number of tokens of the others."""
_COUNT_CHANGING_PARAMS = ("truncation", "context_management", "prompt")
"""Parameters that make a server count other tokens than the request has."""
_CLIENT_TOOL_TYPES = frozenset({"function", "custom"})
"""Tools that the server does not run; other tools add rounds and results to the usage."""


class SentTokens(NamedTuple):
    """The tokens of the blocks that a request sends, besides its instructions and tools, with bounds."""

    words: int
    """Our minimum count with the original or less whitespace, which is stripped by some chat templates."""
    tokens: int
    """Our count with the original whitespace; 0 if it is not known."""
    size: int
    """The maximum of any count of the texts; ``UNBOUNDED`` with content that has none: images, files, reasoning."""
    texts: int
    settings: int
    """Identifies the parameters that change a count: model, instructions, tools, format, effort."""
    has_reasoning: bool = False
    """Whether there is content that the server may count now and drop at a later user message."""
    share: float = 1.0
    """The minimum ratio of the server's count to ours."""
    excess: float = inf
    """The maximum ratio of the server's count to ours; ``size`` is a bound as well."""
    overhead: int | None = None
    """The maximum that the server counts beside the blocks, for these settings; None if it is not known."""
    is_exact: bool = False
    """Whether the server's counts are known to agree with ours."""
    adds_cached: bool = True
    """Whether the server may count cached tokens apart from the other input tokens; known servers do not."""

    @property
    def lower(self) -> int:
        """The minimum that the server counts."""
        return int(self.words * self.share) + (_FRAME_TOKENS - BLOCK_TOLERANCE) * self.texts

    @property
    def upper(self) -> int:
        """The maximum that the server counts."""
        size = self.size
        if self.tokens and self.size < UNBOUNDED:
            size = int(min(self.size, self.tokens * self.excess))
        return size + MAX_FRAME_TOKENS * self.texts

    @property
    def estimate(self) -> int:
        """Our count; 0 if it is not known."""
        if not self.tokens:
            return 0
        return self.tokens + _FRAME_TOKENS * self.texts

    @property
    def tolerance(self) -> int:
        """The maximum difference between our count and the count of a server that counts as we do."""
        return BLOCK_TOLERANCE * (self.texts + 1)

    @property
    def limit(self) -> int:
        """The maximum that the server counts, which is lower if its counts agree with ours."""
        if self.is_exact and self.tokens and self.size < UNBOUNDED:
            return self.estimate + self.tolerance
        return self.upper


def measure_request(
    sent: Sequence[Block], body: Mapping[str, Any], *, crude: bool = False
) -> SentTokens | None:
    """Count the tokens of the blocks that a request sends.

    Args:
        sent: The blocks.
        body: The request body.
        crude: Whether they are counted without a tokenizer, for a server that needs no proof.

    Returns:
        The counts, or None where they would be no evidence: hosted tools, truncation, compaction.
    """
    settings = identify_settings(body)
    if settings is None:
        return None
    return measure_blocks(sent, settings, crude=crude)


def identify_settings(body: Mapping[str, Any]) -> int | None:
    """Return a fingerprint of the settings of a request; None where its token counts would be no evidence."""
    if _changes_count(body):
        return None
    return hash_settings(body)


def measure_blocks(blocks: Iterable[Block], settings: int = 0, *, crude: bool) -> SentTokens:
    """Count the tokens of blocks; see ``measure_request``."""
    return _measure_with(_count_crudely if crude else _count_text, blocks, settings)


def _measure_with(
    count: Callable[[str], tuple[int, int, int]], blocks: Iterable[Block], settings: int = 0
) -> SentTokens:
    """Return the sums of what a function counts for each text of blocks, in the order of ``SentTokens``."""
    texts: list[str] = []
    is_unbounded = has_reasoning = False
    for block in blocks:
        match block.kind:
            case "assistant":
                # Chat templates drop what a model wrote before this tag, at the next user message at the latest.
                texts.append(block.text.rpartition(_END_OF_THINKING)[2])
                has_reasoning |= _END_OF_THINKING in block.text
            case "system":
                texts.append(block.text)
            case "user" | "tool_result":
                texts.append(block.text)
                is_unbounded |= not _TEXT_ONLY.issuperset(map(type, block.parts))
            case "tool_call":
                texts.append(f"{block.name} {block.arguments}")
            case _:  # reasoning, hosted calls, compactions
                has_reasoning = True
    counts = list(map(count, texts))
    size = sum(size for _, _, size in counts)
    if is_unbounded or has_reasoning:
        size = UNBOUNDED
    return SentTokens(
        words=sum(words for words, _, _ in counts),
        tokens=sum(tokens for _, tokens, _ in counts),
        size=size,
        texts=len(texts),
        settings=settings,
        has_reasoning=has_reasoning,
    )


def _count_crudely(text: str) -> tuple[int, int, int]:
    """Return bounds of the counts of a text without a tokenizer, in the order of ``SentTokens``."""
    # Lines of one character have fewer tokens, so a count that is too low for these bounds is judged by exact ones.
    size = len("".join(text.split()))
    return size // _CRUDE_TOKEN_CHARS, 0, len(text) * _MAX_CHAR_BYTES


def _count_by_size(text: str) -> tuple[int, int, int]:
    """Return about as many tokens as an ordinary text of this size has, in the order of ``SentTokens``."""
    size = len("".join(text.split()).encode("utf-8", "surrogatepass"))
    return size // _ORDINARY_TOKEN_BYTES, 0, UNBOUNDED


def _count_text(text: str) -> tuple[int, int, int]:
    # The texts of a conversation are counted again with every request that sends it in full.
    if len(text) <= MAX_SHORT_TEXT:
        return _count_short(text)
    return _count_uncached(text)


def _count_uncached(text: str) -> tuple[int, int, int]:
    # Templates write results and arguments as JSON, which escapes non-ASCII characters.
    upper = max(len(text.encode("utf-8", "surrogatepass")), len(json.dumps(text)) - 2)
    # A line break may be part of the token before it, so that single spaces are more tokens.
    forms = {text, text.strip(), " ".join(text.split())}
    return min(map(count_text, forms)), count_text(text), upper


_count_short = lru_cache(MAX_CACHED_SHORT)(_count_uncached)


def count_response(
    outcome: Outcome, plan: RequestPlan, sent: SentTokens | None, *, visible: int = 0
) -> TokenCounts | None:
    """Return the tokens that the server counted for a response, with which the next request's count is compared.

    What the response adds to the context is bounded by our count of its visible text. The number of output
    tokens that a server reports is no bound: it includes tokens that are not in the next prompt.

    Args:
        outcome: The response.
        plan: The plan of the request.
        sent: The tokens that the request sent.
        visible: A minimum count of what the request sent without reasoning, if one is known.

    Returns:
        The counts, or None where they cannot be compared with later ones.
    """
    usage = outcome.usage
    if usage is None or sent is None or usage.input_tokens <= 0:
        return None
    answer = measure_blocks(outcome.blocks, crude=not sent.tokens)
    is_constant = plan.is_full and _lacks_text(usage, sent)
    if is_constant or 0 < usage.output_tokens < int(answer.lower * sent.share):
        return None  # fewer tokens than the text has
    reasoning = 0
    if sent.has_reasoning or _continues_reasoning(plan):
        # Servers report another number of reasoning tokens than they count for replayed reasoning.
        reasoning = max(usage.input_tokens - max(visible, bound_visible(plan, sent)), 0)
    return TokenCounts(
        input=usage.input_tokens,
        cached=usage.cached_tokens,
        output=answer.lower,
        reasoning=reasoning,
        own_reasoning=usage.reasoning_tokens or int(answer.has_reasoning),
        settings=sent.settings,
    )


def _continues_reasoning(plan: RequestPlan) -> bool:
    """Return whether the stored context of a request may have reasoning that a later one does not have."""
    if plan.anchor is None or UserBlock in map(type, plan.delta):
        return False  # a server that drops reasoning does so at a user message
    base = plan.anchor.counted
    return base is None or bool(base.reasoning or base.own_reasoning)


def bound_visible(plan: RequestPlan, sent: SentTokens | None) -> int:
    """Return the minimum count of the visible text of a request and of the context that it continues."""
    if sent is None:
        return 0
    if plan.anchor is None:
        return sent.lower
    base = plan.anchor.counted
    if base is None or base.settings != sent.settings:
        return 0
    return expected_tokens(base, sent)


def judge_usage(usage: Usage | None, base: TokenCounts | None, sent: SentTokens | None) -> Verdict:
    """Judge whether the server read the context of the anchor that a request was chained on.

    Args:
        usage: The token usage reported with the response, if any.
        base: The server's count for the anchor, if it is known.
        sent: The tokens that the request sent, if they are known.
    """
    if usage is None or usage.input_tokens <= 0 or sent is None:
        return ""
    has_context = sent.overhead is not None and usage.input_tokens > sent.overhead + sent.upper
    is_short = False
    if base is not None and base.settings == sent.settings:
        counted = _count_with_cached(usage, base, sent.adds_cached)
        is_short = counted < expected_tokens(base, sent)
    match (has_context, is_short):
        case (True, True):
            return "partial"
        case (False, True):
            return "lost"
        case (True, False):
            return "remembered"
        case _:
            return ""


def lacks_context(usage: Usage | None, plan: RequestPlan) -> bool:
    """Return whether the server counted fewer tokens than the texts of the context have with any tokenizer.

    This needs no earlier count, which may have been of other instructions.
    """
    if usage is None or usage.input_tokens <= 0:
        return False
    context = plan.source[len(plan.source) - plan.total_blocks :]
    # Sizes first: usually the server counted as many tokens as such texts have, and sizes cost much less.
    counts = (_measure_with(count, context) for count in (_count_by_size, _count_text))
    return all(_lacks_text(usage, count._replace(share=UNKNOWN_SHARE)) for count in counts)


def _lacks_text(usage: Usage, sent: SentTokens) -> bool:
    """Return whether the server counted fewer tokens than a text has, also if it counts cached tokens apart."""
    cached = usage.cached_tokens + usage.cache_write_tokens
    return usage.input_tokens + cached < sent.lower


def expected_tokens(base: TokenCounts, sent: SentTokens) -> int:
    """Return the minimum that a server with the context of ``base`` counts for a request."""
    return base.input - base.reasoning + int(base.output * sent.share) + sent.lower


def has_foreign_tokens(
    usage: Usage | None, base: TokenCounts | None, added: SentTokens | None
) -> bool:
    """Return whether the server counted more than the context of a conversation object and the request.

    Args:
        usage: The token usage reported with the response, if any.
        base: The server's count for the last response in the object, if it is known.
        added: The tokens of that response and of the request, if they are known.
    """
    if not (usage and base and added) or base.settings != added.settings or base.own_reasoning:
        return False
    return usage.input_tokens > base.input + base.cached + added.limit


def can_prove(base: TokenCounts | None, sent: SentTokens | None) -> bool:
    """Return whether the count of a correct server would prove that it remembers the anchor.

    Args:
        base: The server's count for the anchor, if it is known.
        sent: The tokens that the request sends, if they are known.
    """
    return sent is not None and _find_excess(base, sent) > sent.upper


def can_disprove(base: TokenCounts | None, sent: SentTokens | None) -> bool:
    """Return whether the count of a server without the anchor's context would show the loss.

    The loss of a short context before a long delta cannot be detected: the delta's tolerance is larger. The arguments
    are those of ``can_prove``.
    """
    return sent is not None and _find_excess(base, sent) > sent.limit


def _find_excess(base: TokenCounts | None, sent: SentTokens) -> int:
    """Return by how much a server with the context of ``base`` exceeds its overhead; 0 if that is unknown."""
    if base is None or sent.overhead is None or base.settings != sent.settings:
        return 0
    return expected_tokens(base, sent) - sent.overhead


def _count_with_cached(usage: Usage, base: TokenCounts, adds_cached: bool) -> int:
    """Return the maximum that the server can have counted, with or without cached tokens in its input.

    Some servers count cached tokens separately. More cached than input tokens prove that. Otherwise
    adding their growth is correct for such a server, and only weakens the test for the others.
    """
    if usage.cached_tokens > usage.input_tokens:
        return usage.input_tokens + usage.cached_tokens
    if not adds_cached:
        return usage.input_tokens
    return usage.input_tokens + max(usage.cached_tokens - base.cached, 0)


def _changes_count(body: Mapping[str, Any]) -> bool:
    for name in _COUNT_CHANGING_PARAMS:
        if body.get(name) not in (None, "disabled", [], {}):
            return True
    for tool in cast("list[Mapping[str, Any]]", body.get("tools") or ()):
        if tool.get("type") not in _CLIENT_TOOL_TYPES:
            return True
    reasoning = body.get("reasoning")
    return isinstance(reasoning, Mapping) and "context" in reasoning


def hash_settings(body: Mapping[str, Any]) -> int:
    """Return a fingerprint of the members of a body that change how many tokens a server counts."""
    members = {name: body[name] for name in body if name not in _UNCOUNTED_MEMBERS}
    try:
        form = _encode_sorted(members)
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or a key that is a number
        as_sent = json.loads(json.dumps(members, default=to_encodable))
        form = json.dumps(as_sent, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(form, digest_size=6).digest())
