"""Test cancellation, errors, retries and faults: no Turn is lost, and no partial answer is accepted."""

import asyncio

import anyio
import pytest

from engines.contract.conftest import STATELESS, open_engine
from engines.runs import read_until
from for_each import for_each
from kedge.engines import Engine
from kedge.errors import (
    EngineError,
    KedgeError,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
)
from kedge.events import TextDelta
from kedge.testing import TestServer, serve
from kedge.turns import Turn, user
from server.gated_model import GatedModel
from server.waiting import wait_until_async

SUM = Turn([user("What is 2+3?")])


async def test_stream_closed_early_leaves_the_turn_usable(
    engine: Engine, server: TestServer
) -> None:
    """After closing a stream early the Turn can be sent again, and the server stops generating."""
    turn = Turn([user("Count to 1000, slowly")])
    async with engine.stream(turn) as stream:
        await read_until(stream)
    with pytest.raises(KedgeError, match="has not ended"):
        _ = stream.turn
    assert len(await engine.run(SUM)) == 2
    await wait_until_async(lambda: not server.running)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cancelled_run_leaves_the_engine_usable(name: str, streaming: bool) -> None:
    """The connection of a cancelled run is closed, and the next request gets its own answer."""
    model = GatedModel()
    with serve(model=model) as server:
        async with open_engine(server, name) as engine:
            task = asyncio.create_task(engine.run(Turn([user("wait")]), streaming=streaming))
            await wait_until_async(lambda: model.started)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            turn = await engine.run(Turn([user("Hi")]), streaming=streaming)
    assert "answer to Hi" in str(turn.blocks[-1])


async def reject(engine: Engine, *, streaming: bool) -> RequestRefused:
    """Return the error of a request with an invalid parameter."""
    with pytest.raises(RequestRefused) as exc_info:
        await engine.run(SUM, max_output_tokens=-5, streaming=streaming)
    return exc_info.value


@pytest.mark.parametrize("streaming", [False, True])
async def test_rejected_request_raises_typed_error(
    engine: Engine, name: str, streaming: bool
) -> None:
    """The error has the status and the message of the server, and names the provider and the request."""
    error = await reject(engine, streaming=streaming)
    assert (error.status, error.provider) == (400, name.partition(",")[0])
    assert "max_" in error.message
    assert error.request_id
    if name.startswith("responses"):
        assert error.param == "max_output_tokens"


@pytest.mark.parametrize("streaming", [False, True])
async def test_rejected_request_has_its_turn_and_plan(engine: Engine, streaming: bool) -> None:
    """The Turn is unchanged; the same request would be rejected again."""
    error = await reject(engine, streaming=streaming)
    assert error.turn == SUM
    assert error.plan is not None
    assert not error.retryable


@for_each(
    ("fault", "kinds"),
    [
        *((f"cut_after_events={n}", (StreamCut, Unreachable)) for n in (0, 1, 3, 5)),
        *((f"cut_in_event={n}", (StreamCut, Unreachable)) for n in (1, 4)),
        ("fail_after_events=4", (ServerFailed,)),
    ],
)
async def test_a_stream_that_is_cut_or_fails_raises_an_error(
    engine: Engine, server: TestServer, name: str, fault: str, kinds: tuple[type[EngineError], ...]
) -> None:
    """The retryable error has the partial blocks, and the Turn can be sent again."""
    server.faults.set(fault, times=1)
    turn = Turn([user("Write 40 words")])
    with pytest.raises(kinds) as exc_info:
        await engine.run(turn, streaming=True)
    error = exc_info.value
    # A WebSocket stream begins with an event.
    assert not isinstance(error, Unreachable) or "socket" in name
    assert error.retryable
    assert error.turn == turn
    assert error.plan is not None
    assert all(block.metadata.get("kedge.partial") for block in error.partial)
    assert len(await engine.run(turn, streaming=True)) == 2


@pytest.mark.parametrize("fault", ["duplicate_events", "reorder_events"])
async def test_duplicate_and_unordered_events_are_tolerated(
    engine: Engine, server: TestServer, name: str, fault: str
) -> None:
    """Numbered events are deduplicated and sorted; otherwise the result is a Turn or an error."""
    server.faults.set(fault, times=1)
    turn = SUM
    try:
        turn = await engine.run(SUM, streaming=True)
    except EngineError as error:
        turn = error.turn or turn
    if name not in STATELESS and fault == "duplicate_events":
        assert str(turn.blocks[-1]) == str((await engine.run(SUM)).blocks[-1])
    assert len(await engine.run(turn.append(user("Go on")))) == len(turn) + 2


async def test_response_without_an_id_is_accepted(engine: Engine, server: TestServer) -> None:
    """An answer without a response id is part of the Turn, and is not used as an anchor."""
    server.faults.set("omit_response_id", times=1)
    turn = await engine.run(SUM, streaming=True)
    assert turn.blocks[-1].response_id == ""
    finished = await engine.run(turn.append(user("What did I say first?")))
    assert "What is 2+3?" in str(finished.blocks[-1])


async def test_slow_reader_does_not_block_others(engine: Engine) -> None:
    """Of twenty concurrent streams, one stops reading until all the others have ended."""
    others_done = anyio.Event()
    left = [19]
    lengths: list[int] = []

    async def read(number: int) -> None:
        async with engine.stream(Turn([user("Write 60 words")])) as stream:
            async for event in stream:
                if number == 0 and isinstance(event, TextDelta):
                    await others_done.wait()
            lengths.append(len(stream.text.split()))
        left[0] -= number != 0
        if not left[0]:
            others_done.set()

    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(read, number)
    assert lengths == [lengths[0]] * 20
