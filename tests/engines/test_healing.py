"""Test healing: a lost or rejected context is sent again in full, once, before any output is shown."""

from typing import Any

import pytest

from engines.conftest import open_engine
from engines.runs import last_text, request_bodies, send_lines
from kedge.engines import ResponsesEngine
from kedge.errors import ChainRefused
from kedge.events import Event
from kedge.events.run import Healed, ModeChanged
from kedge.observe import snapshot
from kedge.planning import get_state
from kedge.testing import TestServer, serve
from kedge.turns import ReasoningBlock, Turn, user
from normalization import expected_context, normalize_items


async def run_with_events(
    engine: ResponsesEngine, turn: Turn, **options: Any
) -> tuple[Turn, list[Event]]:
    """Run a Turn and record every event."""
    async with engine.stream(turn, **options) as stream:
        events = [event async for event in stream]
    return stream.turn, events


def input_tokens_total() -> float:
    """Return the input tokens that the metric has counted so far."""
    totals = snapshot().get("tokens_total", {})
    return sum(total for labels, (_, total) in totals.items() if ("kind", "input") in labels)


@pytest.mark.parametrize("fault", ["forget_all", "forget_silently,echo=no"])
async def test_healing_can_be_disabled(
    engine: ResponsesEngine, server: TestServer, fault: str
) -> None:
    """The error is raised at once, with the Turn to continue from; nothing more is sent."""
    turn = await send_lines(engine, "One", "Two")
    server.faults.set(fault, times=1)
    requested, before = turn.append(user("Three")), len(request_bodies(server))
    with pytest.raises(ChainRefused) as exc_info:
        await engine.run(requested, heal=False)
    assert exc_info.value.turn == requested
    assert len(request_bodies(server)) == before + 1
    was_answered = fault != "forget_all"
    assert bool(exc_info.value.usage) is bool(exc_info.value.response_id) is was_answered


@pytest.mark.parametrize("fault", ["forget_silently", "forget_silently,echo=no"])
async def test_tokens_of_a_discarded_answer_are_counted(
    engine: ResponsesEngine, server: TestServer, fault: str
) -> None:
    """The usage of a run includes that of an answer that healing discards, and so does the metric."""
    turn = (await send_lines(engine, "One", "Two")).append(user("Three"))
    before = input_tokens_total()
    server.faults.set(fault, times=1)
    async with engine.stream(turn, streaming=False) as stream:
        healed = [event async for event in stream if isinstance(event, Healed)]
    (discarded,) = (event.usage for event in healed)
    answered = stream.answers[0].outcome.usage
    assert discarded is not None
    assert answered is not None
    assert discarded.input_tokens > 0
    assert healed[0].response_id
    assert stream.usage == discarded + answered
    assert input_tokens_total() - before == stream.usage.input_tokens


async def test_lost_context_is_sent_again_in_full(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The rejected anchor is marked lost, the complete Turn is sent, and chaining starts again."""
    turn = await send_lines(engine, "One", "Two")
    lost = turn.blocks[-1].response_id
    server.forget()
    turn, events = await run_with_events(engine, turn.append(user("What did I say first?")))
    healed = [event for event in events if isinstance(event, Healed)]
    assert [event.reason for event in healed] == ["gone"]
    assert lost in healed[0].lost
    assert "One" in last_text(turn)
    assert normalize_items(server.requests[-1].context) == expected_context(turn)
    record = get_state(turn).anchor(lost)
    assert record is not None
    assert record.status == "lost"
    await engine.run(turn.append(user("Go on")))
    assert request_bodies(server)[-1]["previous_response_id"] == turn.blocks[-1].response_id


async def test_expired_response_is_not_requested(server: TestServer) -> None:
    """After the retention time the plan rejects the anchor, and the request is a full send."""
    now = [1_000_000.0]
    async with open_engine(server, clock=lambda: now[0]) as engine:
        turn = await send_lines(engine, "One")
        now[0] += 31 * 86_400
        assert engine.plan(turn).fallback == "expired"
        turn = await engine.run(turn.append(user("What did I say first?")))
    assert "previous_response_id" not in request_bodies(server)[-1]
    assert "One" in last_text(turn)


async def test_a_response_that_expired_early_is_healed(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A response that expires before the known retention time is healed like any other loss."""
    turn = await send_lines(engine, "One")
    server.clock.advance(days=31)
    turn, events = await run_with_events(engine, turn.append(user("Two")))
    assert any(isinstance(event, Healed) for event in events)
    assert normalize_items(server.requests[-1].context) == expected_context(turn)


async def test_zero_data_retention_switches_to_stateless() -> None:
    """After the first rejection, later requests are stateless and include encrypted reasoning."""
    with serve() as stateful, serve(zero_data_retention=True) as strict:
        async with open_engine(stateful, scope="one") as engine:
            turn = await send_lines(engine, "One")
        async with open_engine(strict, scope="one") as engine:
            turn, events = await run_with_events(engine, turn.append(user("Think about two.")))
            reasons = [event.reason for event in events if isinstance(event, Healed)]
            assert reasons == ["unsupported"]
            assert any(isinstance(event, ModeChanged) for event in events)
            turn, events = await run_with_events(engine, turn.append(user("Three")))
            assert not any(isinstance(event, Healed) for event in events)
            assert request_bodies(strict)[-1]["store"] is False
            assert any(isinstance(block, ReasoningBlock) for block in turn.blocks)
            assert normalize_items(strict.requests[-1].context) == expected_context(turn)


async def test_unreadable_reasoning_is_left_out_once() -> None:
    """Encrypted reasoning of another server is rejected, and the request is sent again without it."""
    with serve() as first, serve() as second:
        async with open_engine(first, scope="one", mode="stateless") as engine:
            turn = await send_lines(engine, "Think about one.")
        async with open_engine(second, scope="one", mode="stateless") as engine:
            turn, events = await run_with_events(engine, turn.append(user("Two")))
        assert [e.reason for e in events if isinstance(e, Healed)] == ["reasoning"]
        assert normalize_items(second.requests[-1].context) == expected_context(turn)


@pytest.mark.parametrize("streaming", [True, False])
async def test_each_run_heals_at_most_once(server: TestServer, streaming: bool) -> None:
    """Two runs from the same lost anchor are each healed once, without a loop."""
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "One")
        server.forget()
        for line in ("Two", "Three"):
            async with engine.stream(turn.append(user(line)), streaming=streaming) as stream:
                events = [event async for event in stream]
            assert sum(isinstance(event, Healed) for event in events) == 1
