"""A server with responses defined by a test, for behavior that real servers should not have."""

import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import pytest
from openai import AsyncOpenAI, DefaultAioHttpClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app_thread import serve_app
from kedge.engines import AnthropicEngine, Engine, ResponsesEngine
from kedge.engines.sdk_client import SdkClient
from kedge.errors import EngineError
from kedge.providers import connect
from kedge.turns import Block, Turn, dumps, loads, user

Handler = Callable[[Request], Awaitable[Response]]
TURN = Turn([user("What is 2+3?")])
E = TypeVar("E", bound=EngineError)


@contextmanager
def serve_handler(handler: Handler) -> Iterator[str]:
    """Serve a handler until the block ends, and yield its base URL."""
    methods = ["GET", "POST", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", handler, methods=methods)])
    with serve_app(app) as url:
        yield f"{url}/v1"


@asynccontextmanager
async def connect_to(
    answer: Handler | Response | bytes, api: str = "responses", **settings: Any
) -> AsyncIterator[Any]:
    """Yield an engine, without retries, for a server with this handler, or this response to every request."""
    if isinstance(answer, bytes):
        served = serve_bytes(answer)
    else:
        served = serve_handler(
            make_handler(lambda: answer) if isinstance(answer, Response) else answer
        )
    with served as url:
        async with open_engine(api, url, **settings) as engine:
            yield engine


def open_engine(api: str, url: str, **settings: Any) -> Engine:
    """Return an engine without retries for an API; with ``sdk`` before it, one with a client of that package."""
    package, settings = api.removeprefix("sdk ").split()[0], {"max_retries": 0, **settings}
    root = url.removesuffix("/v1")
    if api == "anthropic":
        settings = {"base_url": root, "api_key": "k", **settings}
        return connect("anthropic:m", **settings)
    if not api.startswith("sdk "):
        return connect(f"{api}:{url}#m", **settings)
    limit = settings.pop("max_response_bytes", None)
    options = {name: settings.pop(name) for name in ("max_retries", "api_key") if name in settings}
    options = {"api_key": "k", "timeout": 300.0, **options}

    def make_client() -> Any:
        if package == "anthropic":
            from anthropic import AsyncAnthropic

            client: Any = AsyncAnthropic(base_url=root, **options)
        else:
            http_client = DefaultAioHttpClient() if "aiohttp" in api else None
            client = AsyncOpenAI(base_url=url, http_client=http_client, **options)
        return client if limit is None else SdkClient(client, package, sdk, limit)

    sdk: Any = package
    kind: Any = AnthropicEngine if package == "anthropic" else ResponsesEngine
    return kind("practice", make_client=make_client, scope="test", **settings)


async def catch_error(
    kind: type[E],
    answer: Handler | Response | bytes,
    match: str | None = None,
    *,
    api: str = "responses",
    turn: Turn = TURN,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> E:
    """Return the error of a run on a server with this handler or response; it must have the Turn and the plan."""
    options = options or {}
    async with connect_to(answer, api, **settings) as engine:
        with pytest.raises(kind, match=match) as exc_info:
            await engine.run(turn, **options)
    assert exc_info.value.turn is turn
    assert exc_info.value.plan is not None
    return exc_info.value


@contextmanager
def serve_bytes(
    data: bytes, *, keep_open: bool = False, accepted: list[socket.socket] | None = None
) -> Iterator[str]:
    """Serve these bytes to every connection, whatever the request, and then close it.

    With ``keep_open`` the connection stays open instead. ``accepted`` receives the connections.
    """
    connections: list[socket.socket] = [] if accepted is None else accepted

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the test has ended
                return
            connections.append(connection)
            with suppress(OSError):  # the client did not wait
                read_request(connection)
                connection.sendall(data)
            if not keep_open:
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(300)
            for connection in connections:
                connection.close()


def chunked_head(data: bytes) -> bytes:
    """Return the start of a stream, with this data as its first chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    return head + b"\r\n\r\n%x\r\n%b\r\n" % (len(data), data)


def read_request(connection: socket.socket) -> None:
    """Read a request to its end: unread bytes would turn the end of a response into a reset."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65_536)
        if not chunk:
            return
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *([0-9]+)", head, re.IGNORECASE)
    missing = int(length[1]) - len(body) if length else 0
    while missing > 0 and (chunk := connection.recv(missing)):
        missing -= len(chunk)


def make_handler(make_response: Callable[[], Response]) -> Handler:
    """Return a handler that gives the same response to every request."""

    async def answer(request: Request) -> Response:
        await request.body()
        return make_response()

    return answer


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(json.dumps(body), status, media_type="application/json")


def sse_response(*messages: dict[str, Any]) -> Response:
    """Return a stream of these events."""
    lines = (f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in messages)
    return Response("".join(lines), media_type="text/event-stream")


def message_item(text: str, item_id: str = "msg") -> dict[str, Any]:
    """Return a message of the model."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content}


def complete_response(response_id: str, *output: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return a complete response with these items."""
    names = {"id": response_id, "object": "response", "model": "m", "status": "completed"}
    return {**names, "output": list(output), **members}


def stream_response(response: dict[str, Any]) -> Response:
    """Return a stream of a complete response, whose items arrive whole."""
    started = {**response, "status": "in_progress", "output": [], "usage": None}
    done = {"type": "response.output_item.done"}
    items = enumerate(response["output"])
    return sse_response(
        {"type": "response.created", "response": started},
        *({**done, "output_index": at, "item": item} for at, item in items),
        {"type": "response.completed", "response": response},
    )


class RecordingServer:
    """A server that returns these responses in order, then the last one again, and records requests."""

    def __init__(self, *responses: Response) -> None:
        self.responses = responses
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    async def handle(self, request: Request) -> Response:
        """Return the next response."""
        self.paths.append(request.url.path)
        self.bodies.append(await request.json())
        return self.responses[min(len(self.bodies), len(self.responses)) - 1]


async def continue_answer(
    answer: Response, *blocks: Block, api: str = "chat", **options: Any
) -> tuple[Turn, dict[str, Any]]:
    """Run a Turn, and its answer with these blocks; return the Turn with the answer, and how it was sent back."""
    server = RecordingServer(answer)
    async with connect_to(server.handle, api) as engine:
        turn = await engine.run(TURN, **options)
        await engine.run(loads(dumps(turn.append(*blocks))), **options)
    return turn, server.bodies[1]["messages"][1]


def script(*outputs: list[dict[str, Any]]) -> RecordingServer:
    """Return a server that returns these outputs in order, each as a complete response."""
    answers = (complete_response(f"resp_{at}", *each) for at, each in enumerate(outputs, 1))
    return RecordingServer(*map(json_response, answers))
