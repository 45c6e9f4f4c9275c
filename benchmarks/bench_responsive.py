"""How long other clients wait while one client keeps a server busy: the 99th percentile of ``GET /healthz``.

Each load is sent by processes of its own, again and again: answers of a model that never waits, items of one letter,
bodies of nearly the maximum size, streams without a reader, and fragments without content. When all of them have begun,
another client asks forty times a second whether the server is healthy, whether the questions before are answered or
not. Ours is the command ``kedge serve`` with a database in a file, and ``kedge proxy`` for an upstream that never
waits. The aim holds for an idle machine with two cores or more: the loads need one of them.
"""

import asyncio
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from benchmarks.client import Client, encode_post
from benchmarks.servers import Process, run_kedge, run_server
from benchmarks.table import Row

BASELINE = ""
PROBES = 320
PROBE_SECONDS = 0.025
PROBE_TIMEOUT = 60.0
AIM_MS = 250.0
READERS = 4
UNREAD_STREAMS = 20
FRAGMENTS = 2_000_000
QUESTION = {"model": "practice", "input": "Write 100000 words", "stream": True}
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)
TEXT_FRAGMENT = b"\x01\x80\0\0\0\0"
EMPTY_FRAGMENT = b"\x00\x80\0\0\0\0"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
STREAM_EVENT = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'

Load = Callable[[int], None]
"""Keeps the server at a port busy until its process is ended."""


def run() -> list[Row]:
    return [
        measure_server("4 answers of a model that never waits", read_answers, processes=READERS),
        measure_proxy("4 streams of an upstream that never waits", read_answers, READERS),
        measure_server("300,000 items of one letter", send_many_items),
        measure_server("20,000 items, which are stored", send_most_items),
        measure_server("30 MB of pictures and text", send_large_bodies),
        measure_server("20 streams without a reader", open_unread_streams),
        measure_server("2,000,000 empty fragments", send_fragments),
    ]


def measure_server(label: str, load: Load, processes: int = 1) -> Row:
    with tempfile.TemporaryDirectory() as folder, run_kedge(str(Path(folder) / "db")) as ours:
        with Client(ours.port) as client:
            client.send(encode_post("/v1/responses", {"model": "practice", "input": "Warm up."}))
        return measure(label, ours, load, processes)


def measure_proxy(label: str, load: Load, processes: int) -> Row:
    with (
        tempfile.TemporaryDirectory() as folder,
        run_upstream() as upstream,
        run_proxy(upstream, f"{folder}/store.db") as ours,
    ):
        return measure(label, ours, load, processes)


def run_proxy(upstream: int, store: str) -> AbstractContextManager[Process]:
    address = f"http://127.0.0.1:{upstream}/v1"
    return run_server("proxy", "--port", "0", "--upstream", address, "--db", store, "--json")


def measure(label: str, ours: Process, load: Load, processes: int) -> Row:
    with run_load(load, ours, processes):
        waits = asyncio.run(probe_health(ours.port))
    milliseconds = sorted(wait * 1e3 for wait in waits)
    p99 = milliseconds[int(len(waits) * 0.99)]
    detail = (
        f"median {median(milliseconds):.1f} ms, longest {max(milliseconds):.0f} ms of {len(waits)}"
    )
    return Row(f"p99 beside {label}", p99, AIM_MS, unit="ms", detail=detail)


@contextmanager
def run_load(load: Load, ours: Process, processes: int) -> Generator[None]:
    """Run a load in processes of its own for as long as the block lasts."""
    context = get_context("spawn")
    has_begun = context.Semaphore(0)
    workers = [
        context.Process(target=begin, args=(load, ours.port, has_begun)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            has_begun.acquire()
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def begin(load: Load, port: int, has_begun: Semaphore) -> None:
    has_begun.release()
    load(port)


async def probe_health(port: int) -> list[float]:
    """Ask at equal distances whether the server is healthy, and return the seconds to each answer."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    probes: list[asyncio.Task[float]] = []
    for number in range(PROBES):
        await asyncio.sleep(start + number * PROBE_SECONDS - loop.time())
        probes.append(asyncio.create_task(probe(port)))
    return await asyncio.gather(*probes)


async def probe(port: int) -> float:
    start = perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEALTH)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
    return perf_counter() - start


@contextmanager
def run_upstream() -> Generator[int]:
    """Run an upstream that always has more to send, and yield its port."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve_endless_streams, args=(sender,))
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


def serve_endless_streams(port: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        while True:
            client, _ = listener.accept()
            threading.Thread(target=send_endless_stream, args=(client,), daemon=True).start()


def send_endless_stream(client: socket.socket) -> None:
    with client, suppress(OSError):
        received = b""
        while not (
            head := re.search(rb"content-length: (\d+)(?s:.*?)\r\n\r\n", received, re.IGNORECASE)
        ):
            received += client.recv(65_536)
        missing = int(head[1]) - len(received[head.end() :])
        while missing > 0:
            missing -= len(client.recv(missing))
        client.sendall(STREAM_HEAD)
        while True:
            client.sendall(STREAM_EVENT * 1_000)


def repeat(port: int, request: bytes) -> None:
    """Send a request again and again, whatever the answer is."""
    while True:
        with Client(port) as client, suppress(RuntimeError):
            client.send(request)


def read_answers(port: int) -> None:
    """Read the longest answers of the built-in model, which never waits."""
    repeat(port, encode_post("/v1/responses", QUESTION))


def encode_items(number: int) -> bytes:
    items = [{"role": "user", "content": "x"}] * number
    return encode_post("/v1/responses", {"model": "practice", "input": items})


def send_many_items(port: int) -> None:
    """Send more items than a request may have."""
    repeat(port, encode_items(300_000))


def send_most_items(port: int) -> None:
    """Send as many items as a request may have."""
    repeat(port, encode_items(20_000))


def send_large_bodies(port: int) -> None:
    """Send bodies that are nearly as large as they may be: pictures and a long text."""
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{'iVBO' * 1_000_000}"}
    text = {"type": "input_text", "text": "word " * 400_000}
    content = [*[picture] * 7, text]
    items = [{"role": "user", "content": content}, {"role": "user", "content": "Hello"}]
    body = {"model": "practice", "input": items, "truncation": "auto"}
    repeat(port, encode_post("/v1/responses", body))


def open_unread_streams(port: int) -> None:
    """Request streams, read nothing for two seconds, and begin again."""
    request = encode_post("/v1/responses", QUESTION)
    while True:
        with ExitStack() as stack:
            for _ in range(UNREAD_STREAMS):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", port))
                client.sendall(request)
            sleep(2.0)


def send_fragments(port: int) -> None:
    """Send a message in fragments without content, and begin again when the server closes the connection."""
    while True:
        with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
            client.sendall(HANDSHAKE)
            client.recv(4096)
            client.sendall(TEXT_FRAGMENT)
            for _ in range(FRAGMENTS // 10_000):
                client.sendall(EMPTY_FRAGMENT * 10_000)
