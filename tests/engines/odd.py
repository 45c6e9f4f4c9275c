"""A server that answers as a test says: for what no real server should do, and some do."""

import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Answer = Callable[[Request], Awaitable[Response]]


@contextmanager
def odd_server(answer: Answer) -> Iterator[str]:
    """Run it for as long as the block lasts; gives its base URL."""
    methods = ["GET", "POST", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", answer, methods=methods)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def raw_server(said: bytes, *, stays: bool = False) -> Iterator[str]:
    """A server that says these bytes to whoever connects, whatever was asked, and hangs up.

    If it ``stays``, it keeps the connection instead.
    """
    held: list[socket.socket] = []

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the test is over
                return
            held.append(connection)
            connection.recv(65_536)
            connection.sendall(said)
            if not stays:
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in held:
                connection.close()


def always(response: Callable[[], Response]) -> Answer:
    """The same answer to everything."""

    async def answer(request: Request) -> Response:
        await request.body()
        return response()

    return answer


def whole(body: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(json.dumps(body), status, media_type="application/json")


def events(*told: dict[str, Any]) -> Response:
    """A stream of these events."""
    lines = (f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in told)
    return Response("".join(lines), media_type="text/event-stream")


class Scripted:
    """Gives these outputs in turn, each as a whole response; keeps what it was asked."""

    def __init__(self, *outputs: list[dict[str, Any]]) -> None:
        self.outputs = outputs
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: Request) -> Response:
        """The next answer."""
        self.bodies.append(await request.json())
        number = len(self.bodies)
        output = self.outputs[number - 1]
        return whole({"id": f"resp_{number}", "status": "completed", "output": output})
