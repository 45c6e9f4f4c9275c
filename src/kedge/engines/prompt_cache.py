"""Prompt caching: the rules of each provider, and breakpoints for those that require them.

Anthropic caches only prefixes that end at a ``cache_control`` breakpoint, at most four. They are placed where later
requests will look: after the tools, after the instructions, at the end of this request, and at the end
of the previous one, which is found even if many blocks were added since. Breakpoints of the caller are
retained and count toward the four.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from kedge.events import Outcome
from kedge.planning import RequestPlan, TokenCounts
from kedge.planning.cache_plan import CachePlan, CacheRules, format_tool
from kedge.turns.frozen_json import thaw
from kedge.usage.tokens import find_min_tokens

CacheLifetime = Literal["5m", "1h"]
LIFETIMES: Mapping[CacheLifetime, float] = {"5m": 300.0, "1h": 3600.0}
MAX_BREAKPOINTS = 4
MIN_BYTES_PER_TOKEN = 3
"""A prefix with fewer bytes than this per token of the minimum is certainly too short."""

_UNMARKABLE_TYPES = ("thinking", "redacted_thinking")

Content = dict[str, Any]


HOST_RULES: Mapping[str, CacheRules] = {
    "deepseek.com": CacheRules(64, step=64, lifetime=3600.0, keyed=False),
    "groq.com": CacheRules(128, step=128, lifetime=7200.0, keyed=False),
    "mistral.ai": CacheRules(32, step=32),
    "x.ai": CacheRules(64, step=64),
}
"""Providers that cache shorter prompts than OpenAI, by the end of their host."""
CHAT_HOST_RULES: Mapping[str, CacheRules] = {
    **HOST_RULES,
    "x.ai": CacheRules(64, step=64, keyed=False),  # this API of xAI has a header instead
}
"""The same for the Chat Completions API."""


def find_host_rules(host: str, rules: Mapping[str, CacheRules] = HOST_RULES) -> CacheRules | None:
    """Return how the provider at a host caches prompts; None if this is not known."""
    names = (name for name in rules if host == name or host.endswith(f".{name}"))
    return next((rules[name] for name in names), None)


def anthropic_rules(model: str, lifetime: CacheLifetime) -> CacheRules:
    """Return the caching rules of a model of Anthropic."""
    minimum = find_min_tokens(model)
    return CacheRules(minimum, step=1, lifetime=LIFETIMES[lifetime], explicit=True)


def count_prompt(outcome: Outcome, cache: CachePlan) -> TokenCounts | None:
    """Return the tokens that a stateless server counted for a prompt, as the base of later predictions."""
    usage = outcome.usage
    if usage is None or usage.input_tokens <= 0:
        return None
    reasoning = usage.reasoning_tokens
    output = max(usage.output_tokens - reasoning, 0)
    prompt = max(usage.context_tokens - output, 0) or usage.input_tokens
    return TokenCounts(prompt, usage.cached_tokens, output, 0, reasoning, cache.settings)


def place_breakpoints(body: Content, plan: RequestPlan, rules: CacheRules) -> None:
    """Mark up to four prefixes of a request to Anthropic's API for caching.

    Args:
        body: The request body, which is changed.
        plan: Its plan.
        rules: The caching rules of the model.
    """
    if body.get("cache_control"):
        return  # the API places the breakpoint itself
    tools: list[Content] = body.get("tools") or []
    tool_size = _measure_tools(tools)
    if tools:
        tools[-1] = thaw(tools[-1])  # to mark it
    system: list[Content] = []
    if body.get("system"):
        system = [{"type": "text", "text": body["system"]}]
    messages: list[Content] = body["messages"]
    lead_size = tool_size + _measure(system)
    prefixes = _list_boundaries(messages, lead_size + plan.full_bytes)
    sections = [(system, lead_size), *prefixes, (tools, tool_size)]
    _mark_sections(sections, [*tools, *system, *_list_blocks(messages)], rules)
    if system and "cache_control" in system[0]:
        body["system"] = system


def mark_chat_messages(body: Content, plan: RequestPlan, rules: CacheRules) -> None:
    """Mark prefixes of a request to a Chat Completions API that has Anthropic's ``cache_control``.

    Args:
        body: The request body, which is changed.
        plan: Its plan.
        rules: The caching rules of the model.
    """
    messages: list[Content] = body["messages"]
    plain = [(message, message["content"]) for message in messages if _is_plain_input(message)]
    for message, text in plain:
        message["content"] = [{"type": "text", "text": text}]
    lead = messages[:1] if plan.instructions is not None else []
    lead_size = _measure_tools(body.get("tools") or []) + _measure(lead)
    prefixes = _list_boundaries(messages[len(lead) :], lead_size + plan.full_bytes)
    sections = [(list(_list_blocks(lead)), lead_size), *prefixes]
    _mark_sections(sections, list(_list_blocks(messages)), rules)
    for message, text in plain:
        if "cache_control" not in message["content"][0]:
            message["content"] = text


def _mark_sections(
    sections: Iterable[tuple[list[Content], int]], blocks: Sequence[Content], rules: CacheRules
) -> None:
    """Mark the end of each section, if the prefix up to it can be cached.

    Args:
        sections: Blocks, with the bytes of the prefix up to the end of them.
        blocks: All blocks of the request, in order.
        rules: The caching rules of the model.
    """
    for section, size in sections:
        if not section or size < rules.minimum * MIN_BYTES_PER_TOKEN:
            continue
        block = section[-1]
        if block.get("cache_control") or not _can_be_marked(block):
            continue
        breakpoints = sum(1 for each in blocks if each.get("cache_control"))
        if breakpoints < MAX_BREAKPOINTS:
            block["cache_control"] = _choose_control(blocks, block, rules)


def _choose_control(blocks: Sequence[Content], block: Content, rules: CacheRules) -> Content:
    """Return a breakpoint with a lifetime that the others allow: longer lifetimes must come first."""
    position = next(index for index, each in enumerate(blocks) if each is block)
    before = _list_lifetimes(blocks[:position])
    after = _list_lifetimes(blocks[position + 1 :])
    is_long = "1h" in after or ("5m" not in before and rules.lifetime == LIFETIMES["1h"])
    if is_long:
        return {"type": "ephemeral", "ttl": "1h"}
    return {"type": "ephemeral"}


def _list_boundaries(messages: Sequence[Content], size: int) -> list[tuple[list[Content], int]]:
    """Return the last input of this request and of the previous one, each with the bytes up to it."""
    boundaries: list[tuple[list[Content], int]] = []
    was_input = False
    for message in reversed(messages):
        is_input = message["role"] == "user"
        if is_input and not was_input and isinstance(message["content"], list):
            boundaries.append((cast("list[Content]", message["content"]), size))
        if len(boundaries) == 2:
            break
        was_input = is_input
        size -= _measure(message)
    return boundaries


def _list_blocks(messages: Sequence[Content]) -> Iterator[Content]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from cast("list[Content]", content)


def _list_lifetimes(blocks: Sequence[Content]) -> set[str]:
    controls = (block.get("cache_control") for block in blocks)
    return {control.get("ttl") or "5m" for control in controls if control}


def _can_be_marked(block: Content) -> bool:
    if block.get("type") in _UNMARKABLE_TYPES or block.get("defer_loading"):
        return False
    return block.get("type") != "text" or bool(block["text"].strip())


def _is_plain_input(message: Content) -> bool:
    is_input = message["role"] in ("system", "developer", "user")
    return is_input and isinstance(message["content"], str)


def _measure_tools(tools: Iterable[Content]) -> int:
    return sum(2 + len(format_tool(each).encode("utf-8", "surrogatepass")) for each in tools)


def _measure(value: object) -> int:
    if not value:
        return 0
    text = json.dumps(value, ensure_ascii=False, default=str)
    return len(text.encode("utf-8", "surrogatepass"))
