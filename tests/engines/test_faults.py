"""Test that every fault of the local server ends in a correct Turn or a typed error."""

import re
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from engines.conftest import open_engine
from engines.runs import check_law, collect_events, last_text, list_reasons, send_lines
from kedge.errors import EngineError, RateLimited, ServerFailed, StreamCut
from kedge.events import Event
from kedge.events.run import Healed, ServerForgot
from kedge.planning import get_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import ToolCallBlock, Turn, user

LONG = "The river runs from the mountains to the sea, past towns and mills and meadows. " * 80

# Each fault, and the result of a chained request of a long conversation under it: an error, the reason
# of the healing, or no visible effect.
FAULTS: dict[str, type[EngineError] | str | None] = {
    "cut_after_events=0": StreamCut,
    "cut_after_events=1": StreamCut,
    "cut_after_events=3": StreamCut,
    "cut_in_event=2": StreamCut,
    "cut_in_event=5": StreamCut,
    "fail_after_events=3": ServerFailed,
    "status=429,retry_after=0": RateLimited,
    "status=500": ServerFailed,
    "status=503": ServerFailed,
    "slow_first_byte=0.05": None,
    "forget_all": "gone",
    "forget_silently": "forgot, shown",
    "forget_silently,echo=no": "forgot",
    "remember=0": "forgot, shown",
    "anonymous": None,
    "report_usage=none": None,
    # After honest counts, one without the context cannot be distinguished from a loss.
    "report_usage=constant": "forgot, shown",
    "report_usage=new": "forgot, shown",
    "report_usage=uncached": None,
    "report_usage=trimmed": None,
    "report_unstored": None,
    "hide_stored": None,
    "change_completed=text": None,
    "change_completed=arguments": None,
    "change_completed=missing": None,
    "omit_output_index": None,
    "stream_content_type=none": None,
    "stream_content_type=plain": None,
    "repeat_after_finish": None,
    "lone_surrogate": None,
    "reuse_response_id": None,
    "duplicate_events": None,
    "reorder_events,only=response.output_text.delta": None,
    "omit_call_id": None,
    "empty_call_id": None,
    "omit_response_id": None,
    "refuse_encrypted_reasoning": None,
    "refuse_previous_response_id=llama.cpp": "unsupported",
    "refuse_previous_response_id=zdr": "unsupported",
    "refuse_empty_input": None,
    "omit_call_name": None,
    "refuse_output_format": None,
}


STREAMED = re.compile(
    r"\w+_events?=|change_completed|omit_output_index|stream_content_type|repeat_"
)
"""Faults that affect only streams."""
CASES = [
    (fault, streaming)
    for fault in FAULTS
    for streaming in (True, False)
    if streaming or not STREAMED.match(fault)
]


@pytest.mark.parametrize(("fault", "streaming"), CASES)
async def test_fault_ends_in_a_correct_turn_or_a_typed_error(
    server: TestServer, fault: str, streaming: bool
) -> None:
    """Nothing of the Turn is lost, and the conversation continues afterwards."""
    expected = FAULTS[fault]
    async with open_engine(server) as engine:
        turn = await send_lines(engine, f"Remember this: {LONG}", "Thanks")
        server.faults.set(fault, times=1)
        requested = turn.append(user("What did I say first?"))
        if isinstance(expected, type):
            with pytest.raises(expected) as exc_info:
                await collect_events(engine, requested, streaming=streaming)
            assert exc_info.value.turn is not None
            assert exc_info.value.turn.blocks[: len(requested)] == requested.blocks
            assert exc_info.value.retryable
            requested = exc_info.value.turn
            finished = await engine.run(requested)
        else:
            finished, events = await collect_events(engine, requested, streaming=streaming)
            _check_events(events, expected, streaming=streaming)
        server.faults.clear()
        if expected != "forgot, shown" or not streaming:
            assert LONG[:40] in last_text(finished)
            check_law(server, finished)
        later = await engine.run(finished.append(user("How many messages are there?")))
        check_law(server, later)


def _check_events(events: list[Event], expected: object, *, streaming: bool) -> None:
    healed = list_reasons(events)
    forgot = [event for event in events if isinstance(event, ServerForgot)]
    if expected == "forgot, shown":
        assert (healed, len(forgot)) == (([], 1) if streaming else (["forgot"], 0))
    else:
        assert healed == ([expected] if expected else [])
        assert forgot == []


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("chat", "repeat_after_finish"),
        ("chat", "stream_content_type=none"),
        ("anthropic", "duplicate_events,only=content_block_start"),
        ("anthropic", "stream_content_type=plain"),
    ],
)
async def test_a_faulty_stream_of_another_api_gives_its_answer_once(
    server: TestServer, kind: str, fault: str
) -> None:
    """Text and calls are the same as from a server without the fault."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "weather", "parameters": city}
    address = f"chat:{server.base_url}#practice" if kind == "chat" else "anthropic:practice"
    settings: dict[str, Any] = (
        {} if kind == "chat" else {"base_url": server.base_url, "api_key": "any"}
    )
    texts: list[list[Any]] = []
    async with connect(address, max_retries=0, **settings) as engine:
        for active in ("", fault):
            if active:
                server.faults.set(active)
            reported = await engine.run(Turn([user("Hello there")]))
            called = await engine.run(Turn([user("Please call weather.")]), tools=[tool])
            call = called.blocks[-1]
            assert isinstance(call, ToolCallBlock)
            texts.append([last_text(reported), call.name, call.arguments])
    assert texts[0] == texts[1]
    assert "city" in texts[0][2]


@pytest.mark.parametrize("message", ["openai", "vllm", "ogx", "smg", "xai", "code"])
async def test_every_shape_of_not_found_is_healed(server: TestServer, message: str) -> None:
    """Every known form of a "response not found" error is healed by one full send."""
    async with open_engine(server) as engine:
        turn = await send_lines(engine, "One")
        server.forget()
        server.faults.set(f"not_found={message}")
        turn, events = await collect_events(engine, turn.append(user("What did I say first?")))
    assert [type(event) for event in events].count(Healed) == 1
    assert "One" in last_text(turn)


@pytest.mark.parametrize(
    ("fault", "mode", "blocks", "reason"),
    [
        ("refuse_encrypted_reasoning", "stateless", (user("Two"),), "reasoning"),
        ("refuse_empty_input", "chained", (), "empty_input"),
    ],
)
async def test_rejected_content_is_replaced(
    server: TestServer, fault: str, mode: Any, blocks: tuple[Any, ...], reason: str
) -> None:
    """Rejected encrypted reasoning is left out, and a rejected empty delta becomes a full send."""
    async with open_engine(server, mode=mode) as engine:
        turn = await send_lines(engine, "Think about one.")
        server.faults.set(fault)
        turn, events = await collect_events(engine, turn.append(*blocks))
    assert list_reasons(events) == [reason]
    check_law(server, turn)


def test_every_documented_fault_is_tested() -> None:
    """Every fault that the server documents is tested here."""
    page = (
        (Path(__file__).parents[2] / "docs" / "practice.md").read_text().split("\n## Faults\n")[1]
    )
    documented = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) - {"not_found"}
    assert {fault.partition("=")[0].partition(",")[0] for fault in FAULTS} == documented


async def test_answer_is_complete_after_its_last_event(
    server: TestServer,
) -> None:
    """A connection that breaks after the last event does not invalidate the answer."""
    turn = Turn([user("What is 2+3?")])
    async with open_engine(server) as engine:
        server.faults.set("cut_after_events=100")
        assert "5" in last_text((await collect_events(engine, turn))[0])
        server.faults.set(f"cut_after_events={await count_stream_events(server)}")
        finished, _ = await collect_events(engine, turn)
    assert "5" in last_text(finished)
    assert len(get_state(finished).anchors) == 1


async def count_stream_events(server: TestServer) -> int:
    """Return the number of events that the server sends for that question."""
    async with AsyncClient(base_url=server.base_url) as client:
        requested = {"model": "practice", "input": "What is 2+3?", "stream": True}
        answer = await client.post("/responses", json=requested)
    return answer.text.count("event:")
