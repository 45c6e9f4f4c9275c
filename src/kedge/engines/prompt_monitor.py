"""Detect changes of a conversation's prompts that prevent prompt caching."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from kedge.engines.tool_definitions import format_tool
from kedge.memory.tokens import hash_settings
from kedge.observe import count, get_logger
from kedge.planning import CACHE_HINTS, CacheHint, CacheRules, RequestPlan, plan_cache
from kedge.security.bounded_dict import BoundedDict
from kedge.turns import Turn

MAX_REMEMBERED_CHAINS = 256

_NUMBER_TAIL = re.compile(r"[0-9:/.,+TZ -]*$")
_DATED = re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{6,}")

log = get_logger("kedge.engines.prompt_monitor")


@dataclass(frozen=True, slots=True)
class PromptHead:
    """The part of a prompt before the history; a change in it prevents caching."""

    model: str
    instructions: str
    tools: tuple[str, ...]

    @classmethod
    def of(
        cls, model: str, instructions: str | None, tools: Sequence[Mapping[str, Any]]
    ) -> "PromptHead":
        """Create the head of a prompt.

        Args:
            model: The model.
            instructions: The leading system text.
            tools: The definitions of the tools.
        """
        return cls(model, instructions or "", tuple(map(format_tool, tools)))

    def compare(self, before: "PromptHead") -> Iterator[CacheHint]:
        """Yield the changes since the previous request."""
        if self.model != before.model:
            yield "model"
        if self.tools != before.tools:
            same = sorted(self.tools) == sorted(before.tools)
            yield "tool_order" if same else "tools"
        if self.instructions != before.instructions:
            clock = _changes_like_a_clock(before.instructions, self.instructions)
            yield "clock" if clock else "instructions"


@dataclass(slots=True)
class _Chain:
    head: PromptHead
    reported: set[CacheHint] = field(default_factory=set[CacheHint])


class PromptMonitor:
    """Remembers the head of the newest prompt of each conversation, and finds changes that prevent caching."""

    def __init__(self) -> None:
        self._chains = BoundedDict[str, _Chain](MAX_REMEMBERED_CHAINS)

    def plan(
        self,
        turn: Turn,
        plan: RequestPlan,
        rules: CacheRules,
        settings: Mapping[str, Any],
        head: PromptHead,
    ) -> RequestPlan:
        """Return the plan with a prediction for the provider's cache, and hints about what prevents caching."""
        cache = plan_cache(turn, plan, rules=rules, settings=hash_settings(settings))
        if chain := self._chains.get(cache.key):
            cache = replace(cache, hints=tuple(head.compare(chain.head)))
        return replace(plan, cache=cache)

    def record(self, plan: RequestPlan, head: PromptHead) -> None:
        """Record a request that is sent; log each hint once per conversation."""
        cache = plan.cache
        if cache is None:
            return
        chain = self._chains[cache.key] = self._chains.get(cache.key) or _Chain(head)
        chain.head = head
        for hint in cache.hints:
            count("prompt_cache_hints_total", hint=hint)
            if hint not in chain.reported and cache.lost_tokens:
                log.warning("prompt caching is prevented: %s", CACHE_HINTS[hint])
                chain.reported.add(hint)


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
    found = _NUMBER_TAIL.search(text[-40:])
    return found.group() if found else ""


def _shared_length(one: str, other: str) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)
