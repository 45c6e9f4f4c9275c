"""``cache_control`` breakpoints of a request to ``/v1/messages``: their rules, and the prefixes they cache.

A prompt is the tools, the system text and the messages, in this order. A change in a block changes the prefix at
every later breakpoint; a change of ``tool_choice`` or ``thinking`` changes the messages only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.server.anthropic import errors
from kedge.server.anthropic.parse import (
    Decrypt,
    MergedMessage,
    convert_tool,
    iter_items,
    join_system,
    normalize_content,
)
from kedge.server.prompt_cache import EMPTY_DIGEST, Breakpoint, PromptCache, hash_items
from kedge.server.stateless_run import PreparedRequest
from kedge.server.token_counts import count_items, count_json, count_text
from kedge.tokens.cache_minimums import find_min_tokens

Body = Mapping[str, Any]

MAX_BREAKPOINTS = 4
LIFETIMES: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class _Segment:
    """One tool, system block or content block; a content block has the number of its message."""

    content: Mapping[str, Any]
    section: str
    number: int
    role: str = ""


def check_breakpoints(body: Body) -> None:
    """Reject too many breakpoints, and a longer lifetime after a shorter one."""
    marked = [control for _, control in _list_breakpoints(body, _list_segments(body))]
    if len(marked) > MAX_BREAKPOINTS:
        raise errors.TOO_MANY_BREAKPOINTS(count=len(marked))
    lifetimes = [_get_lifetime(each) for each in marked]
    if lifetimes != sorted(lifetimes, reverse=True):
        raise errors.BREAKPOINT_ORDER()


def apply_breakpoints(
    cache: PromptCache, body: Body, prepared: PreparedRequest, decrypt: Decrypt
) -> PreparedRequest:
    """Return a prepared request with the tokens that its breakpoints read from the cache and write to it."""
    segments = _list_segments(body)
    marked = _list_breakpoints(body, segments)
    if not marked:
        return prepared
    tools = [convert_tool(tool) for tool in body.get("tools") or ()]

    def count_prefix(index: int) -> int:
        """Count the tokens of the request up to one of its segments."""
        segment = segments[index]
        if segment.section == "tools":
            return count_json(tools[: segment.number + 1])
        if segment.section == "system":
            system = normalize_content(body["system"])[: segment.number + 1]
            return (count_json(tools) if tools else 0) + count_text(join_system(system))
        rest = (
            MergedMessage(each.role, 0, [(0, 0, each.content)]) for each in segments[index + 1 :]
        )
        after = count_items(item for each in rest for item in iter_items(each, decrypt))
        return prepared.usage.input - after

    breakpoints = [
        Breakpoint(index, count_prefix(index), _get_lifetime(control)) for index, control in marked
    ]
    cached, written = cache.read_breakpoints(
        list(_hash_segments(body, segments)), breakpoints, find_min_tokens(body["model"])
    )
    usage = replace(prepared.usage, cached=cached, cache_write=written)
    return replace(prepared, usage=usage)


def _list_segments(body: Body) -> list[_Segment]:
    segments = [_Segment(tool, "tools", n) for n, tool in enumerate(body.get("tools") or ())]
    system = normalize_content(body.get("system") or ())
    segments += [_Segment(block, "system", number) for number, block in enumerate(system)]
    for number, message in enumerate(body["messages"]):
        segments += [
            _Segment(block, "messages", number, message["role"])
            for block in normalize_content(message["content"])
        ]
    return segments


def _list_breakpoints(
    body: Body, segments: Sequence[_Segment]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the index and the ``cache_control`` of each marked segment; that of the request marks the last."""
    controls = [each.content.get("cache_control") for each in segments]
    if body.get("cache_control"):
        controls[-1] = controls[-1] or body["cache_control"]
    return [(index, control) for index, control in enumerate(controls) if control]


def _hash_segments(body: Body, segments: Sequence[_Segment]) -> Iterator[bytes]:
    digest = next(hash_items(EMPTY_DIGEST, [{"model": body["model"]}]))
    section = ""
    for each in segments:
        if each.section != section:
            section = each.section
            settings = {name: body.get(name) for name in ("tool_choice", "thinking")}
            start = {"section": section, **(settings if section == "messages" else {})}
            digest = next(hash_items(digest, [start]))
        digest = next(hash_items(digest, [{"role": each.role, **each.content}]))
        yield digest


def _get_lifetime(control: Mapping[str, Any]) -> float:
    return LIFETIMES[control.get("ttl") or "5m"]
