"""How long other clients wait while one client keeps a server busy: the 99th percentile of ``GET /healthz``.

Each load is sent by processes of its own, again and again: answers of a model that never waits, items of one letter,
bodies of nearly the maximum size, streams without a reader, and fragments without content. When all of them have begun,
another client asks every ten milliseconds whether the server is healthy. Ours is the command ``kedge serve`` with a
database in a file. The aim holds for an idle machine with two cores or more: the loads need one of them.
"""

import socket
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from statistics import median

from benchmarks.client import Client, encode_post
from benchmarks.servers import Process, run_kedge
from benchmarks.table import Row

BASELINE = ""
SECONDS = 8.0
PROBE_PAUSE = 0.01
AIM_MS = 250.0
READERS = 4
UNREAD_STREAMS = 20
FRAGMENTS = 2_000_000
QUESTION = {"model": "practice", "input": "Write 100000 words", "stream": True}
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)
TEXT_FRAGMENT = b"\x01\x80\0\0\0\0"
EMPTY_FRAGMENT = b"\x00\x80\0\0\0\0"

Load = Callable[[int], None]
"""Keeps the server at a port busy until its process is ended."""


def run() -> list[Row]:
    return [
        measure("4 answers of a model that never waits", read_answers, processes=READERS),
        measure("300,000 items of one letter", send_many_items),
        measure("20,000 items, which are stored", send_most_items),
        measure("30 MB of pictures and text", send_large_bodies),
        measure("20 streams without a reader", open_unread_streams),
        measure("2,000,000 empty fragments", send_fragments),
    ]


def measure(label: str, load: Load, processes: int = 1) -> Row:
    with tempfile.TemporaryDirectory() as folder, run_kedge(str(Path(folder) / "db")) as ours:
        with Client(ours.port) as client:
            client.send(encode_post("/v1/responses", {"model": "practice", "input": "Warm up."}))
        with run_load(load, ours, processes):
            waits = probe_health(ours)
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


def probe_health(ours: Process) -> list[float]:
    """Ask again and again whether the server is healthy, and return the seconds of each answer."""
    waits: list[float] = []
    end = time.monotonic() + SECONDS
    with Client(ours.port) as client:
        while time.monotonic() < end:
            start = time.perf_counter()
            client.send(HEALTH)
            waits.append(time.perf_counter() - start)
            time.sleep(PROBE_PAUSE)
    return waits


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
            time.sleep(2.0)


def send_fragments(port: int) -> None:
    """Send a message in fragments without content, and begin again when the server closes the connection."""
    while True:
        with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
            client.sendall(HANDSHAKE)
            client.recv(4096)
            client.sendall(TEXT_FRAGMENT)
            for _ in range(FRAGMENTS // 10_000):
                client.sendall(EMPTY_FRAGMENT * 10_000)
