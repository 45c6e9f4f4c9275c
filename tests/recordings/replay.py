"""Replay recorded exchanges through Kedge: a local server answers with the recorded bytes.

Each exchange is run by the engine of its API, with the rules for its host, once with the response as a whole and once
cut at random. What Kedge has afterwards is compared with the recorded object; then the conversation is continued, and
the request with it is compared with the recorded object, too.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from app_thread import serve_app
from kedge import connect
from kedge.engines import Engine, ResponsesEngine
from kedge.engines.prompt_cache import CHAT_HOST_RULES, HOST_RULES, find_host_rules
from kedge.errors import AnswerIncomplete, EngineError, KedgeError
from kedge.events import Event, OpaqueEvent, Outcome
from kedge.events.run import AnswerFinished
from kedge.events.types import PARTIAL, AnomalyNoted
from kedge.evidence.server_evidence import find_known_host
from kedge.planning.digests import call_effect
from kedge.providers.registry import find_chat_settings
from kedge.turns import Block, OpaqueBlock, ToolCallBlock, Turn, opaque, tool_result, user
from recordings.answers import Answer, read_blocks, read_recorded, usage_numbers
from recordings.exchanges import Exchange, JsonObject
from recordings.resent import compare_compacted, compare_resent

MAX_PIECE = 40
"""The maximum number of bytes of a piece of a response that is cut."""


class RecordedServer:
    """A server that answers every request with recorded bytes, and records the requests."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.bodies: list[JsonObject] = []
        self.cuts: random.Random | None = None

    def play(self, *exchanges: Exchange, cuts: random.Random | None = None) -> None:
        """Answer the next requests with these exchanges, in order; the last one is repeated."""
        self.exchanges, self.cuts, self.bodies = list(exchanges), cuts, []

    async def handle(self, request: Request) -> Response:
        """Return the recorded response to the next request."""
        if request.method != "POST":
            return Response("{}", 404, media_type="application/json")
        self.bodies.append(await request.json())
        number = min(len(self.bodies), len(self.exchanges)) - 1
        exchange = self.exchanges[number]
        content = echo_anchor(exchange.body, self.bodies[-1]).encode()
        options: Any = {"status_code": exchange.status, "media_type": exchange.media_type}
        if self.cuts is None:
            return Response(content, **options)
        return StreamingResponse(_cut(content, self.cuts), **options)


def _cut(content: bytes, cuts: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        size = cuts.randint(1, MAX_PIECE)
        yield content[at : at + size]
        at += size


def echo_anchor(body: str, request: JsonObject) -> str:
    """Return a response with the anchor of the request, because it was recorded for one that was sent in full."""
    anchor = request.get("previous_response_id")
    if not anchor:
        return body
    return re.sub(r'("previous_response_id": ?)(null|"[^"]*")', rf'\g<1>"{anchor}"', body)


@contextmanager
def serve_recordings() -> Iterator[tuple[RecordedServer, str]]:
    """Run the server, and yield it with its address."""
    server = RecordedServer()
    route = Route("/{path:path}", server.handle, methods=["GET", "POST", "DELETE"])
    app = Starlette(routes=[route])
    with serve_app(app) as url:
        yield server, url


def connect_recorded(exchange: Exchange, url: str, **settings: Any) -> Engine:
    """Return the engine for the API of an exchange, with the rules for its host, at the local server."""
    model = exchange.request.get("model") or "model"
    options: dict[str, Any] = {"api_key": "recorded", "max_retries": 0, **settings}
    host_rules = CHAT_HOST_RULES if exchange.api == "chat" else HOST_RULES
    if rules := find_host_rules(exchange.host, host_rules):
        options |= {"prompt_cache": True, "cache_rules": rules}
    match exchange.api:
        case "messages":
            return connect(f"anthropic:{model}", base_url=url, **options)
        case "chat":
            rules_of_host = find_chat_settings(exchange.host, model)
            return connect(f"chat:{url}/v1#{model}", **{**rules_of_host, **options})
        case _:
            options.setdefault("known_server", find_known_host(f"https://{exchange.host}/v1"))
            return connect(f"responses:{url}/v1#{model}", **options)


@dataclass(slots=True)
class Run:
    """What a run of one exchange gave."""

    turn: Turn
    outcome: Outcome | None = None
    error: KedgeError | None = None
    events: list[Event] = field(default_factory=list[Event])

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the answer."""
        if isinstance(self.error, EngineError):
            return tuple(self.error.partial)
        return tuple(self.turn.blocks[1:])

    @property
    def opaque_types(self) -> list[str]:
        """The types of the events that were passed on without being interpreted."""
        return [each.type for each in self.events if isinstance(each, OpaqueEvent)]


async def run_exchange(engine: Engine, turn: Turn, **options: Any) -> Run:
    """Run a Turn, and return what it gave."""
    run = Run(turn)
    try:
        async with engine.stream(turn, **options) as stream:
            async for event in stream:
                run.events.append(event)
                if isinstance(event, AnswerFinished):
                    run.outcome = event.outcome
        run.turn = stream.turn
    except KedgeError as error:
        run.error = error
        run.turn = getattr(error, "turn", None) or turn
    return run


async def replay(
    exchange: Exchange, server: RecordedServer, url: str, seed: int, opaque_types: Counter[str]
) -> list[str]:
    """Replay one exchange, count the events that are passed on, and return the differences."""
    found: list[str] = []
    for cuts in (None, random.Random(seed)):
        form = "cut" if cuts else "whole"
        engine = connect_recorded(exchange, url, mode="stateless")
        async with engine:
            server.play(exchange, cuts=cuts)
            if exchange.is_compaction and exchange.is_answer:
                differences = await _replay_compaction(exchange, server, engine)
                found += [f"{form}: {each}" for each in differences]
                continue
            run = await run_exchange(engine, Turn([user("Hello")]), streaming=exchange.is_stream)
            opaque_types.update(run.opaque_types)
            differences = compare_run(exchange, run)
            if exchange.is_answer and not differences:
                differences = await _continue(exchange, server, engine, run)
        found += [f"{form}: {each}" for each in differences]
    return found


async def _replay_compaction(
    exchange: Exchange, server: RecordedServer, engine: Engine
) -> list[str]:
    """Compact a Turn, and return in what the result and a request with it differ from the recorded object."""
    assert isinstance(engine, ResponsesEngine)
    blocks, usage = await engine.compact(Turn([user("Hello")]))
    seen = Answer(usage=usage_numbers(usage))
    differences = Answer(usage=read_recorded(exchange).usage).compare(seen)
    server.play(exchange)
    await run_exchange(engine, Turn([*blocks, user("Continue")]), streaming=False)
    return [*differences, *compare_compacted(exchange, server.bodies[0])]


def compare_run(exchange: Exchange, run: Run) -> list[str]:
    """Return in what a run differs from the recorded exchange."""
    if not exchange.is_answer:
        return _compare_error(exchange, run)
    expected = read_recorded(exchange)
    outcome = run.outcome or _outcome_of_error(run)
    seen = read_blocks(run.blocks, outcome)
    if exchange.api == "chat":
        seen.encrypted = []  # they are part of the native members
    else:
        seen.native = {}
    if outcome.status == "failed":
        seen.reason = expected.reason
    return [*expected.compare(seen), *_compare_anomalies(exchange, run)]


def _compare_anomalies(exchange: Exchange, run: Run) -> list[str]:
    """Return the anomalies that are not in the recording, and the gaps of the recording that were not noted."""
    expected = [
        f"gap: events are missing before sequence number {number}"
        for number in exchange.sequence_gaps
    ]
    noted = [f"{each.kind}: {each.detail}" for each in run.events if isinstance(each, AnomalyNoted)]
    wrong = [f"anomaly: {each}" for each in noted if each not in expected]
    missed = [f"anomaly not noted: {each}" for each in expected if each not in noted]
    return [*wrong, *missed]


def _compare_error(exchange: Exchange, run: Run) -> list[str]:
    if not isinstance(run.error, EngineError):
        return [f"no error for a response with status {exchange.status}"]
    if exchange.status >= 400 and run.error.status != exchange.status:
        return [f"the error has status {run.error.status} instead of {exchange.status}"]
    return []


def _outcome_of_error(run: Run) -> Outcome:
    """Return the outcome of an answer that ended with an error."""
    error = run.error
    if isinstance(error, AnswerIncomplete):
        return Outcome("incomplete", (), error.response_id, usage=error.usage, reason=error.code)
    if isinstance(error, EngineError):
        return Outcome("failed", (), error.response_id, usage=error.usage)
    return Outcome("cut")


async def _continue(
    exchange: Exchange, server: RecordedServer, engine: Engine, run: Run
) -> list[str]:
    """Continue an answer, and compare what is sent with the recorded object."""
    is_running = run.outcome is not None and run.outcome.status == "running"
    if is_running or (run.error is not None and not isinstance(run.error, AnswerIncomplete)):
        return []
    if any(block.metadata.get(PARTIAL) for block in run.blocks):
        return []  # what is not complete is not sent again
    server.play(exchange)
    turn = run.turn.append(*answer_calls(run.blocks), user("Continue"))
    again = await run_exchange(engine, turn, streaming=exchange.is_stream)
    if not server.bodies:
        return [f"the answer cannot be continued: {again.error}"]
    return compare_resent(exchange, server.bodies[0])


def answer_calls(blocks: tuple[Block, ...]) -> list[Block]:
    """Return a result for every call that the client must answer."""
    results: list[Block] = []
    effects = [effect for effect in map(call_effect, blocks) if effect]
    answered = {key for effect in effects if not effect[0] for key in effect[1]}
    for block in blocks:
        effect = call_effect(block)
        if effect is None or not effect[0] or set(effect[1]) & answered:
            continue
        if isinstance(block, ToolCallBlock):
            results.append(tool_result(block.call_id, "done", custom=block.custom))
        elif isinstance(block, OpaqueBlock):
            results.append(_answer_hosted(block))
    return results


def _answer_hosted(block: OpaqueBlock) -> Block:
    if block.type == "mcp_approval_request":
        answer = {"type": "mcp_approval_response", "approval_request_id": block.item["id"]}
        return opaque({**answer, "approve": True})
    call_id = block.item.get("call_id") or block.item.get("id")
    answer = {"type": f"{block.type}_output", "call_id": call_id, "id": call_id}
    return opaque({**answer, "output": "done"})
