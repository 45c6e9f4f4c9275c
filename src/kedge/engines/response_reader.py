"""Read a response into blocks and an anchor of the Turn, or into an error with the partial content."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from anyio import move_on_after
from msgspec import structs

from kedge.engines.http_errors import is_permanent_failure
from kedge.engines.transport import RawResponse
from kedge.errors import AnswerIncomplete, EngineError, ServerFailed, StreamCut
from kedge.events import Outcome, ResponseFailed, StreamEvent, StreamFailed
from kedge.events.decoder import StreamDecoder
from kedge.events.sse import BYTE_ORDER_MARK
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan, Status, TokenCounts, record_response, tag_blocks
from kedge.text.json_text import decode
from kedge.turns import Turn

DRAIN_SECONDS = 0.1
"""Seconds in which a server must close its stream after the last event; then the connection is dropped."""


async def read_response(
    decoder: StreamDecoder, raw: RawResponse, redact: Callable[[str], str]
) -> AsyncGenerator[StreamEvent]:
    """Yield the events of a response, complete or as they arrive, and close the reply.

    One generator does both, because each one between the server and the caller costs time for every chunk.
    A broken connection is raised last, after the events that arrived.
    """
    cut: StreamCut | None = None
    started = False
    async with aclosing(raw):
        if not raw.is_stream:
            for event in _decode_body(await raw.body(), decoder, raw):
                yield _redact_event(event, redact)
            return
        try:
            async with aclosing(raw.chunks()) as chunks:
                async for chunk in chunks:
                    if not started and chunk.lstrip().startswith(b"{"):
                        # No event starts like this: the server ignored `stream` without setting the content type.
                        body = b"".join([chunk, *[rest async for rest in chunks]])
                        for event in _decode_body(body, decoder, raw):
                            yield _redact_event(event, redact)
                        return
                    started = started or bool(chunk.strip())
                    found = decoder.feed(chunk)
                    for event in found:
                        yield _redact_event(event, redact)
                    if decoder.ended or any(isinstance(each, StreamFailed) for each in found):
                        for event in await _drain(decoder, chunks):
                            yield _redact_event(event, redact)
                        break
        except StreamCut as error:
            cut = error
        for event in decoder.close():
            yield _redact_event(event, redact)
        if cut:
            raise cut


async def _drain(decoder: StreamDecoder, chunks: AsyncGenerator[bytes]) -> list[StreamEvent]:
    """Return the events after the end of the response that arrive within a short time."""
    found: list[StreamEvent] = []
    with move_on_after(DRAIN_SECONDS):
        async for chunk in chunks:
            found += decoder.feed(chunk)
    return found


def _decode_body(body: bytes, decoder: StreamDecoder, raw: RawResponse) -> list[StreamEvent]:
    """Return the events of a response that arrived as one body: JSON, or a stream under another label."""
    body = body.removeprefix(BYTE_ORDER_MARK).lstrip()
    if body.startswith((b"data:", b"event:", b":")):
        return [*decoder.feed(body), *decoder.close()]
    response = _parse_body(body, decoder, raw)
    if not response.keys() & decoder.RESPONSE_FIELDS:
        return [*decoder.feed_message(response), *decoder.close()]
    # Only an escape can contain half a character; searching for one is cheaper than a walk over the response.
    return decoder.feed_whole(response, repair=b"\\u" in body)


def _redact_event(event: StreamEvent, redact: Callable[[str], str]) -> StreamEvent:
    """Return the event without the API key, which some servers repeat."""
    if not isinstance(event, StreamFailed | ResponseFailed):
        return event
    return structs.replace(event, message=redact(event.message), code=redact(event.code))


def _parse_body(body: bytes, decoder: StreamDecoder, raw: RawResponse) -> dict[str, Any]:
    try:
        parsed: object = decode(body)
    except (ValueError, RecursionError):
        parsed = None
    response = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
    # An object without any member of a response is not an empty response: some gateways report
    # errors with status 200, in the usual form or in an object of another form.
    if not response.keys() & decoder.RESPONSE_FIELDS and not response.get("error"):
        message = "the server returned a body that is not a response"
        raise ServerFailed(
            message, provider=raw.provider, request_id=raw.request_id, retryable=True
        )
    return response


log = get_logger("kedge.engines.response_reader")


def record_outcome(
    turn: Turn,
    outcome: Outcome,
    plan: RequestPlan,
    *,
    now: float,
    stored: bool,
    retention: float | None,
    conversation_id: str = "",
    lost: bool = False,
    reused: bool = False,
    stateful: bool = True,
    counted: TokenCounts | None = None,
) -> Turn:
    """Return the Turn with the blocks of the response, and with its anchor if the response can be one.

    Of a response that the server generates in the background only the id is recorded. ``lost`` means that the
    server's context differs from the Turn, ``stateful`` that the API stores responses at all.
    """
    if outcome.status not in ("completed", "incomplete", "running"):
        return turn
    is_running = outcome.status == "running"
    blocks = outcome.blocks if outcome.completed else outcome.whole_blocks
    problem = "" if is_running else _find_anchor_problem(outcome, reused=reused)
    if stateful and not is_running:
        problem = problem or outcome.anchor_problem
    if problem:
        if stateful:
            log.warning("no anchor: %s", problem, response_id=outcome.response_id, turn_id=turn.id)
            count("responses_without_id_total")
        return turn.append(*tag_blocks(blocks, outcome.response_id)) if blocks else turn
    status: Status = "running" if is_running else "incomplete"
    if outcome.completed:
        status = "lost" if lost else "completed"
    log.debug("the response is %s", status, response_id=outcome.response_id)
    return record_response(
        turn,
        () if is_running else blocks,
        response_id=outcome.response_id,
        plan=plan,
        created_at=now,
        status=status,
        stored=stored,
        retention=retention,
        conversation_id=conversation_id,
        head=stateful,
        counted=counted,
    )


def raise_for_outcome(
    outcome: Outcome, provider: str, turn: Turn, cut: StreamCut | None = None
) -> None:
    """Raise unless the response is complete, or continues in the background.

    ``cut`` is the error that ended its connection, if any.
    """
    error: EngineError
    match outcome.status:
        case "completed" | "running":
            return
        case "incomplete":
            message = f"the response stopped before its end ({outcome.reason or 'no reason given'})"
            error = AnswerIncomplete(message, provider=provider, code=outcome.reason)
        case "failed":
            message = outcome.message or "the server reported a failure"
            retryable = not is_permanent_failure(outcome.code, message)
            error = ServerFailed(message, provider=provider, code=outcome.code, retryable=retryable)
        case "cut":
            message = "the stream ended before the response was complete; the Turn is unchanged"
            error = cut or StreamCut(message, provider=provider, retryable=True)
    error.turn = turn
    error.partial = outcome.blocks
    error.response_id, error.usage = outcome.response_id, outcome.usage
    raise error


def attach_context(error: EngineError, turn: Turn, plan: RequestPlan) -> EngineError:
    """Return the error with the plan and the Turn to continue from, unless it has them already."""
    error.plan = error.plan or plan
    error.turn = error.turn or turn
    return error


def _find_anchor_problem(outcome: Outcome, *, reused: bool) -> str:
    if not outcome.response_id:
        return "the response came without an id"
    if reused:
        return "the response came with the id of an earlier one"
    return "" if outcome.blocks else "the answer is empty"
