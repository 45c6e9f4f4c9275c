"""A reverse proxy for one upstream server.

Every route, method, stream and WebSocket below `/v1` is forwarded. `POST /v1/responses` goes through
`kedge.chain`, so a program in any language that replays its history uploads only what is new. API keys
are passed on and never stored.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from anyio import create_task_group
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from kedge.engines.evidence import Trust
from kedge.incremental import AnchorIndex, chain, chain_report
from kedge.incremental.client import EXCHANGE
from kedge.incremental.exchange import Exchange
from kedge.incremental.rewrite import MAX_BODY_BYTES
from kedge.observe import get_logger
from kedge.server.access import (
    LOOPBACK_NAMES,
    AccessPolicy,
    is_same_origin,
    parse_host_name,
    read_header,
)

if TYPE_CHECKING:
    import httpx2

log = get_logger("kedge.proxy")

TOKEN_HEADER = "x-kedge-token"
PLAN_HEADER = "x-kedge-plan"
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that belong to one connection and are not forwarded."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
TIMEOUT_SECONDS = 600.0


def create_proxy_app(
    upstream: str,
    *,
    index: AnchorIndex | None = None,
    trust: Trust = "earned",
    token: str = "",
    any_host: bool = False,
    client: "httpx2.AsyncClient | None" = None,
) -> Starlette:
    """Build the ASGI app of a proxy.

    Args:
        upstream: The base URL that requests are forwarded to, such as `https://api.openai.com/v1`.
        index: Where responses are looked up by content; in memory by default.
        trust: Which upstreams are chained on; see `kedge.chain`.
        token: What clients must send in the `x-kedge-token` header; empty for none.
        any_host: Accept any `Host` header. Otherwise only loopback names are accepted while there is no
            token, so that web pages cannot reach the proxy through a name of their own.
        client: The HTTP client for the upstream; by default one is made and closed with the app.

    Returns:
        The app. `/healthz` and `/report` are its own routes; everything below `/v1` is forwarded.
    """
    proxy = _Proxy(upstream.rstrip("/"), index, trust, client)
    guard = _Guard(token, any_host=any_host)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await proxy.aclose()

    app = Starlette(
        routes=[
            Route("/healthz", _report_health),
            Route("/report", guard.wrap(proxy.report)),
            Route("/v1/{path:path}", guard.wrap(proxy.forward), methods=METHODS),
            WebSocketRoute("/v1/{path:path}", guard.wrap_socket(proxy.forward_socket)),
        ],
        lifespan=lifespan,
    )
    app.state.proxy = proxy
    return app


async def _report_health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


Handler = Callable[[Request], Awaitable[Response]]
SocketHandler = Callable[[WebSocket], Awaitable[None]]


class _Guard:
    """Checks the host name and the token of requests."""

    def __init__(self, token: str, *, any_host: bool) -> None:
        self._policy = AccessPolicy(token or None, None if token or any_host else LOOPBACK_NAMES)

    def _find_problem(self, scope: Scope) -> tuple[int, str] | None:
        if not self._policy.allows_host(scope):
            name = parse_host_name(read_header(scope, b"host"))
            return 403, f"host {name!r} is not allowed: use a loopback name, or set a token"
        given = read_header(scope, TOKEN_HEADER.encode())
        if self._policy.token is not None and not self._policy.matches_token(given):
            return 401, f"send the proxy's token in the {TOKEN_HEADER} header"
        return None

    def wrap(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            if problem := self._find_problem(request.scope):
                return _build_error(*problem)
            return await handler(request)

        return handle

    def wrap_socket(self, handler: SocketHandler) -> SocketHandler:
        async def handle(socket: WebSocket) -> None:
            if self._find_problem(socket.scope) or not is_same_origin(socket.scope):
                await socket.close(1008)
                return
            await handler(socket)

        return handle


def _build_error(status: int, message: str, code: str = "proxy_error") -> Response:
    error = {"message": message, "type": "kedge_proxy", "param": None, "code": code}
    return JSONResponse({"error": error}, status)


class _Proxy:
    """Forwards requests to one upstream."""

    def __init__(
        self,
        upstream: str,
        index: AnchorIndex | None,
        trust: Trust,
        client: "httpx2.AsyncClient | None",
    ) -> None:
        import httpx2

        self._upstream = upstream
        self._errors = (httpx2.HTTPError, httpx2.InvalidURL)
        self._client = chain(
            client or httpx2.AsyncClient(timeout=TIMEOUT_SECONDS), index=index, trust=trust
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def report(self, _: Request) -> Response:
        """Totals and the newest requests, without content."""
        report = chain_report(self._client)
        return JSONResponse(
            {
                "requests": report.requests,
                "chained": report.chained,
                "passed_through": dict(report.passed_through),
                "healed": dict(report.healed),
                "sent_bytes": report.sent_bytes,
                "full_bytes": report.full_bytes,
            }
        )

    async def forward(self, request: Request) -> Response:
        """Forward a request and pass its response on as it arrives."""
        outgoing = self._client.build_request(
            request.method,
            self._build_url(request.scope),
            headers=_filter_headers(
                request.headers.items(), "host", "content-length", TOKEN_HEADER
            ),
            content=await _read_body(request),
        )
        try:
            incoming = await self._client.send(outgoing, stream=True)
        except self._errors as error:
            log.warning("the upstream could not be reached: %s", type(error).__name__)
            return _build_error(502, f"the upstream could not be reached: {type(error).__name__}")
        # An error whose body was examined is passed on decoded.
        decoded = ("content-encoding", "content-length") if incoming.is_stream_consumed else ()
        headers = _filter_headers(incoming.headers.multi_items(), *decoded)
        exchange = incoming.extensions.get(EXCHANGE)
        if isinstance(exchange, Exchange) and exchange.pending is None:
            headers.append((PLAN_HEADER, _format_plan(exchange)))
        response = _PassedOn(incoming, self._errors)
        response.raw_headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers]
        return response

    async def forward_socket(self, socket: WebSocket) -> None:
        """Forward a WebSocket in both directions until either side closes it."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, WebSocketException

        url = self._build_url(socket.scope).replace("http", "ws", 1)
        names = ("authorization", "openai-organization", "openai-project", "openai-beta")
        headers = {name: socket.headers[name] for name in names if name in socket.headers}
        try:
            upstream = await connect(url, additional_headers=headers, max_size=MAX_BODY_BYTES)
        except (OSError, WebSocketException) as error:
            log.warning("the upstream could not be reached: %s", type(error).__name__)
            await socket.close(1011)
            return
        await socket.accept()

        async def send_up() -> None:
            try:
                while True:
                    message = await socket.receive()
                    if message["type"] == "websocket.disconnect":
                        break
                    data = message.get("text")
                    await upstream.send(data if data is not None else message["bytes"])
            except (ConnectionClosed, WebSocketDisconnect):
                pass
            group.cancel_scope.cancel()

        async with upstream, create_task_group() as group:
            group.start_soon(send_up)
            code = 1000
            try:
                async for data in upstream:
                    if isinstance(data, str):
                        await socket.send_text(data)
                    else:
                        await socket.send_bytes(data)
            except ConnectionClosed as closed:
                code = closed.rcvd.code if closed.rcvd else 1011
            if not group.cancel_scope.cancel_called:
                await socket.close(code)
            group.cancel_scope.cancel()

    def _build_url(self, scope: Scope) -> str:
        raw = scope.get("raw_path") or scope["path"].encode()
        path = raw.decode("latin-1").partition("?")[0].removeprefix("/v1")
        query = scope["query_string"].decode("latin-1")
        return f"{self._upstream}{path}{'?' + query if query else ''}"


class _PassedOn(StreamingResponse):
    """A response of the upstream: its bytes as they arrive, closed when the client is gone."""

    def __init__(self, incoming: "httpx2.Response", errors: tuple[type[Exception], ...]) -> None:
        super().__init__(self._read(), incoming.status_code)
        self._incoming = incoming
        self._errors = errors

    async def _read(self) -> AsyncIterator[bytes]:
        if self._incoming.is_stream_consumed:
            yield self._incoming.content
            return
        async for chunk in self._incoming.aiter_raw():
            yield chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._incoming.aclose()


async def _read_body(request: Request) -> bytes | AsyncIterator[bytes] | None:
    """Return the body: read where it is examined, streamed where it is only passed on."""
    length = request.headers.get("content-length")
    if request.method in ("GET", "HEAD", "OPTIONS", "DELETE") and not length:
        return None
    is_examined = request.method == "POST" and request.url.path.rstrip("/").endswith("/responses")
    if is_examined and length is not None and int(length) <= MAX_BODY_BYTES:
        return await request.body()
    return request.stream()


def _filter_headers(headers: Iterable[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    """Return the headers that are passed on: not those of one connection, nor these."""
    listed = list(headers)
    named = {
        name.strip().lower()
        for key, value in listed
        if key.lower() == "connection"
        for name in value.split(",")
    }
    dropped = HOP_BY_HOP | named | set(names)
    return [(key.lower(), value) for key, value in listed if key.lower() not in dropped]


def _format_plan(exchange: Exchange) -> str:
    sizes = f"sent={len(exchange.content)}; full={len(exchange.original)}"
    if exchange.rewritten:
        return f"chained; {sizes}"
    reason = exchange.healed or exchange.decision
    return f"{'healed' if exchange.healed else 'full'}; {sizes}; reason={reason}"
