"""A reverse proxy for one upstream server.

Every route, method, stream and WebSocket below `/v1` is forwarded. `POST /v1/responses` is sent with
`kedge.chain`, so a program in any language that replays its history uploads only new items. API keys are
passed on and never stored.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, cast

import httpx2
from anyio import CancelScope, Event, create_task_group
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.exceptions import InvalidStatus, WebSocketException

from kedge._internal.argument_types import checked
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import TimeSlice, compute
from kedge._internal.urls import BaseUrl, parse_base_url
from kedge.chaining import ResponseIndex, StoreIndex, chain, chain_report
from kedge.chaining.client import PROGRAM_REQUEST, RETAINED_BYTES, USER
from kedge.chaining.program_request import ProgramRequest
from kedge.chaining.proxy.access import (
    PLAN_KEY,
    TOKEN_HEADER,
    ProxyFrontEnd,
    build_error,
    build_rejection,
    create_policy,
    is_limited,
)
from kedge.chaining.proxy.headers import filter_headers
from kedge.chaining.proxy.sockets import HANDSHAKE, Connect, SocketRelay, list_handshake_headers
from kedge.chaining.proxy.token_counts import Estimate, UsageReader, estimate_tokens
from kedge.chaining.rewrite import MAX_BODY_BYTES
from kedge.engines.transport import KEEP_ALIVE
from kedge.errors import InvalidSetting, StoreError, StoreReplaced
from kedge.evidence.server_evidence import Trust
from kedge.observe import get_logger
from kedge.planning.plan import send_label
from kedge.server.access import CALLER_KEY, AccessPolicy, Rejection
from kedge.server.request_log import EscapedJSONResponse, RequestMiddleware, healthz, metrics
from kedge.server.settings import Limits
from kedge.server.uvicorn_server import PING_TIMEOUT_SECONDS
from kedge.store import AccessToken, ProxiedRequest, Store, TokenRegistry
from kedge.store.database.transactions import HealthCheck
from kedge.store.open import StoreAddress, share_store
from kedge.store.proxied_requests import RequestRecorder

log = get_logger("kedge.chaining.proxy")

PLAN_HEADER = b"x-kedge-plan"
REQUEST_ONLY = frozenset({b"host", TOKEN_HEADER.encode()})
"""Headers of a request that are meant for the proxy and not forwarded."""
CLIENT_GONE = 499
"""The status that is logged for a client that disconnected before there was a response."""
MAX_STATUS = 599
"""The largest status that a server can send."""
CONNECT_SECONDS = 30.0
"""The time for a connection to the upstream."""
WAIT_SECONDS = 3_600.0
"""The time for which the upstream may send nothing. Clients have their own limit, and leave when it is reached."""
DEFAULT_LIMITS = Limits()
SEND_ERRORS = (httpx2.HTTPError, httpx2.InvalidURL, ValueError)
"""What the client raises if a request cannot be sent."""
MAX_CACHED_URLS = 256
MAX_IDLE_CONNECTIONS = 100
"""The number of idle connections to the upstream that are retained for later requests."""


@checked
def create_proxy_app(
    upstream: str,
    *,
    index: ResponseIndex | None = None,
    store: Store | StoreAddress | None = None,
    trust: Trust = "earned",
    token: str = "",
    any_host: bool = False,
    requires_token: bool = False,
    client: httpx2.AsyncClient | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Starlette:
    """Build the ASGI app of a proxy.

    Args:
        upstream: The base URL that requests are forwarded to, such as `https://api.openai.com/v1`.
        index: Where responses are looked up by content; in memory by default, or in the store.
        store: Where requests are recorded for the page; their content only if ``keep_bodies`` is set. The
            named tokens in it are accepted, and a token is required once there is one. A store that is
            given by its address is closed with the app.
        trust: Which upstreams are chained on; see `kedge.chain`.
        token: The token that clients must send in the `x-kedge-token` header, unless they send a named
            token; empty for none.
        any_host: Accept any `Host` header. Otherwise only loopback names are accepted while there is no
            token, so that web pages cannot reach the proxy through DNS rebinding.
        requires_token: Whether a token is required even while the store has none.
        client: The HTTP client for the upstream; by default one is created and closed with the app.
        limits: A client may send nothing of its body for ``read_seconds``, and the upstream read nothing of a
            request for ``write_seconds``.

    Returns:
        The app. It answers `/healthz`, `/metrics` and `/report` itself and forwards everything below
        `/v1`.

    Raises:
        InvalidSetting: The upstream is not a base URL.
    """
    try:
        base = parse_base_url(upstream)
    except ValueError as error:
        raise InvalidSetting(f"the upstream is not a base URL: {error}") from None
    shared_store = None
    recorder = None
    registry = None
    if store is not None:
        shared_store = share_store(store)
        if index is None:
            index = StoreIndex(shared_store.resource)
        recorder = RequestRecorder(shared_store.resource)
        registry = TokenRegistry(shared_store.resource, required=requires_token)
    policy = create_policy(token, registry, any_host=any_host)
    proxy = _Proxy(base, index, trust, client, recorder, policy, limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with create_task_group() as group:
            if recorder is not None:
                group.start_soon(recorder.run)
            yield
            if recorder is not None:
                recorder.stop()
        await proxy.aclose()
        if shared_store is not None:
            await shared_store.aclose()

    forwarding = Route("/v1/{path:path}", proxy.forward)
    forwarding.methods = None  # every method, also those that HTTP does not define
    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/metrics", metrics),
            Route("/report", proxy.report),
            forwarding,
            WebSocketRoute("/v1/{path:path}", proxy.forward_socket),
        ],
        middleware=[Middleware(RequestMiddleware, ProxyFrontEnd(policy))],
        exception_handlers={HTTPException: _report_no_route},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.proxy = proxy
    app.state.health = HealthCheck(partial(_check_tokens, registry))
    return app


async def _check_tokens(registry: TokenRegistry | None) -> None:
    """Raise the error of a store without which requests are rejected, or which only a restart repairs.

    While a store is only out of reach and no named token is needed, requests are forwarded as they were written.
    """
    if registry is None:
        return
    try:
        await registry.check_health()
    except StoreReplaced:
        raise
    except StoreError:
        if await registry.is_required():
            raise


async def _report_no_route(_: Request, error: Exception) -> Response:
    rejection = cast("HTTPException", error)
    message = f"{rejection.detail}: requests below /v1 are forwarded"
    response = build_error(rejection.status_code, message)
    response.headers.update(rejection.headers or {})
    return response


class _Proxy:
    """A proxy of one upstream."""

    def __init__(
        self,
        upstream: BaseUrl,
        index: ResponseIndex | None,
        trust: Trust,
        client: httpx2.AsyncClient | None,
        recorder: RequestRecorder | None,
        policy: AccessPolicy,
        limits: Limits,
    ) -> None:
        self._upstream = upstream
        self._limits = limits
        self._login = [(b"authorization", upstream.authorization.encode())]
        self._replaced = {b"authorization"} if upstream.authorization else frozenset[bytes]()
        self._parse_url = lru_cache(maxsize=MAX_CACHED_URLS)(self._parse_checked)
        self._recorder = recorder
        self._policy = policy
        self._build_request = client.build_request if client else self._build_plain_request
        self._client = chain(client or _create_client(), index=index, trust=trust)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _parse_checked(self, text: str) -> httpx2.URL:
        """Parse the URL of a request, and compare the server in it with the upstream."""
        url = httpx2.URL(text)
        base = httpx2.URL(str(self._upstream))
        if (url.scheme, url.netloc, url.userinfo) != (base.scheme, base.netloc, base.userinfo):
            raise ValueError("it names another server")
        return url

    def _select_headers(
        self, headers: Iterable[tuple[bytes, bytes]], names: Collection[bytes]
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers for the upstream: those of the client, with the credentials of the upstream."""
        kept = filter_headers(headers, self._replaced.union(names))
        if self._replaced:
            kept += self._login
        return kept

    async def report(self, _: Request) -> Response:
        """Return totals and the newest requests, without content."""
        report = chain_report(self._client)
        members = asdict(report)
        members["passed_through"] = dict(report.passed_through)
        members["healed"] = dict(report.healed)
        return EscapedJSONResponse(members)

    async def forward(self, request: Request) -> Response:
        """Forward a request and pass its response on as it arrives."""
        try:
            url = self._parse_url(_build_url(self._upstream, request.scope))
        except SEND_ERRORS as error:
            return _report_invalid_url(error)
        caller: AccessToken | None = request.scope.get(CALLER_KEY)
        has_limit = is_limited(caller)
        body_read = Event()
        try:
            chunks = _limit_pauses(request.stream(), self._limits.read_seconds)
            body = await _read_body(request, chunks, body_read, is_estimated=has_limit)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except TimeoutError:
            return self._report_slow_body()
        is_new = request.method == "POST"
        estimate = Estimate(0, 0)
        reserved = None
        if is_new and has_limit:
            estimate = await _estimate_request(request, body)
        if is_new:
            reserved = await self._policy.reserve(caller, estimate.total)
        if isinstance(reserved, Rejection):
            return build_rejection(reserved, request.scope)

        outgoing = self._build_outgoing(request, url, body, caller)
        incoming = await self._send(request, outgoing, body_read)
        program_request: ProgramRequest | None = outgoing.extensions[PROGRAM_REQUEST]
        if isinstance(incoming, Response):
            used = estimate.input if incoming.status_code == CLIENT_GONE else 0
            await self._policy.settle(reserved, used, caller)
            self._record(program_request, incoming, caller)
            return incoming

        usage = None
        # A response that is fetched was counted before, except for the result of a background response.
        if has_limit and (is_new or program_request is not None):
            usage = _create_usage_reader(incoming, estimate.input)

        async def end() -> None:
            self._record(program_request, response, caller)
            if usage is not None:
                await self._policy.settle(reserved, usage.finish(), caller)

        complete = program_request.body if program_request else None
        response = _PassedOn(incoming, complete, usage, end)
        response.raw_headers = self._select_response_headers(request, incoming, program_request)
        return response

    def _report_slow_body(self) -> Response:
        seconds = self._limits.read_seconds
        return build_error(408, f"no part of the request body arrived for {seconds:g} seconds")

    def _build_plain_request(
        self, method: str, url: httpx2.URL, *, extensions: dict[str, Any], **options: Any
    ) -> httpx2.Request:
        """Build a request for the client of `_create_client`, which has no defaults to merge into it."""
        timeouts = {
            "connect": CONNECT_SECONDS,
            "read": WAIT_SECONDS,
            "write": self._limits.write_seconds,
            "pool": WAIT_SECONDS,
        }
        return httpx2.Request(
            method, url, extensions={**extensions, "timeout": timeouts}, **options
        )

    def _build_outgoing(
        self,
        request: Request,
        url: httpx2.URL,
        body: bytes | AsyncIterator[bytes] | None,
        caller: AccessToken | None,
    ) -> httpx2.Request:
        """Return the request for the upstream."""
        dropped = set(REQUEST_ONLY)
        # A body of known length that is only passed on retains its length: some upstreams need it.
        is_chunked = "transfer-encoding" in request.headers  # which overrides a length
        if is_chunked or not isinstance(body, AsyncIterator):
            dropped.add(b"content-length")
        retained_bytes = 0
        if self._recorder is not None and self._recorder.store.keep_bodies:
            retained_bytes = self._recorder.store.body_bytes
        outgoing = self._build_request(
            request.method,
            url,
            headers=self._select_headers(request.headers.raw, dropped),
            content=body,
            extensions={
                USER: caller.namespace if caller else "",
                PROGRAM_REQUEST: None,
                RETAINED_BYTES: retained_bytes,
            },
        )
        if is_limited(caller):  # its token counts are read on the way
            outgoing.headers["accept-encoding"] = "identity"
        return outgoing

    def _select_response_headers(
        self, request: Request, incoming: httpx2.Response, program_request: ProgramRequest | None
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers for the client: those of the upstream, with the plan of the request."""
        dropped: set[bytes] = set()
        if incoming.is_stream_consumed:  # an error whose body was examined is passed on decoded
            dropped = {b"content-encoding", b"content-length"}
        headers = filter_headers(incoming.headers.raw, dropped)
        if incoming.is_redirect:
            headers = self._localize_redirect(str(incoming.request.url), headers)
        if program_request is not None and program_request.pending is None:
            plan = _format_plan(program_request)
            request.scope[PLAN_KEY] = plan
            headers.append((PLAN_HEADER, plan.encode()))
        return headers

    def _localize_redirect(
        self, url: str, headers: list[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers of a redirect with a `Location` below the proxy, or without one.

        A client that followed another one would send its request, with the token of the proxy and keys that
        clients do not remove from redirected requests, to that server.
        """
        kept: list[tuple[bytes, bytes]] = []
        for name, value in headers:
            if name != b"location":
                kept.append((name, value))
                continue
            path = self._upstream.localize(url, value.decode("latin-1"))
            if path is not None:
                kept.append((name, f"/v1{path}".encode("latin-1")))
        return kept

    async def _send(
        self, request: Request, outgoing: httpx2.Request, body_read: Event
    ) -> httpx2.Response | Response:
        """Send a request, and abandon it if the client disconnects before there is a response."""
        # Plain tasks of asyncio: a task group for each request costs as much as reading its headers.
        sender = cast("asyncio.Task[Any]", asyncio.current_task())
        is_gone = False

        async def watch_client() -> None:
            nonlocal is_gone
            await body_read.wait()
            while (await request.receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            sender.cancel()

        watcher = asyncio.create_task(watch_client())
        try:
            incoming = await self._client.send(outgoing, stream=True, follow_redirects=False)
            if incoming.status_code <= MAX_STATUS:
                return incoming
            await incoming.aclose()
            return build_error(502, f"the upstream sent the invalid status {incoming.status_code}")
        except SEND_ERRORS as error:
            return _report_unreachable(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except TimeoutError:
            return self._report_slow_body()
        except asyncio.CancelledError:
            if not is_gone or sender.uncancel():
                raise
            return Response(status_code=CLIENT_GONE)
        finally:
            watcher.cancel()

    def _record(
        self, program_request: ProgramRequest | None, response: Response, caller: AccessToken | None
    ) -> None:
        """Store the records of a finished request for the page of its user."""
        if self._recorder is None or program_request is None:
            return
        for sent in program_request.ended:
            members: dict[str, Any] = asdict(sent.record)
            members["response"] = bytes(sent.response_start)
            # The client gets the last response, or an error of the proxy.
            if sent is program_request.ended[-1]:
                members["status"] = response.status_code
                if not isinstance(response, _PassedOn):
                    members["response"] = bytes(response.body)
            row = ProxiedRequest(upstream=str(self._upstream), request=sent.body, **members)
            self._recorder.add(row, caller.namespace if caller else "")

    async def forward_socket(self, socket: WebSocket) -> None:
        """Forward a WebSocket to the upstream."""
        selected = self._select_headers(socket.headers.raw, HANDSHAKE)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in selected]
        try:
            url = str(self._parse_url(_build_url(self._upstream, socket.scope)))
        except SEND_ERRORS as error:
            await socket.send_denial_response(_report_invalid_url(error))
            return
        try:
            upstream = await Connect(
                url.replace("http", "ws", 1),
                additional_headers=headers,
                user_agent_header=None,
                subprotocols=socket.scope["subprotocols"] or None,
                max_size=MAX_BODY_BYTES,
                open_timeout=CONNECT_SECONDS,
                ping_timeout=PING_TIMEOUT_SECONDS,
            )
        except InvalidStatus as error:
            rejection = Response(bytes(error.response.body or b""), error.response.status_code)
            rejection.raw_headers += list_handshake_headers(error.response)
            await socket.send_denial_response(rejection)
            return
        except (OSError, WebSocketException) as error:
            await socket.send_denial_response(_report_unreachable(error))
            return
        async with upstream:
            accept_headers: list[tuple[bytes, bytes]] = []
            if upstream.response:
                accept_headers = list_handshake_headers(upstream.response)
            await socket.accept(upstream.subprotocol, accept_headers)
            await SocketRelay(socket, upstream, self._policy).run()


def _describe(error: Exception) -> str:
    """Describe a failure without received bytes, which may belong to the response of another client."""
    message = str(error)
    if isinstance(error, httpx2.RemoteProtocolError):  # it quotes what was received
        message = message.partition(": ")[0]
    return message or type(error).__name__


def _report_unreachable(error: Exception) -> Response:
    """Log that the upstream cannot be reached, and return the error for the client."""
    message = f"the upstream could not be reached: {_describe(error)}"
    log.warning("%s", message)
    return build_error(502, message)


def _report_invalid_url(error: Exception) -> Response:
    return build_error(400, f"the URL cannot be forwarded: {error}")


def _build_url(base: BaseUrl, scope: Scope) -> str:
    """Return the URL at the upstream for a request.

    Raises:
        ValueError: It would not be below the base URL of the upstream.
    """
    raw = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    if scope.get("method") == "CONNECT":  # a successful response would change the protocol
        raise ValueError(
            "CONNECT is followed by the name of a server, and the proxy opens no tunnels"
        )
    if not raw.startswith("/v1/"):  # the route matches the decoded path
        raise ValueError("the path must begin with /v1/")
    return base.join(raw.removeprefix("/v1"), scope["query_string"].decode("latin-1"))


def _create_client() -> httpx2.AsyncClient:
    """Create the HTTP client for the upstream.

    All clients of the proxy share it. So it stores no cookies, which would be sent with the requests of
    other clients, and has no default headers: a client that did not request compression gets none.
    """
    cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    # A stream occupies its connection for minutes, and the clients determine the number of streams.
    limits = httpx2.Limits(
        max_connections=None,
        max_keepalive_connections=MAX_IDLE_CONNECTIONS,
        keepalive_expiry=KEEP_ALIVE,
    )
    client = httpx2.AsyncClient(cookies=cookies, limits=limits)
    client.headers.clear()
    return client


class _PassedOn(StreamingResponse):
    """A response of the upstream, passed on as it arrives and closed when the client disconnects.

    A body that was read completely is sent in one message, because the tasks of a stream cost more.
    """

    def __init__(
        self,
        incoming: httpx2.Response,
        complete: bytes | None,
        usage: UsageReader | None,
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(self._read(), incoming.status_code)
        self._incoming = incoming
        self._complete = complete
        if incoming.is_stream_consumed:
            self._complete = incoming.content
        self._usage = usage
        self._on_end = on_end
        self._time_slice = TimeSlice()

    async def _read(self) -> AsyncIterator[bytes]:
        async for chunk in self._incoming.aiter_raw():
            await self._count(chunk)
            await self._time_slice.share()
            yield chunk

    async def _count(self, chunk: bytes) -> None:
        if self._usage is not None:
            for _ in self._usage.read_in_steps(chunk):
                await self._time_slice.share()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = self._complete
            if body is None:
                await super().__call__(scope, receive, send)
            else:
                await self._count(body)
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                await send({"type": "http.response.body", "body": body})
        except httpx2.HTTPError as error:  # the server closes the connection, as the upstream did
            log.warning("the upstream cut off its response: %s", _describe(error))
        finally:
            await self._incoming.aclose()
            with CancelScope(shield=True):
                await self._on_end()


async def _estimate_request(
    request: Request, body: bytes | AsyncIterator[bytes] | None
) -> Estimate:
    """Estimate the tokens of a request; of a body that is only passed on, its size is known at best."""
    content = body if isinstance(body, bytes) else b""
    length = int(request.headers.get("content-length") or 0)
    work = partial(estimate_tokens, content, length)
    return await compute(work, is_long=len(content) > LARGE_BYTES)


def _create_usage_reader(incoming: httpx2.Response, input_tokens: int) -> UsageReader:
    """Return the reader of the token counts of a response of the upstream."""
    encoding = incoming.headers.get("content-encoding", "")
    if incoming.is_stream_consumed:  # its body is passed on decoded
        encoding = ""
    return UsageReader(incoming.headers.get("content-type", ""), input_tokens, encoding)


async def _read_body(
    request: Request, chunks: AsyncIterator[bytes], body_read: Event, *, is_estimated: bool
) -> bytes | AsyncIterator[bytes] | None:
    """Return the body: its bytes if it is examined, or a stream if it is only passed on.

    Args:
        request: The request.
        chunks: The chunks of its body.
        body_read: Set when the complete body was read; the next message of the client is its disconnect.
        is_estimated: Whether its tokens are estimated, if it is JSON.
    """
    length = request.headers.get("content-length")
    if not length and "transfer-encoding" not in request.headers:
        body_read.set()
        return None
    is_create = request.scope["path"].rstrip("/").endswith("/responses")
    is_read = is_estimated and "json" in request.headers.get("content-type", "")
    is_examined = request.method == "POST" and (is_create or is_read)
    if not is_examined or int(length or 0) > MAX_BODY_BYTES:
        return _stream_body(chunks, body_read)
    read = bytearray()
    async for chunk in chunks:
        read += chunk
        if len(read) > MAX_BODY_BYTES:  # a body without a length
            return _stream_body(chunks, body_read, bytes(read))
    body_read.set()
    return bytes(read)


async def _limit_pauses(chunks: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """Yield the chunks of a body.

    Raises:
        TimeoutError: None arrived for so many seconds; the client may have left without closing its connection.
    """
    while True:
        async with asyncio.timeout(seconds):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        yield chunk


async def _stream_body(
    chunks: AsyncIterator[bytes], body_read: Event, read: bytes = b""
) -> AsyncIterator[bytes]:
    if read:
        yield read
    async for chunk in chunks:
        yield chunk
    body_read.set()


def _format_plan(program_request: ProgramRequest) -> str:
    reason = program_request.healed or program_request.reason
    is_refused = program_request.observer is not None and program_request.observer.is_refused
    label = send_label("" if program_request.anchor_id else reason, is_refused=is_refused)
    parts = [label, f"sent={len(program_request.content)}", f"full={len(program_request.original)}"]
    if reason:
        parts.append(f"reason={reason}")
    return "; ".join(parts)
