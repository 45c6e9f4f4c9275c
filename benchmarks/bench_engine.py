"""What the engine costs a client, against the bare openai client on the same conversation.

Both talk to one local server in another process. The baseline is what people write by hand: the async
client's ``responses.create`` with a ``previous_response_id`` that they keep themselves, and the same
tool, called by hand. The engine does the same conversation with its proof: it keeps the whole Turn, plans
every request, and records every response. So do `Chat`, which gets and returns the state bytes of the conversation in
every call, and `Conversation`, which saves every step in a durable SQLite store. Both clients are as they come: ours
over aiohttp, which is part of what is measured.

CPU is that of this process alone. Garbage is collected before each conversation and not during one: to
collect before every turn empties the processor's caches, and then mostly their filling is measured.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.servers import run_kedge
from benchmarks.table import Row

Rounds = list[list[float]]
"""CPU milliseconds of each turn of each round."""

BASELINE = "the openai client with hand-kept ids"
TURNS = 60
ROUNDS = 9
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_question(number: int) -> str:
    """What is asked in a turn: each third one needs a tool."""
    if number % 3 == 2:
        return f"Please call add with a={number} and b=1"
    return f"Question {number}: what would you say about the weather of day {number} of the year?"


def run() -> list[Row]:
    """Measure turns, a full resend, and the import."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_kedge(str(Path(folder) / "bench.sqlite3")) as server,
    ):
        base_url = f"http://127.0.0.1:{server.port}/v1"
        direct, ours, full, chat, durable = asyncio.run(_run_conversations(base_url, folder))
    turns, resends = _compare(ours, direct, mean), median(_divide(full, map(mean, direct)))
    return [
        Row("turn, proof included", turns, 0.4, detail=_format_ms(map(mean, ours))),
        _measure_growth("turn 60", ours, 1.05),
        Row("full resend at turn 60", resends, 0.6, detail=_format_ms(full)),
        *_compare_facade("Chat, state in and out", chat, direct),
        *_compare_facade("Conversation, every step durable", durable, direct),
        Row("bare client, a turn", median(map(mean, direct)), unit="ms"),
        _measure_sync(),
        _measure_import(),
    ]


def _compare_facade(name: str, ours: Rounds, direct: Rounds) -> list[Row]:
    """Compare a turn near the end with the bare client's, and with an early one."""
    detail = f"{_format_ms(map(_late, ours))} against {_format_ms(map(_late, direct))}"
    late = Row(f"{name}, turn 60", _compare(ours, direct, _late), 0.7, detail=detail)
    return [late, _measure_growth(f"{name}, turn 60", ours, 1.2)]


def _compare(ours: Rounds, direct: Rounds, value: Callable[[list[float]], float]) -> float:
    """The typical ratio of two rounds next to each other: the speed of a busy machine varies between rounds."""
    return median(_divide(map(value, ours), map(value, direct)))


def _divide(values: Iterable[float], others: Iterable[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _measure_growth(name: str, rounds: Rounds, limit: float) -> Row:
    early = [_typical_near(times, 10) for times in rounds]
    growth = median(_divide(map(_late, rounds), early))
    detail = f"{_format_ms(early)} -> {_format_ms(map(_late, rounds))}"
    return Row(name, growth, limit, "x", detail, "turn 10")


def _late(times: list[float]) -> float:
    return _typical_near(times, TURNS - 1)


def _typical_near(times: list[float], index: int) -> float:
    """The typical cost of the plain (one request) turns around a place."""
    near = range(max(0, index - 8), min(TURNS, index + 9))
    return median(times[n] for n in near if n % 3 != 2)


def _format_ms(values: Iterable[float]) -> str:
    return f"{median(values):.2f} ms"


async def _run_conversations(
    base_url: str, folder: str
) -> tuple[Rounds, Rounds, list[float], Rounds, Rounds]:
    """CPU milliseconds of every turn, of the bare client and of ours, in alternating rounds."""
    from openai import AsyncOpenAI

    from kedge.conversation import Chat
    from kedge.middleware import tools, with_middleware
    from kedge.providers import connect
    from kedge.store import open_store

    engine = connect(f"responses:{base_url}#practice")
    stack = with_middleware(engine, tools(add))
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    direct: list[list[float]] = []
    ours: list[list[float]] = []
    chat: list[list[float]] = []
    durable: list[list[float]] = []
    resends: list[float] = []
    async with engine, client, open_store(f"sqlite:///{folder}/client.sqlite3") as store:
        for _ in range(ROUNDS + 1):
            direct.append(await _run_bare(client))
            times, resend = await _run_kedge(stack, engine)
            ours.append(times)
            resends.append(resend)
            chat.append(await _run_chat(Chat(engine, tools=[add])))
            durable.append(await _run_durable(store, engine))
    # The first round warms everything up.
    return direct[1:], ours[1:], resends[1:], chat[1:], durable[1:]


async def _run_bare(client: Any) -> list[float]:
    previous: str | None = None

    async def ask(items: Any) -> Any:
        return await client.responses.create(
            model="practice", input=items, previous_response_id=previous, tools=[TOOL]
        )

    async def turn(number: int) -> None:
        nonlocal previous
        response = await ask([{"role": "user", "content": make_question(number)}])
        previous = response.id
        while calls := [item for item in response.output if item.type == "function_call"]:
            response = await ask([await output(call) for call in calls])
            previous = response.id

    async def output(call: Any) -> Any:
        result = str(await add(**json.loads(call.arguments)))
        return {"type": "function_call_output", "call_id": call.call_id, "output": result}

    with _gc_disabled():
        return [await _measure_cpu(turn(number)) for number in range(TURNS)]


async def _run_kedge(stack: Any, engine: Any) -> tuple[list[float], float]:
    from kedge.turns import Turn, user

    turn = Turn()

    async def take(number: int) -> None:
        nonlocal turn
        turn = await stack.run(turn.append(user(make_question(number))))

    with _gc_disabled():
        times = [await _measure_cpu(take(number)) for number in range(TURNS)]
        last = turn.append(user(make_question(0)))
        resend = await _measure_cpu(engine.run(last, mode="stateless", store=True, include=[]))
    return times, resend


async def _run_chat(chat: Any) -> list[float]:
    state: bytes | None = None

    async def take(number: int) -> None:
        nonlocal state
        state = (await chat.chat_with_state(state, make_question(number))).state

    with _gc_disabled():
        return [await _measure_cpu(take(number)) for number in range(TURNS)]


async def _run_durable(store: Any, engine: Any) -> list[float]:
    from kedge.conversation import Conversation

    conversation = await Conversation.create(engine, store=store, tools=[add])
    with _gc_disabled():
        return [await _measure_cpu(conversation.send(make_question(n))) for n in range(TURNS)]


@contextmanager
def _gc_disabled() -> Generator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _measure_cpu(work: Awaitable[object]) -> float:
    """CPU milliseconds of this process for one piece of work."""
    start = time.process_time_ns()
    await work
    return (time.process_time_ns() - start) / 1e6


def _measure_sync() -> Row:
    """CPU of a turn by ``engine.sync.run`` against ``await engine.run``, in alternating rounds."""
    from kedge._internal.event_loops import run_sync
    from kedge.providers import connect
    from kedge.turns import Turn, user

    with (
        tempfile.TemporaryDirectory() as folder,
        run_kedge(str(Path(folder) / "bench.sqlite3")) as server,
    ):
        engine = connect(f"responses:http://127.0.0.1:{server.port}/v1#practice")

        async def run_async() -> float:
            turn, start = Turn(), time.process_time_ns()
            for number in range(TURNS):
                turn = await engine.run(turn.append(user(make_question(number))))
            return (time.process_time_ns() - start) / 1e6 / TURNS

        def run_blocking() -> float:
            turn, start = Turn(), time.process_time_ns()
            for number in range(TURNS):
                turn = engine.sync.run(turn.append(user(make_question(number))))
            return (time.process_time_ns() - start) / 1e6 / TURNS

        times = [(run_sync(run_async()), run_blocking()) for _ in range(ROUNDS + 1)][1:]
        engine.sync.close()
    awaited, blocking = zip(*times, strict=True)
    detail = f"{_format_ms(blocking)} against {_format_ms(awaited)}"
    ratio = median(_divide(blocking, awaited))
    return Row("turn of sync code", ratio, 1.2, "x", detail, "the same turn with await")


def _measure_import() -> Row:
    """CPU of importing Kedge and building a Turn, against openai and its responses resource."""
    ours = "import kedge; kedge.Turn([kedge.user('hi')])"
    theirs = "import openai; openai.OpenAI(api_key='x').responses"
    baseline, kedge, openai = (_measure_child(code) for code in ("pass", ours, theirs))
    detail = f"{(kedge - baseline) * 1e3:.0f} ms against {(openai - baseline) * 1e3:.0f} ms"
    return Row(
        "import kedge and a Turn",
        (kedge - baseline) / (openai - baseline),
        0.1,
        "x",
        detail,
        "import openai",
    )


def _measure_child(code: str) -> float:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    best = float("inf")
    for _ in range(6):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        after = os.times()
        used = after.children_user + after.children_system
        best = min(best, used - before.children_user - before.children_system)
    return best
