"""Replay recorded conversations of several requests: the judge of server memory, and ``kedge.chain``.

A server that remembers counts the same tokens whether the context is sent or stored. So the recorded answers are also
those to chained requests, and nothing in them may count as lost context.
"""

from collections.abc import Iterable
from typing import Any

import httpx2

import kedge
from kedge import chain_report
from kedge.events.run import Healed, ServerForgot
from kedge.turns import Block, ReasoningBlock, Turn, block_from_item, system
from recordings.answers import merge_stream
from recordings.exchanges import Exchange, JsonObject
from recordings.replay import RecordedServer, connect_recorded, echo_anchor, run_exchange

REQUEST_OPTIONS = frozenset(
    {"model", "input", "instructions", "stream", "tools", "previous_response_id", "conversation"}
)
"""Members of a body that the engine sets itself."""


def read_input(request: JsonObject) -> list[JsonObject]:
    """Return the input items of a recorded request."""
    items = request.get("input") or []
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


def read_object(exchange: Exchange) -> JsonObject:
    """Return the recorded response object."""
    return merge_stream(exchange) if exchange.is_stream else exchange.parse()


async def judge_conversation(group: list[Exchange], server: RecordedServer, url: str) -> list[str]:
    """Send a recorded conversation with anchors, and return the answers that count as given without their context."""
    found: list[str] = []
    for options in ({}, {"known_server": None}):
        engine = connect_recorded(group[0], url, mode="chained", retention=None, **options)
        turns: dict[str, Turn] = {}
        async with engine:
            for exchange in group:
                if not exchange.is_answer:
                    continue
                turn = _continue_turn(exchange, turns)
                server.play(exchange)
                params = {k: v for k, v in exchange.request.items() if k not in REQUEST_OPTIONS}
                run = await run_exchange(
                    engine,
                    turn,
                    streaming=exchange.is_stream,
                    tools=exchange.request.get("tools") or [],
                    extra_body={k: v for k, v in params.items() if v is not None},
                )
                lost = [each for each in run.events if isinstance(each, Healed | ServerForgot)]
                lost = [
                    each for each in lost if not isinstance(each, Healed) or each.reason == "forgot"
                ]
                found += [f"{exchange.name}: judged as {type(each).__name__}" for each in lost]
                if run.error is None:
                    turns[read_object(exchange).get("id") or ""] = run.turn
    return found


def _continue_turn(exchange: Exchange, turns: dict[str, Turn]) -> Turn:
    """Return the Turn of a request: that of an earlier one with the new blocks, or a new one."""
    request = exchange.request
    blocks: list[Block] = [block_from_item(item) for item in read_input(request)]
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
            if _read_context(sent, contexts) != written:
                found.append(f"{exchange.name}: chained on another context than the program wrote")
            if reply.text != echo_anchor(exchange.body, sent):
                found.append(f"{exchange.name}: the program received another response")
            response = read_object(exchange)
            output = [_normalize(item) for item in response.get("output") or []]
            contexts[response.get("id") or ""] = [*written, *filter(None, output)]
        return chain_report(client).chained, found


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
