"""Tests of the rate limiter: no minute has more requests or tokens than allowed."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge import Turn, connect, user, with_middleware
from kedge.batch import BatchJob, BatchLine, RateLimiter
from kedge.batch.run import BatchContext, run_conversation
from kedge.errors import InvalidSetting, RateLimited
from kedge.store import open_store
from kedge.testing import TestServer


class FakeClock:
    """A clock that advances when its ``sleep`` is called."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


def make_limiter(**limits: int) -> tuple[FakeClock, RateLimiter]:
    """Return a clock and a limiter that uses it."""
    clock = FakeClock()
    return clock, RateLimiter(clock=clock, sleep=clock.sleep, **limits)


async def send_requests(
    pace: RateLimiter, clock: FakeClock, tokens: list[int], seconds: float = 0.0
) -> list[float]:
    """Send requests with these token counts, one after the other; return the time of each."""
    times: list[float] = []
    for number in tokens:
        async with pace.request() as ticket:
            times.append(clock.now)
            clock.now += seconds
            ticket.tokens = number
    return times


@given(st.integers(1, 20), st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_no_minute_has_more_requests_than_allowed(limit: int, gaps: list[float]) -> None:
    """The limit applies for any gaps between requests."""

    async def run() -> list[float]:
        clock, pace = make_limiter(requests=limit)
        times: list[float] = []
        for gap in gaps:
            clock.now += gap
            times += await send_requests(pace, clock, [1])
        return times

    times = anyio.run(run)
    for start in times:
        assert sum(start <= each < start + 59.999 for each in times) <= limit


async def test_tokens_per_minute_are_limited() -> None:
    """Each minute, with the expected tokens of pending requests, is within the limit; a larger one is sent alone."""
    clock, pace = make_limiter(tokens=1000)
    times = await send_requests(pace, clock, [400] * 6)
    assert [time - 1000 for time in times] == pytest.approx([0, 0, 60, 60, 120, 120])
    clock, pace = make_limiter(tokens=1000)
    await send_requests(pace, clock, [400])
    clock.now += 60
    async with pace.request(), pace.request():
        before = clock.now
        await send_requests(pace, clock, [1])
        assert clock.now - before >= 60
    clock, pace = make_limiter(tokens=1100)
    await send_requests(pace, clock, [400])
    async with pace.request():
        pass  # it fails, so it has no tokens
    times = await send_requests(pace, clock, [400, 400])
    assert [time - 1000 for time in times] == pytest.approx([0, 60])
    clock, pace = make_limiter(tokens=10)
    times = await send_requests(pace, clock, [500, 500])
    assert [time - 1000 for time in times] == pytest.approx([0, 60])


async def test_retry_after_delays_all_requests(kedge_server: TestServer) -> None:
    """Every attempt counts toward the limit, and a 429 response delays the next one."""
    clock, pace = make_limiter(requests=2)
    engine = connect(f"responses:{kedge_server.base_url}#practice", max_retries=0)
    paced_engine = with_middleware(engine, pace)
    kedge_server.faults.set("status=429,retry_after=7", times=1)
    with pytest.raises(RateLimited):
        await paced_engine.run(Turn([user("Hello")]))
    await paced_engine.run(Turn([user("Hello")]))
    assert clock.now >= 1007
    before = clock.now
    await paced_engine.run(Turn([user("Hello")]))
    assert clock.now >= before + 50
    await engine.aclose()


async def test_every_request_of_a_line_counts(kedge_server: TestServer) -> None:
    """The request after a failed one, and that after a tool call, wait for permits of their own."""

    def look_up() -> str:
        return "found"

    clock, pace = make_limiter(requests=1)
    job = BatchJob("b", "sqlite://:memory:", f"responses:{kedge_server.base_url}#practice")
    context = BatchContext(job, await open_store(job.store_url), pace)
    context.tools = [look_up]
    kedge_server.faults.set(
        "status=429,retry_after=0", times=3
    )  # the engine itself sends three times
    result = await run_conversation(context, BatchLine("a", ("Call look_up with {}",)))
    await context.aclose()
    assert (result.status, len(kedge_server.requests)) == ("completed", 5)
    assert clock.now >= 1120


@for_each(("limit", "share"), [(0, 0), (2, 1), (9, 3)])
async def test_processes_share_the_limits(limit: int, share: int) -> None:
    """Each of three processes has a third of a limit, or at least one request, because 0 is no limit."""
    job = BatchJob("b", "sqlite://:memory:", "practice", requests_per_minute=limit)
    context = await BatchContext.open(job, processes=3)
    assert context.rate_limiter.requests == share
    await context.aclose()


async def test_pause_delays_all_requests() -> None:
    """No request is sent until all pauses are over; without limits none waits, and a negative limit is rejected."""
    clock, pace = make_limiter()
    pace.pause(30)
    pace.pause(1)
    assert await send_requests(pace, clock, [1]) == [pytest.approx(1030)]
    clock, pace = make_limiter()
    assert await send_requests(pace, clock, [10**9] * 3) == [1000.0] * 3
    with pytest.raises(InvalidSetting):
        RateLimiter(requests=-1)
