"""The server's processor time and memory, against bare starlette + uvicorn in the same run.

Each server is a process of its own, and its own processor time is read before and after a short round
of requests. Rounds alternate between the servers, so that a slow moment of the machine slows both, and
the median of the ratios of neighboring rounds counts. The bare echo reads and writes JSON of the same
sizes; the bare generator streams the same bytes, event by event. Ours is the command ``kedge serve``
with a database in a file; neither side writes an access log.

``KEDGE_BENCH_REQUESTS`` sets how many requests the memory figure takes (5,000 by default, which
shows a leak; 100,000 takes some minutes and shows that nothing else grows either). The cache of contexts
fills its 32 MB in the first 11,000 of them, and the cache of token counts in the first 8,000.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import Client, decode_chunked, encode_post, find_response_id
from benchmarks.servers import Process, run_bare, run_kedge
from benchmarks.table import Row

BASELINE = "starlette + uvicorn, JSON echo"
ROUNDS = 100
REQUESTS = 25
STREAMS = 3
CHAINS = 10
PARALLEL = 8
WORDS = 200
MEMORY_REQUESTS = int(os.environ.get("KEDGE_BENCH_REQUESTS", "5000"))
QUESTION = "Tell me about the harbour of {place}, and about the ships that lie there this week."


def make_body(question: str, previous: str | None = None, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "practice", "input": question, **more}
    return body if previous is None else {**body, "previous_response_id": previous}


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        files = (str(Path(folder) / f"{number}.sqlite3") for number in range(9))
        with run_kedge(next(files)) as ours, run_bare("echo") as theirs:
            rows = [
                *measure_chained(ours, theirs, 5, 2.0),
                *measure_chained(ours, theirs, 200, 2.0),
                *measure_chained(ours, theirs, 5, 2.0, PARALLEL),
                *measure_chained(ours, theirs, 200, 2.6, PARALLEL),
            ]
        rows += measure_cold(next(files))
        with run_kedge(next(files)) as ours, run_bare("stream") as theirs:
            rows += measure_streamed(ours, theirs)
        with run_kedge(next(files)) as ours:
            rows += measure_memory(ours)
    return rows


# Chained requests.


def measure_chained(
    ours: Process, echo: Process, depth: int, limit: float, parallel: int = 1
) -> list[Row]:
    """Continue chains of a depth, again and again from their ends, over one connection or several at once."""
    with ExitStack() as stack:
        clients, others = (
            [stack.enter_context(Client(process.port)) for _ in range(parallel)]
            for process in (ours, echo)
        )
        client, other = clients[0], others[0]
        ends = [create_chain(client, depth, number) for number in range(CHAINS)]
        bodies = [make_body(QUESTION.format(place=f"Port {i}"), end) for i, end in enumerate(ends)]
        answer = client.send(encode_post("/v1/responses", bodies[0]))
        padding = len(answer) - len(other.send(encode_post("/?padding=0", bodies[0])))
        theirs = [encode_post(f"/?padding={max(0, padding)}", each) for each in bodies]
        mine = [encode_post("/v1/responses", each) for each in bodies]
        assert len(other.send(theirs[0])) == len(answer)
        ratio, *spent = compare_alternating(
            (ours, lambda: send_requests(clients, mine, REQUESTS)),
            (echo, lambda: send_requests(others, theirs, REQUESTS)),
        )
    microseconds = [seconds / REQUESTS * 1e6 for seconds in spent]
    detail = f"{microseconds[0]:.0f} µs a request, bare echo {microseconds[1]:.0f} µs"
    label = (
        f"chained request at depth {depth}{f', {parallel} at once' if parallel > 1 else ''}, CPU"
    )
    return [Row(label, ratio, limit, detail=detail)]


def create_chain(client: Client, depth: int, number: int) -> str:
    end: str | None = None
    for step in range(depth):
        question = QUESTION.format(place=f"Port {number} (day {step})")
        end = find_response_id(client.send(encode_post("/v1/responses", make_body(question, end))))
    assert end is not None
    return end


def send_requests(clients: Sequence[Client], requests: Sequence[bytes], number: int) -> None:
    for first in range(0, number, len(clients)):
        at_once = clients[: number - first]
        for i, client in enumerate(at_once, start=first):
            client.start(requests[i % len(requests)])
        for client in at_once:
            client.receive()


def compare_alternating(
    ours: tuple[Process, Callable[[], None]], theirs: tuple[Process, Callable[[], None]]
) -> tuple[float, float, float]:
    """The ratio of the CPU seconds of two parties in rounds that alternate, and those of each: medians."""
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        mine, other = measure_round(*ours), measure_round(*theirs)
        rounds.append((mine, other))
    del rounds[0]
    ratio = median(mine / other for mine, other in rounds)
    return ratio, median(mine for mine, _ in rounds), median(other for _, other in rounds)


def measure_round(process: Process, work: Callable[[], None]) -> float:
    before = process.cpu_seconds()
    work()
    return process.cpu_seconds() - before


def measure_cold(database: str) -> list[Row]:
    """The first request of a chain of 200 after a restart, when all is read from the file."""
    with run_kedge(database) as ours, Client(ours.port) as client:
        ends = [create_chain(client, 200, number) for number in range(CHAINS)]
    with run_kedge(database) as ours, Client(ours.port) as client:
        client.send(encode_post("/v1/responses", make_body("Warm up.")))
        requests = [encode_post("/v1/responses", make_body("Hello again.", end)) for end in ends]
        before = ours.cpu_seconds()
        send_requests([client], requests, CHAINS)
        spent = (ours.cpu_seconds() - before) / CHAINS
    return [Row("first request at depth 200 after a restart", spent * 1e3, unit="ms")]


# Streams.


def measure_streamed(ours: Process, generator: Process) -> list[Row]:
    """Stream a long answer, and the very same bytes from a bare generator."""
    with Client(ours.port) as client, Client(generator.port) as other:
        body = make_body(f"Write {WORDS} words", stream=True)
        mine, same = encode_post("/v1/responses", body), encode_post("/", body)
        events = decode_chunked(client.send(mine))
        other.send(encode_post("/put", events))
        assert decode_chunked(other.send(same)) == events
        ratio, *spent = compare_alternating(
            (ours, lambda: send_requests([client], [mine], STREAMS)),
            (generator, lambda: send_requests([other], [same], STREAMS)),
        )
    number = events.count(b"\n\n")
    each = [seconds / STREAMS / number * 1e6 for seconds in spent]
    detail = f"{each[0]:.1f} µs an event of {number}, bare generator {each[1]:.1f} µs"
    return [
        Row(
            "streamed answer, CPU",
            ratio,
            2,
            detail=detail,
            baseline="starlette + uvicorn, the same stream",
        )
    ]


# Memory.


def measure_memory(ours: Process) -> list[Row]:
    """Resident memory in the last three fifths of many requests, in chains of twenty."""
    marks: list[int] = []
    with Client(ours.port) as client:
        end: str | None = None
        for i in range(MEMORY_REQUESTS):
            question = QUESTION.format(place=f"Port {i}")
            end = find_response_id(
                client.send(encode_post("/v1/responses", make_body(question, end)))
            )
            if i % 20 == 19:
                end = None
            if (i + 1) % max(1, MEMORY_REQUESTS // 5) == 0:
                marks.append(ours.resident_bytes())
    megabytes = [mark / 2**20 for mark in marks]
    detail = (
        f"{MEMORY_REQUESTS:,} requests; " + ", ".join(f"{mark:.0f}" for mark in megabytes) + " MB"
    )
    return [
        Row(
            "resident memory after many requests",
            marks[-1] / marks[1],
            1.1,
            detail=detail,
            baseline="after two fifths of them",
        )
    ]
