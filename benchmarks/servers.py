"""Servers in processes of their own, for benchmarks: ours, and the bare ones to measure it by.

    python -m benchmarks.servers serve …     ours: the command kedge serve with its options
    python -m benchmarks.servers echo
    python -m benchmarks.servers stream
    python -m benchmarks.servers proxy …     ours: the command kedge proxy with its options
    python -m benchmarks.servers forward URL

A bare server does what every server must do (read JSON, write JSON, stream bytes) with starlette
and uvicorn and nothing else, with the parser that uvicorn installs itself (h11), so that figures can be compared
whatever else is installed. No side writes an access log: uvicorn's costs five times ours, and
would only make ours look better.
"""

import asyncio
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kedge.cli import main as kedge_command


@dataclass(frozen=True, slots=True)
class Process:
    """A running server."""

    pid: int
    port: int

    def cpu_seconds(self) -> float:
        """Read the processor time that the process has used so far, to the nanosecond.

        The clock of another process has this number, as clock_getcpuclockid(3) computes it.
        """
        return time.clock_gettime((~self.pid << 3) | 2)

    def resident_bytes(self) -> int:
        """Read the memory that the process holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096


def run_kedge(database: str) -> AbstractContextManager[Process]:
    """Run ``kedge serve`` for as long as the block lasts."""
    return run_server(
        "serve", "--port", "0", "--db", database, "--store", ":memory:", "--no-page", "--json"
    )


def run_bare(kind: str) -> AbstractContextManager[Process]:
    """Run a bare server for as long as the block lasts."""
    return run_server(kind)


@contextmanager
def run_server(*command: str) -> Generator[Process]:
    """Run a command of this module, which serves; the first line it prints has its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.servers", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield Process(process.pid, int(re.findall(r":(\d+)", line)[0]))
        finally:
            process.terminate()


async def echo(request: Request) -> Response:
    """Answer with what was sent, made as long as the query asks for."""
    body = await request.json()
    body["padding"] = "x" * int(request.query_params["padding"])
    return JSONResponse(body)


def stream_app() -> Starlette:
    """Serve whatever events were put, one by one."""
    events: list[bytes] = []

    async def put(request: Request) -> Response:
        events[:] = [event + b"\n\n" for event in (await request.body()).split(b"\n\n") if event]
        return Response()

    async def stream(request: Request) -> Response:
        await request.json()

        async def generator() -> AsyncGenerator[bytes]:
            for event in events:
                yield event

        return StreamingResponse(generator(), media_type="text/event-stream")

    return Starlette(
        routes=[Route("/put", put, methods=["POST"]), Route("/", stream, methods=["POST"])]
    )


def forward_app(upstream: str) -> Starlette:
    """Pass every request on to one server, and its response back as it arrives."""
    import httpx2

    client = httpx2.AsyncClient(timeout=600)

    async def forward(request: Request) -> Response:
        headers = [(k, v) for k, v in request.headers.items() if k not in ("host", "connection")]
        outgoing = client.build_request(
            request.method,
            upstream + request.url.path.removeprefix("/v1"),
            headers=headers,
            content=await request.body(),
        )
        incoming = await client.send(outgoing, stream=True)

        async def read() -> AsyncGenerator[bytes]:
            async for chunk in incoming.aiter_raw():
                yield chunk
            await incoming.aclose()

        return StreamingResponse(read(), incoming.status_code, dict(incoming.headers))

    return Starlette(routes=[Route("/v1/{path:path}", forward, methods=["GET", "POST"])])


def open_listener() -> socket.socket:
    """Listen on a free port and say which."""
    # Named as TCP, or asyncio does not turn Nagle's algorithm off and answers wait for their acks.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    print("http://{}:{}".format(*listener.getsockname()), flush=True)
    return listener


def serve_app(app: Any) -> None:
    config = uvicorn.Config(
        app,
        http="h11",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=600,
    )
    asyncio.run(uvicorn.Server(config).serve(sockets=[open_listener()]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve" | "proxy", *_]:
            logging.disable(logging.INFO)
            kedge_command()
        case ["echo"]:
            serve_app(Starlette(routes=[Route("/", echo, methods=["POST"])]))
        case ["stream"]:
            serve_app(stream_app())
        case ["forward", upstream]:
            serve_app(forward_app(upstream))
        case _:
            sys.exit(__doc__)
