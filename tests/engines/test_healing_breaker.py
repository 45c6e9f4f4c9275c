"""How long a server that forgot is not chained on, by the engine's own clock, on a real socket."""

import pytest

from engines.conftest import open_engine
from engines.test_healing import run_with_events
from engines.test_responses import request_bodies, send_lines
from kedge.engines.healing import BASE_COOLDOWN, MAX_COOLDOWN, ChainBreaker
from kedge.events.run import Healed, ModeChanged
from kedge.testing import TestServer
from kedge.turns import Turn, user
from normalization import expected_context, normalize_items


def check_law(server: TestServer, turn: Turn) -> None:
    """The model saw exactly what the Turn says before its answer."""
    assert normalize_items(server.requests[-1].context) == expected_context(turn)


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def test_each_lapse_makes_the_rest_longer_and_memory_makes_it_short_again() -> None:
    """A minute, two, four, an hour at most; and a minute again after an answer with memory."""
    clock = FakeClock()
    trust = ChainBreaker(clock)
    assert trust.open_reason == ""
    rests: list[float] = []
    for _ in range(9):
        trust.record_loss()
        start = clock.now
        while trust.open_reason:
            clock.now += BASE_COOLDOWN / 2
        rests.append(clock.now - start)
    assert rests == [BASE_COOLDOWN * 2**n for n in range(6)] + [MAX_COOLDOWN] * 3
    trust.record_success()
    trust.record_loss()
    clock.now += BASE_COOLDOWN
    assert trust.open_reason == ""


def test_a_server_that_says_it_cannot_chain_is_believed_for_good() -> None:
    """No time and no answer changes that."""
    clock = FakeClock()
    trust = ChainBreaker(clock)
    trust.record_unsupported()
    clock.now += 10 * MAX_COOLDOWN
    trust.record_success()
    assert trust.open_reason == "unsupported"


@pytest.mark.parametrize("streaming", [True, False])
async def test_one_lapse_costs_every_conversation_a_minute_and_no_more(
    server: TestServer, streaming: bool
) -> None:
    """While chaining rests everything is sent and nothing is stored; then it is tried again."""
    clock = FakeClock()
    async with open_engine(server, clock=clock) as engine:
        first, other = await send_lines(engine, "One"), await send_lines(engine, "Another")
        server.faults.set("forget_silently,echo=no", times=1)
        first, events = await run_with_events(
            engine, first.append(user("Two")), streaming=streaming
        )
        assert [e.reason for e in events if isinstance(e, Healed)] == ["forgot"]
        other, events = await run_with_events(
            engine, other.append(user("Again")), streaming=streaming
        )
        assert ModeChanged("stateless", "chained", "forgot") in events
        assert "previous_response_id" not in request_bodies(server)[-1]
        clock.now += BASE_COOLDOWN
        first = await send_lines(engine, "Three", "Four", turn=first)
        assert "previous_response_id" in request_bodies(server)[-1]
        check_law(server, first)
        other, events = await run_with_events(
            engine, other.append(user("At last")), streaming=streaming
        )
        assert not any(isinstance(event, ModeChanged | Healed) for event in events)
        assert "previous_response_id" in request_bodies(server)[-1]
        check_law(server, other)


async def test_a_server_that_never_remembers_is_asked_less_and_less(server: TestServer) -> None:
    """Every answer is right, and few requests are made in vain."""
    clock = FakeClock()
    server.faults.set("forget_silently,echo=no")
    async with open_engine(server, clock=clock) as engine:
        turn, healed = Turn(), 0
        for _ in range(24):
            turn, events = await run_with_events(engine, turn.append(user("What did I say first?")))
            healed += sum(isinstance(event, Healed) for event in events)
            check_law(server, turn)
            clock.now += BASE_COOLDOWN / 2
    assert healed == 4
