"""Pace: no minute ever holds more than was allowed."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge import Turn, connect, user, with_middleware
from kedge.batch import RateLimiter
from kedge.errors import InvalidSetting
from kedge.middleware import retry
from kedge.testing import TestServer


class FakeClock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


async def send_requests(
    pace: RateLimiter, clock: FakeClock, tokens: list[int], seconds: float = 0.0
) -> list[float]:
    """Send requests that take so many tokens, one after the other; when each went out."""
    times: list[float] = []
    for number in tokens:
        async with pace.request() as ticket:
            times.append(clock.now)
            clock.now += seconds
            ticket.tokens = number
    return times


@given(st.integers(1, 20), st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_no_minute_holds_more_requests_than_allowed(limit: int, gaps: list[float]) -> None:
    """Whatever the gaps between those who ask."""

    async def run() -> list[float]:
        clock = FakeClock()
        pace = RateLimiter(requests=limit, clock=clock, sleep=clock.sleep)
        times: list[float] = []
        for gap in gaps:
            clock.now += gap
            times += await send_requests(pace, clock, [1])
        return times

    times = anyio.run(run)
    for start in times:
        assert sum(start <= each < start + 59.999 for each in times) <= limit


async def test_tokens_are_held_back_too() -> None:
    """The first request tells how much one takes; the sum of a minute stays within the limit."""
    clock = FakeClock()
    pace = RateLimiter(tokens=1000, clock=clock, sleep=clock.sleep)
    times = await send_requests(pace, clock, [400] * 6)
    assert [time - 1000 for time in times] == pytest.approx([0, 0, 60, 60, 120, 120])


async def test_requests_on_their_way_count_as_much_as_usual() -> None:
    """Nobody slips through while others have not come back."""
    clock = FakeClock()
    pace = RateLimiter(tokens=1000, clock=clock, sleep=clock.sleep)
    await send_requests(pace, clock, [400])
    clock.now += 60
    async with pace.request(), pace.request():
        before = clock.now
        await send_requests(pace, clock, [1])
        assert clock.now - before >= 60


async def test_a_server_that_asks_for_a_pause_gets_it_from_everyone(
    kedge_server: TestServer,
) -> None:
    """Every attempt has its place in the minute, and a refusal holds up the next one."""
    clock = FakeClock()
    pace = RateLimiter(requests=2, clock=clock, sleep=clock.sleep)
    engine = connect(f"responses:{kedge_server.base_url}#practice", max_retries=0)
    paced_engine = with_middleware(engine, retry(3, sleep=clock.sleep), pace)
    kedge_server.faults.set("status=429,retry_after=7", times=1)
    await paced_engine.run(Turn([user("Hello")]))
    assert clock.now >= 1007
    before = clock.now
    await paced_engine.run(Turn([user("Hello")]))
    assert clock.now >= before + 50
    await engine.aclose()


async def test_a_pause_holds_up_everyone() -> None:
    """As long as the server asked for."""
    clock = FakeClock()
    pace = RateLimiter(clock=clock, sleep=clock.sleep)
    pace.pause(30)
    assert await send_requests(pace, clock, [1]) == [pytest.approx(1030)]


async def test_request_above_limit_is_sent_alone() -> None:
    """It would never fit, and waiting for ever helps nobody."""
    clock = FakeClock()
    pace = RateLimiter(tokens=10, clock=clock, sleep=clock.sleep)
    times = await send_requests(pace, clock, [500, 500])
    assert [time - 1000 for time in times] == pytest.approx([0, 60])


async def test_without_limits_nothing_waits() -> None:
    """Nor does a limit below nothing make sense."""
    clock = FakeClock()
    pace = RateLimiter(clock=clock, sleep=clock.sleep)
    assert await send_requests(pace, clock, [10**9] * 3) == [1000.0] * 3
    with pytest.raises(InvalidSetting):
        RateLimiter(requests=-1)
