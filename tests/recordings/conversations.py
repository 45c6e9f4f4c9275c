"""Replay recorded conversations of several requests: the judge of server memory, and ``kedge.chain``.

A server that remembers counts the same tokens whether the context is sent or stored. So the recorded answers are also
those to chained requests, and nothing in them may count as lost context.
"""

from collections.abc import Iterable
from typing import Any

import httpx2

import kedge
from kedge import chain_report
from kedge.engines import Engine
from kedge.events.run import AnswerFinished, Healed, ServerForgot
from kedge.turns import Block, ReasoningBlock, Turn, block_from_item, system
from kedge.wire import blocks_from_messages
from recordings.answers import read_object, read_recorded
from recordings.exchanges import Exchange, JsonObject
from recordings.replay import RecordedServer, Run, connect_recorded, echo_anchor, run_exchange

REQUEST_OPTIONS = frozenset({"model", "input", "messages", "instructions", "stream", "tools"})
REQUEST_OPTIONS |= {"previous_response_id", "conversation"}
"""Members of a body that the engine sets itself."""


def read_input(request: JsonObject) -> list[JsonObject]:
    """Return the input items of a recorded request."""
    items = request.get("input") or []
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


async def judge_conversation(group: list[Exchange], server: RecordedServer, url: str) -> list[str]:
    """Send a recorded conversation again, and return what is judged or predicted otherwise than it was.

    With anchors no answer may count as given without its context. What the provider read from its prompt cache
    must not be predicted as too short for it.
    """
    found: list[str] = []
    for known in (True, False) if group[0].api == "responses" else (True,):
        settings: JsonObject = {} if known else {"known_server": None}
        if group[0].api == "responses":
            settings |= {"retention": None, "mode": "chained"}
        turns: dict[str, Turn] = {}
        async with connect_recorded(group[0], url, **settings) as engine:
            longest = 0
            for exchange in filter(has_plausible_usage, group):
                run = await _send(exchange, engine, server, turns)
                found += [f"{exchange.name}: {each}" for each in _find_misjudgments(run, longest)]
                longest = max(longest, *read_recorded(exchange).usage[:1])
                if run.outcome is not None and run.outcome.completed:
                    turns[read_object(exchange).get("id") or ""] = run.turn
    return found


async def _send(
    exchange: Exchange, engine: Engine, server: RecordedServer, turns: dict[str, Turn]
) -> Run:
    """Send a recorded request as a Turn that continues an earlier one."""
    server.play(exchange)
    members = {k: v for k, v in exchange.request.items() if k not in REQUEST_OPTIONS}
    return await run_exchange(
        engine,
        _continue_turn(exchange, turns),
        streaming=exchange.is_stream,
        tools=exchange.request.get("tools") or [],
        extra_body={k: v for k, v in members.items() if v is not None},
    )


def has_plausible_usage(exchange: Exchange) -> bool:
    """Return whether an answer has at least as many tokens as words; some recordings were edited by hand."""
    answer = read_recorded(exchange)
    words = sum(len(text.split()) for text in answer.texts)
    return bool(answer.usage) and words <= answer.usage[2]


def _find_misjudgments(run: Run, longest: int) -> list[str]:
    """Return the wrong judgments about an answer; ``longest`` are the tokens of the longest prompt before."""
    found: list[str] = []
    for event in run.events:
        if isinstance(event, ServerForgot) or (
            isinstance(event, Healed) and event.reason == "forgot"
        ):
            found.append(f"judged as {type(event).__name__}")
        if isinstance(event, AnswerFinished) and event.outcome.usage and event.plan.cache:
            cached, reason = event.outcome.usage.cached_tokens, event.plan.cache.reason
            if 0 < cached <= longest and reason == "short":
                found.append(
                    f"{cached} tokens were read from a cache for which the prompt is predicted too short"
                )
    return found


def _continue_turn(exchange: Exchange, turns: dict[str, Turn]) -> Turn:
    """Return the Turn of a request: that of an earlier one with the new blocks, or a new one."""
    request = exchange.request
    blocks: list[Block] = [block_from_item(item) for item in read_input(request)]
    if exchange.api == "chat":
        blocks = blocks_from_messages(request.get("messages") or [])
    known = turns.get(request.get("previous_response_id") or "")
    if known is not None:
        return known.append(*blocks)
    lead = [system(request["instructions"])] if request.get("instructions") else []
    turn = Turn([*lead, *blocks])
    for earlier in reversed(turns.values()):
        spoken, count = _without_reasoning(earlier), len(_without_reasoning(earlier))
        if _without_reasoning(turn)[:count] == spoken and count < len(_without_reasoning(turn)):
            return earlier.append(*_without_reasoning(turn)[count:])
    return turn


def _without_reasoning(blocks: Iterable[Block]) -> list[Block]:
    return [block for block in blocks if not isinstance(block, ReasoningBlock)]


async def chain_conversation(
    group: list[Exchange], server: RecordedServer, url: str
) -> tuple[int, list[str]]:
    """Send a recorded conversation with ``kedge.chain``.

    Returns:
        The number of requests that were sent with an anchor, and the differences.
    """
    contexts: dict[str, list[Any]] = {}
    found: list[str] = []
    async with httpx2.AsyncClient(timeout=60) as client:
        kedge.chain(client, trust="always", retention=None)
        for exchange in group:
            server.play(exchange)
            reply = await client.post(f"{url}/v1/responses", json=exchange.request)
            sent = server.bodies[0]
            written = _read_context(exchange.request, contexts)
            if not _is_replayed(written, _read_context(sent, contexts)):
                found.append(f"{exchange.name}: chained on another context than the program wrote")
            if reply.text != echo_anchor(exchange.body, sent):
                found.append(f"{exchange.name}: the program received another response")
            response = read_object(exchange)
            output = [_normalize(item) for item in response.get("output") or []]
            contexts[response.get("id") or ""] = [*written, *filter(None, output)]
        return chain_report(client).chained, found


def _is_replayed(written: list[Any], context: list[Any]) -> bool:
    """Return whether a program wrote this context; it may leave out members of answers, such as their phase."""
    if len(written) != len(context):
        return False
    return all(map(_is_same_item, written, context))


def _is_same_item(item: JsonObject, stored: JsonObject) -> bool:
    if item.get("role") == "assistant" or item.get("type") == "function_call":
        return item.items() <= stored.items()
    return item == stored


def _read_context(request: JsonObject, contexts: dict[str, list[Any]]) -> list[Any]:
    """Return the items that a model reads for a request, without reasoning."""
    stored = contexts.get(request.get("previous_response_id") or "", [])
    return [*stored, *filter(None, map(_normalize, read_input(request)))]


def _normalize(item: JsonObject) -> Any:
    """Return the content of an item that a model reads; None for reasoning."""
    if item.get("type") == "reasoning":
        return None
    plain = {k: v for k, v in item.items() if v is not None and k not in ("id", "status")}
    if "role" in plain:
        plain["type"] = "message"
    for name in ("content", "output"):
        if isinstance(plain.get(name), str):
            plain[name] = [{"type": "text", "text": plain[name]}]
        elif isinstance(plain.get(name), list):
            plain[name] = [_normalize_part(part) for part in plain[name]]
    return plain


def _normalize_part(part: Any) -> Any:
    if not isinstance(part, dict) or "text" not in part:
        return part
    return {"type": "text", "text": part["text"]}
