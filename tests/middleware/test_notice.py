"""Tests of ``on_response_started``, which reports the id of a response as soon as it has one."""

from kedge.events import TextDelta
from kedge.middleware import on_response_started, with_middleware
from kedge.turns import Turn, assistant, user
from middleware.scripted_engine import ScriptedEngine


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
