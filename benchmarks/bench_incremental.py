"""What `kedge.chain` and `kedge proxy` cost, against the same program without them.

The program replays a history of sixty turns with the openai client. `chain` is measured by the CPU of the
program's own process, the proxy by that of its process, against a bare starlette and httpx2 pass-through
of the same requests and responses. The server is in another process.

``KEDGE_BENCH_REQUESTS`` sets the number of requests over which memory is measured; 50,000 by default.
"""

import asyncio
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from openai import AsyncOpenAI

from benchmarks.servers import Process, run_kedge, run_server
from benchmarks.table import Row
from kedge.chaining import chain, chain_report

BASELINE = "the same client without chain"
TURNS = 60
ROUNDS = 40
STREAMS = 200
REQUESTS = int(os.environ.get("KEDGE_BENCH_REQUESTS", "50000"))


def run() -> list[Row]:
    """Measure CPU, concurrent streams and memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_kedge(str(Path(folder) / "bench.sqlite3")) as server,
    ):
        upstream = f"http://127.0.0.1:{server.port}/v1"
        rows = asyncio.run(_measure_chain(upstream))
        database = str(Path(folder) / "proxy.db")
        options = ("--upstream", upstream, "--port", "0", "--json", "--db")
        with (
            run_server("forward", upstream) as forward,
            run_server("proxy", *options, ":memory:") as proxy,
            run_server("proxy", *options, database) as stored,
        ):
            rows += asyncio.run(_measure_proxy(forward, proxy, stored))
    return [*rows, _measure_memory()]


def _make_client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="key", max_retries=0, timeout=600)


async def _replay(client: AsyncOpenAI, history: list[Any], text: str, **options: Any) -> list[Any]:
    """Send everything with a new message; return the output as input items."""
    messages: Any = [*history, {"role": "user", "content": text}]
    response = await client.responses.create(model="practice", input=messages, **options)
    return [item.model_dump(exclude_none=True) for item in response.output]


async def _build_history(client: AsyncOpenAI) -> list[Any]:
    history: list[Any] = []
    for number in range(TURNS):
        text = f"Question {number}: what would you say about the weather of day {number}?"
        output = await _replay(client, history, text)
        history += [{"role": "user", "content": text}, *output]
    return history


async def _measure_chain(upstream: str) -> list[Row]:
    async with _make_client(upstream) as plain, _make_client(upstream) as chained:
        chain(chained)
        history = await _build_history(chained)
        times: dict[AsyncOpenAI, list[float]] = {plain: [], chained: []}
        for number in range(ROUNDS):
            for client, durations in times.items():
                gc.collect()
                gc.disable()
                start = time.process_time_ns()
                await _replay(client, history, f"And number {number}?")
                durations.append((time.process_time_ns() - start) / 1e6)
                gc.enable()
        report = chain_report(chained)
        assert report.chained == report.requests - 1, report
        base, ours = median(times[plain]), median(times[chained])
    detail = f"{base:.2f} -> {ours:.2f} ms; sent {report.sent_bytes / report.full_bytes:.3f}"
    return [Row("chain: CPU of turn 60", ours / base, 1.1, detail=f"{detail} of the bytes")]


async def _measure_proxy(forward: Process, proxy: Process, stored: Process) -> list[Row]:
    costs: dict[int, float] = {}
    seconds = 0.0
    for process in (forward, proxy, stored):
        async with _make_client(f"http://127.0.0.1:{process.port}/v1") as client:
            history = await _build_history(client)
            await _replay(client, history, "Once more")
            times: list[float] = []
            for number in range(ROUNDS):
                start = process.cpu_seconds()
                await _replay(client, history, f"And number {number}?")
                times.append(process.cpu_seconds() - start)
            costs[process.pid] = median(times) * 1000
            if process is stored:
                seconds = await _measure_streams(client, history)
    base = costs[forward.pid]
    return [
        Row(
            f"proxy, {name}: CPU of turn 60",
            costs[each.pid] / base,
            1.5,
            detail=detail,
            baseline="starlette + httpx2 pass-through",
        )
        for each, name in ((proxy, "index in memory"), (stored, "index in SQLite"))
        if (detail := f"{base:.2f} -> {costs[each.pid]:.2f} ms")
    ] + [Row(f"{STREAMS} streams at the same time", seconds, unit="s")]


async def _measure_streams(client: AsyncOpenAI, history: list[Any]) -> float:
    """Return the seconds until many streams, each on an anchor, are complete."""

    async def stream(number: int) -> None:
        messages: Any = [*history, {"role": "user", "content": f"Count to {20 + number % 5}"}]
        async with client.responses.stream(model="practice", input=messages) as events:
            response = await events.get_final_response()
        assert response.output_text.endswith(str(20 + number % 5))
        assert response.previous_response_id

    start = time.perf_counter()
    await asyncio.gather(*(stream(number) for number in range(STREAMS)))
    return time.perf_counter() - start


def _measure_memory() -> Row:
    """Return the growth of this process over many requests of many conversations."""
    answers = 0

    def answer(request: httpx2.Request) -> httpx2.Response:
        nonlocal answers
        answers += 1
        text = [{"type": "output_text", "text": f"Answer {answers}", "annotations": []}]
        output = {"id": f"msg_{answers}", "type": "message", "role": "assistant", "content": text}
        previous = json.loads(request.content).get("previous_response_id")
        body = {"id": f"resp_{answers}", "object": "response", "status": "completed", "model": "m"}
        return httpx2.Response(
            200, json={**body, "output": [output], "previous_response_id": previous}
        )

    def send(http: httpx2.Client, count: int) -> None:
        history: list[Any] = []
        for number in range(count):
            history = history if number % 10 else []
            history.append({"role": "user", "content": f"Message {answers}"})
            server_request = {"model": "m", "input": history}
            history += http.post("/responses", json=server_request).json()["output"]

    from kedge.chaining import MemoryIndex

    with httpx2.Client(
        transport=httpx2.MockTransport(answer), base_url="https://api.openai.com/v1"
    ) as http:
        index = MemoryIndex(max_entries=REQUESTS // 10)
        chain(http, index=index)
        send(http, REQUESTS // 5)
        before = _resident_megabytes()
        send(http, REQUESTS - REQUESTS // 5)
        after = _resident_megabytes()
        assert chain_report(http).requests == answers
    detail = f"{before:.0f} -> {after:.0f} MB over {REQUESTS - REQUESTS // 5} requests"
    return Row("memory", after / before, 1.05, detail=detail, baseline="when the index is full")


def _resident_megabytes() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6
