"""How long a server that forgot is not chained on, by the engine's own clock, on a real socket."""

import pytest

from engines.conftest import opened
from engines.test_healing import watch
from engines.test_responses import bodies, talk
from kedge.engines.trust import LONGEST_REST, REST, Trust
from kedge.events.run import Healed, ModeChanged
from kedge.testing import TestServer
from kedge.turns import Turn, user
from wire import seen, sent


def law(server: TestServer, turn: Turn) -> None:
    """The model saw exactly what the Turn says before its answer."""
    assert seen(server.requests[-1].context) == sent(turn)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def test_each_lapse_makes_the_rest_longer_and_memory_makes_it_short_again() -> None:
    """A minute, two, four, an hour at most; and a minute again after an answer with memory."""
    clock = Clock()
    trust = Trust(clock)
    assert trust.doubt == ""
    rests: list[float] = []
    for _ in range(9):
        trust.forgot()
        start = clock.now
        while trust.doubt:
            clock.now += REST / 2
        rests.append(clock.now - start)
    assert rests == [REST * 2**n for n in range(6)] + [LONGEST_REST] * 3
    trust.remembered()
    trust.forgot()
    clock.now += REST
    assert trust.doubt == ""


def test_a_server_that_says_it_cannot_chain_is_believed_for_good() -> None:
    """No time and no answer changes that."""
    clock = Clock()
    trust = Trust(clock)
    trust.refused()
    clock.now += 10 * LONGEST_REST
    trust.remembered()
    assert trust.doubt == "unsupported"


@pytest.mark.parametrize("streaming", [True, False])
async def test_one_lapse_costs_every_conversation_a_minute_and_no_more(
    server: TestServer, streaming: bool
) -> None:
    """While chaining rests everything is sent and nothing is stored; then it is tried again."""
    clock = Clock()
    async with opened(server, clock=clock) as engine:
        first, other = await talk(engine, "One"), await talk(engine, "Another")
        server.faults.set("forget_silently,echo=no", times=1)
        first, events = await watch(engine, first.append(user("Two")), streaming=streaming)
        assert [e.reason for e in events if isinstance(e, Healed)] == ["forgot"]
        other, events = await watch(engine, other.append(user("Again")), streaming=streaming)
        assert ModeChanged("stateless", "chained", "forgot") in events
        assert "previous_response_id" not in bodies(server)[-1]
        clock.now += REST
        first = await talk(engine, "Three", "Four", turn=first)
        assert "previous_response_id" in bodies(server)[-1]
        law(server, first)
        other, events = await watch(engine, other.append(user("At last")), streaming=streaming)
        assert not any(isinstance(event, ModeChanged | Healed) for event in events)
        assert "previous_response_id" in bodies(server)[-1]
        law(server, other)


async def test_a_server_that_never_remembers_is_asked_less_and_less(server: TestServer) -> None:
    """Every answer is right, and few requests are made in vain."""
    clock = Clock()
    server.faults.set("forget_silently,echo=no")
    async with opened(server, clock=clock) as engine:
        turn, healed = Turn(), 0
        for _ in range(24):
            turn, events = await watch(engine, turn.append(user("What did I say first?")))
            healed += sum(isinstance(event, Healed) for event in events)
            law(server, turn)
            clock.now += REST / 2
    assert healed == 4
