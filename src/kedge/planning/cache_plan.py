"""Predict which part of a request its provider reads from its prompt cache.

Chaining saves no billed tokens; prompt caching does. A provider caches the prompts that it has read, so the next
request of a conversation finds everything that the last one sent, as long as nothing in it changed and not too
much time passed. The records of a Turn have the provider's token counts for each earlier prompt, and their digests
show which of these prompts are still prefixes of the Turn. A prediction needs nothing else: no text is counted
here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from kedge.planning.anchors import (
    AnchorRecord,
    ConversationState,
    get_state,
    matches_prefix,
)
from kedge.planning.digests import PrefixIndex, get_prefix_index
from kedge.planning.plan import RequestPlan
from kedge.turns import Turn
from kedge.turns.frozen_json import FrozenMap, compute_once, thaw, wrap_copy

CacheHint = Literal["clock", "instructions", "tool_order", "tools", "model"]
"""A change between two requests that prevents prompt caching."""
CACHE_HINTS: dict[CacheHint, str] = {
    "clock": (
        "the instructions contain a time, date or number that changes between requests; put it into "
        "the newest message instead"
    ),
    "instructions": "the instructions changed since the last request of this conversation",
    "tool_order": "the tools are the same in another order; offer them in a fixed order",
    "tools": "the tools changed since the last request of this conversation",
    "model": "the model changed since the last request; every model has a cache of its own",
}
"""The descriptions of the detected causes that prevent prompt caching."""

CacheMiss = Literal["", "first", "short", "expired", "settings", "edited"]

BYTES_PER_TOKEN = 4
"""The estimate for text that no server has counted yet."""
KEY_BYTES = 12

_NUMBER_TAIL = re.compile(r"[0-9:/.,+TZ -]*$")
_DATED = re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{6,}")


class CacheRules(msgspec.Struct, frozen=True):
    """The rules by which a provider reads a prompt from its cache.

    Attributes:
        minimum: The minimum number of tokens of a cached prefix.
        step: The granularity of cached tokens.
        lifetime: Seconds for which a prompt stays cached after its last use.
        explicit: Whether only complete prompts are cached, at breakpoints, and not every prefix.
        keyed: Whether requests have a ``prompt_cache_key``; some providers cache without one, and reject it.
    """

    minimum: int = 1024
    step: int = 128
    lifetime: float = 600.0
    explicit: bool = False
    keyed: bool = True

    def count_cached(self, tokens: int) -> int:
        """Return the number of tokens of a prompt that are cached."""
        if tokens < self.minimum:
            return 0
        return tokens - tokens % self.step


class CachePlan(msgspec.Struct, frozen=True):
    """The prediction for the provider's prompt cache for one request.

    Attributes:
        key: A key that is equal for all requests of a conversation and contains nothing of it: a hash of
            the first block. Forks and rebuilt Turns have the same one.
        cached_tokens: The tokens that are expected to be read from the cache.
        input_tokens: The estimated size of the complete prompt.
        lost_tokens: Tokens that were cached before and are billed in full, because the history was
            edited, or the instructions, tools or model changed.
        intact_blocks: The number of blocks that are unchanged since they were cached.
        reason: Why no more is expected; empty if everything cached can be used.
        hints: The causes that prevent caching, compared with the previous request; ``CACHE_HINTS``
            describes them.
        settings: The fingerprint of model, instructions and tools.
    """

    key: str
    cached_tokens: int = 0
    input_tokens: int = 0
    lost_tokens: int = 0
    intact_blocks: int = 0
    reason: CacheMiss = ""
    hints: tuple[CacheHint, ...] = ()
    settings: int = 0

    @property
    def share(self) -> float:
        """The share of the input that is expected to be read from the cache."""
        if not self.input_tokens:
            return 0.0
        return min(self.cached_tokens / self.input_tokens, 1.0)


def plan_cache(
    turn: Turn,
    plan: RequestPlan,
    *,
    rules: CacheRules,
    settings: int,
) -> CachePlan:
    """Predict the use of a prompt cache. Pure; never raises.

    Args:
        turn: The Turn.
        plan: The plan of the request.
        rules: The rules of the provider.
        settings: The fingerprint of model, instructions and tools, as in ``TokenCounts``.

    Returns:
        The prediction.
    """
    index = get_prefix_index(turn)
    base, newest = _find_prompts(index, get_state(turn), plan)
    prediction = CachePlan(
        key=_build_key(index, plan.scope),
        input_tokens=_estimate_input(index, plan, base),
        settings=settings,
    )
    if base is not None:
        prediction = replace(prediction, intact_blocks=base.block_count)
    if newest is None or newest.counted is None:
        return replace(prediction, reason="first")
    before = rules.count_cached(newest.counted.input)
    if not before:
        return replace(prediction, reason="short")
    if plan.planned_at - newest.created_at >= rules.lifetime:
        return replace(prediction, reason="expired")
    if newest.counted.settings != settings:
        return replace(prediction, reason="settings", lost_tokens=before)
    is_newest = base is newest
    cached = _count_cached(base, rules, is_newest=is_newest)
    lost = min(before, prediction.input_tokens) - cached
    if is_newest or lost < rules.step:
        return replace(prediction, cached_tokens=cached)
    return replace(prediction, cached_tokens=cached, lost_tokens=lost, reason="edited")


def _build_key(index: PrefixIndex, scope: str) -> str:
    """Return the key of a conversation, which is derived from the digest of its first block."""
    first_digest = ""
    if index.covered:
        first_digest = index.digest(1)
    form = f"kedge.cache/1\0{scope}\0{first_digest}".encode()
    return f"kedge-{blake2b(form, digest_size=KEY_BYTES).hexdigest()}"


def _count_cached(base: AnchorRecord | None, rules: CacheRules, *, is_newest: bool) -> int:
    if base is None or base.counted is None:
        return 0
    tokens = base.counted.input
    if not is_newest and not rules.explicit:
        # The output of an earlier response was part of the prompts after it.
        tokens += base.counted.output
    return rules.count_cached(tokens)


def _find_prompts(
    index: PrefixIndex, state: ConversationState, plan: RequestPlan
) -> tuple[AnchorRecord | None, AnchorRecord | None]:
    """Return the records of the longest earlier prompt that is a prefix, and of the newest one."""
    base: AnchorRecord | None = None
    newest: AnchorRecord | None = None
    for record in reversed(state.anchors):
        if record.scope != plan.scope or record.counted is None:
            continue
        if newest is None or record.created_at > newest.created_at:
            newest = record
        is_prefix = record.barrier == plan.barrier and matches_prefix(record, index)
        if is_prefix and base is None:
            base = record
            if base is newest:
                break  # the usual case: nothing was edited
    return base, newest


def _estimate_input(index: PrefixIndex, plan: RequestPlan, base: AnchorRecord | None) -> int:
    if base is None or base.counted is None:
        instructions = (plan.instructions or "").encode("utf-8", "surrogatepass")
        return (plan.full_bytes + len(instructions)) // BYTES_PER_TOKEN
    rest = index.byte_size(base.block_count, plan.block_count)
    return base.counted.input + base.counted.output + rest // BYTES_PER_TOKEN


class PromptHead(msgspec.Struct, frozen=True):
    """The part of a prompt before the history; a change in it prevents caching."""

    model: str
    instructions: str
    tools: tuple[Mapping[str, Any], ...]

    def compare(self, before: "PromptHead") -> Iterator[CacheHint]:
        """Yield the changes since the previous request."""
        if self.model != before.model:
            yield "model"
        if [*map(id, self.tools)] != [*map(id, before.tools)]:
            yield from _compare_tools(before.tools, self.tools)
        if self.instructions != before.instructions:
            is_clock = _changes_like_a_clock(before.instructions, self.instructions)
            yield "clock" if is_clock else "instructions"


def _compare_tools(
    before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]
) -> Iterator[CacheHint]:
    before_texts = list(map(format_tool, before))
    texts = list(map(format_tool, now))
    if texts == before_texts:
        return
    yield "tool_order" if sorted(texts) == sorted(before_texts) else "tools"


def format_tool(definition: Mapping[str, Any]) -> str:
    """Return the JSON text of a definition in the order of its members, which matters to prompt caches."""
    return compute_once(_format, wrap_copy(definition))


def _format(definition: FrozenMap) -> str:
    return json.dumps(thaw(definition), ensure_ascii=False, default=str)


def _changes_like_a_clock(before: str, now: str) -> bool:
    """Return whether two texts differ only in a time, a date or a number."""
    start = _shared_length(before, now)
    end = _shared_length(before[start:][::-1], now[start:][::-1])
    for text in (before, now):
        stop = len(text) - end
        lead = _number_tail(text[:start])
        tail = _number_tail(text[stop:][:40][::-1])[::-1]
        middle = text[start:stop]
        if not re.search(r"\d", middle) or not _DATED.search(lead + middle + tail):
            return False
    return True


def _number_tail(text: str) -> str:
    match = _NUMBER_TAIL.search(text[-40:])
    return match.group() if match else ""


def _shared_length(one: str, other: str) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)
