"""Test healing: a lost or rejected context is sent again in full, once, before any output is shown."""

import pytest
from starlette.requests import Request
from starlette.responses import Response

from engines.conftest import open_engine
from engines.fake_server import connect_to, json_response
from engines.runs import (
    check_law,
    collect_events,
    last_text,
    list_reasons,
    request_bodies,
    send_lines,
)
from kedge.engines import ResponsesEngine
from kedge.errors import ChainRefused, RequestRefused
from kedge.events.run import Healed, ModeChanged
from kedge.planning import get_state
from kedge.testing import TestServer, serve
from kedge.turns import ReasoningBlock, Turn, user


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


async def test_lost_context_is_sent_again_in_full(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The rejected anchor is marked lost, the complete Turn is sent, and chaining starts again."""
    turn = await send_lines(engine, "One", "Two")
    lost = turn.blocks[-1].response_id
    server.forget()
    turn, events = await collect_events(engine, turn.append(user("What did I say first?")))
    healed = [event for event in events if isinstance(event, Healed)]
    assert [event.reason for event in healed] == ["gone"]
    assert lost in healed[0].lost
    assert "One" in last_text(turn)
    check_law(server, turn)
    record = get_state(turn).anchor(lost)
    assert record is not None
    assert record.status == "lost"
    await engine.run(turn.append(user("Go on")))
    assert request_bodies(server)[-1]["previous_response_id"] == turn.blocks[-1].response_id


async def test_zero_data_retention_switches_to_stateless() -> None:
    """After the first rejection, later requests are stateless and include encrypted reasoning."""
    with serve() as stateful, serve(zero_data_retention=True) as strict:
        async with open_engine(stateful, scope="one") as engine:
            turn = await send_lines(engine, "One")
        async with open_engine(strict, scope="one") as engine:
            turn, events = await collect_events(engine, turn.append(user("Think about two.")))
            reasons = list_reasons(events)
            assert reasons == ["unsupported"]
            assert any(isinstance(event, ModeChanged) for event in events)
            turn, events = await collect_events(engine, turn.append(user("Three")))
            assert not any(isinstance(event, Healed) for event in events)
            assert request_bodies(strict)[-1]["store"] is False
            assert any(isinstance(block, ReasoningBlock) for block in turn.blocks)
            check_law(strict, turn)


async def test_a_reason_is_healed_once_and_then_raised() -> None:
    """A server that fails in the same way again does not get a third request."""
    attempts: list[str] = []

    async def lose_objects(request: Request) -> Response:
        await request.body()
        if request.url.path.endswith("/conversations"):
            return json_response({"id": f"conv_{len(attempts)}"})
        attempts.append(request.url.path)
        message = f"Conversation with id 'conv_{len(attempts)}' not found."
        return json_response({"error": {"message": message}}, 404 if len(attempts) < 7 else 418)

    async with connect_to(lose_objects, mode="conversation") as engine:
        with pytest.raises(RequestRefused, match="not found"):
            await engine.run(Turn([user("Hello")]))
    assert len(attempts) == 2


async def test_response_with_a_reused_id_is_no_anchor() -> None:
    """The blocks of the response stay in the Turn, without an anchor record."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}
    answer = json_response({"id": "resp_1", "status": "completed", "output": [message]})
    async with connect_to(answer, trust="always") as engine:
        turn = await engine.run(Turn([user("Hello")]))
        assert [each.status for each in get_state(turn).anchors] == ["completed"]
        turn = await engine.run(turn.append(user("Again")))
    assert [block.text for block in turn] == ["Hello", "Hi", "Again", "Hi"]
    assert [each.status for each in get_state(turn).anchors] == ["lost"]
