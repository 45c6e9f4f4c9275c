"""Tests of the log middleware, which writes no content, and of listeners for the ids of responses."""

import logging

import pytest

from for_each import for_each
from kedge.errors import EngineError
from kedge.events import TextDelta
from kedge.events.run import FellBack, Healed, ModeChanged, ServerForgot
from kedge.middleware import log, on_response_started, with_middleware
from kedge.middleware.log import describe_event
from kedge.observe import TRACE
from kedge.turns import Turn, assistant, user
from middleware.scripted_engine import ScriptedEngine


async def test_the_log_records_requests_without_content(caplog: pytest.LogCaptureFixture) -> None:
    """Records have levels from TRACE to ERROR and ids as fields, and contain no message text."""
    caplog.set_level(TRACE, "kedge.run")
    engine = ScriptedEngine([assistant("the answer is 47#11")], EngineError("broken"))
    stack = with_middleware(engine, log())
    turn = await stack.run(Turn([user("tell me the secret")]))
    with pytest.raises(EngineError):
        await stack.run(turn)
    levels = {record.levelno for record in caplog.records}
    assert {TRACE, logging.DEBUG, logging.INFO, logging.ERROR} <= levels
    assert "47#11" not in caplog.text
    assert "secret" not in caplog.text
    assert any(getattr(r, "kedge", {}).get("response_id") == "resp_1" for r in caplog.records)


@for_each(
    "event",
    [
        Healed("gone"),
        FellBack("changed"),
        ModeChanged("stateless", "chained", "switched_off"),
        ServerForgot("resp_1"),
    ],
)
def test_important_events_are_warnings(event: object) -> None:
    """Fallbacks, healing, mode changes and lost responses are logged as warnings."""
    assert describe_event(event)[0] == logging.WARNING  # type: ignore[arg-type]


async def test_the_listener_receives_the_id_before_the_answer() -> None:
    """A sync or async listener is called once per response, before the first text; its result is ignored."""
    received: list[str] = []

    async def listen(response_id: str) -> None:
        received.append(response_id)

    def listen_and_count(response_id: str) -> int:
        received.append(response_id)
        return len(received)

    for listener in (listen, received.append, listen_and_count):
        received.clear()
        engine = ScriptedEngine([assistant("a")])
        async with with_middleware(engine, on_response_started(listener)).stream(
            Turn([user("hi")])
        ) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    assert received == ["resp_1"]
        assert received == ["resp_1"]
