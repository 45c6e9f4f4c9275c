"""`kedge.chain(client)`: send anchors and deltas from a client that replays its history.

The transports of the HTTP client are wrapped, so its connection pools, proxies, authentication, hooks, cookies and
timeouts are unchanged, and nothing is closed twice. A wrapped transport receives each request after authentication,
event hooks and cookies, and returns the response before event hooks see it: a rejected anchor is healed in between. The
program receives the bytes of the server: while a rewritten request is unconfirmed its response is buffered, and from
then on each chunk is passed on as it arrives.

`send` decides everything, for synchronous and asynchronous clients. It only uses `_Operations`, which never wait if the
client is synchronous, so that it runs `send` without an event loop.

No additional errors are raised here: an unexpected error in the bookkeeping is logged, and the request is
sent as the program wrote it.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

from anyio import CancelScope, to_thread

from kedge._internal.argument_types import checked
from kedge._internal.json_text import decode
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import TimeSlice, compute
from kedge._internal.urls import check_path
from kedge.chaining.chainer import Chainer
from kedge.chaining.index import ResponseIndex, StoreIndex
from kedge.chaining.observer import ResponseObserver
from kedge.chaining.program_request import ProgramRequest
from kedge.chaining.report import ChainedRequest, ChainReport
from kedge.chaining.request_headers import is_idempotency_key, limit_codings
from kedge.errors import EngineError, InvalidType, RequestRefused, ServerFailed, StreamTooLarge
from kedge.evidence.server_evidence import Trust
from kedge.observe import get_logger
from kedge.planning import DEFAULT_RETENTION
from kedge.store import Store
from kedge.store.open import StoreAddress

log = get_logger("kedge.chaining")

T = TypeVar("T")
ClientT = TypeVar("ClientT")
PROBE_SECONDS = 10.0
"""The timeout of each step of a probe, unless the timeout of the program's request is shorter."""
_PATH = "/responses"
_REBUILT = (b"content-length", b"accept-encoding")
"""Headers that depend on the body, or on the compressions that can be read."""
PROGRAM_REQUEST = "kedge.program_request"
"""The request extension that is set to the `ProgramRequest`, if the HTTP request has it."""
USER = "kedge.user"
"""The request extension with the user for whom a proxy sends a request; users do not share anchors."""
RETAINED_BYTES = "kedge.retained_bytes"
"""The request extension with the bytes of the response that its observer retains."""


@checked
def chain(
    client: ClientT,
    *,
    store: Store | StoreAddress | None = None,
    index: ResponseIndex | None = None,
    retention: float | None = DEFAULT_RETENTION,
    max_depth: int | None = None,
    trust: Trust = "earned",
    on_request: Callable[[ChainedRequest], None] | None = None,
) -> ClientT:
    """Make a client that replays its full history send only the items that the server does not have.

    Each `POST /responses` request of the client is looked up by content. If the context of a stored response
    provably equals a prefix of its input, the request is sent with `previous_response_id` and the rest of
    the input; otherwise it is sent as the program wrote it. If the server no longer has that response, the
    original request is sent instead, before any output is passed to the program.

    Args:
        client: An `OpenAI` or `AsyncOpenAI` client (Azure variants too), or the `httpx2` client that it
            or another library uses. It is changed in place. A client that is chained already gets these
            settings; its report and its index in memory are continued.
        store: Where responses are looked up: a SQLite file, the address of a store (`sqlite:///…` or
            `postgresql://…`), or an open `kedge.store.Store`. All processes that use it chain on the responses
            of each other. By default responses are stored in this process only.
        index: An index, instead of `store`. Pass the same one to several clients to share it.
        retention: The seconds for which the server stores a response; None if it does not expire.
        max_depth: The number of responses of a chain that the server passes to the model, if it is limited.
        trust: Which servers are chained on: `earned` for those known to use stored context (OpenAI, Azure,
            xAI and `kedge serve`) and those that prove it by their token counts or the items they list,
            `always` for all, `never` for none. Requests to others are sent as the program wrote them.
        on_request: Called with a `ChainedRequest` after each request on the wire.

    Returns:
        The same client.

    Raises:
        InvalidType: The client cannot be chained, or both `store` and `index` are passed.
        StoreError: The store cannot be opened.
        InvalidSetting: `retention`, `max_depth` or `trust` has an invalid value, or `KEDGE_MAX_RESPONSE_BYTES` in
            the environment.

    Example:
        ```python
        client = kedge.chain(OpenAI())
        history = [{"role": "user", "content": "Hello"}]
        response = client.responses.create(model="gpt-5.1", input=history)
        ```
    """
    http_client, library = _get_http_client(client)
    if store is not None and index is not None:
        raise InvalidType("kedge.chain accepts a store or an index, not both")
    previous = _find_chainer(http_client)
    if index is None and previous is not None and previous.opened is None:
        index = previous.index
    chainer = Chainer(
        index, retention=retention, max_depth=max_depth, trust=trust, on_request=on_request
    )
    if store is not None:
        chainer.index = chainer.opened = StoreIndex(store)
    if previous is not None:
        chainer.report = previous.report
        chainer.report.on_request = on_request
    unchain(client)
    _replace_transports(
        http_client, lambda transport: ChainedTransport(transport, chainer, library)
    )
    return client


def unchain(client: ClientT) -> ClientT:
    """Undo `chain`: from now on the client sends requests as the program writes them.

    A store that `chain` opened is closed.

    Args:
        client: A client that was passed to `chain`; any other is not changed.

    Returns:
        The same client.
    """
    http_client, _ = _get_http_client(client)
    chainer = _find_chainer(http_client)
    _replace_transports(
        http_client,
        lambda transport: (
            transport.wrapped if isinstance(transport, ChainedTransport) else transport
        ),
    )
    if chainer is not None and chainer.opened is not None:
        chainer.opened.close()
    return client


def chain_report(client: object) -> ChainReport:
    """Return the report of a chained client: what it sent, saved, healed and passed through.

    Args:
        client: A client that was passed to `chain`.

    Returns:
        Totals and the newest requests.

    Raises:
        InvalidType: The client is not chained.
    """
    chainer = _find_chainer(_get_http_client(client)[0])
    if chainer is None:
        raise InvalidType("this client is not chained; call kedge.chain(client) first")
    return chainer.report.build()


def _get_http_client(client: object) -> tuple[Any, Any]:
    """Return the HTTP client behind an SDK client, or the HTTP client itself, and its library."""
    candidates: tuple[Any, ...] = (client, getattr(client, "_client", None))
    for candidate in candidates:
        for base in candidate.__class__.__mro__:
            root = base.__module__.partition(".")[0]
            if root in ("httpx2", "httpx") and base.__name__ in ("Client", "AsyncClient"):
                return candidate, import_module(root)
    raise InvalidType(
        f"kedge.chain accepts an OpenAI client or an httpx2 client, not {type(client).__name__}"
    )


def _find_chainer(http_client: Any) -> Chainer | None:
    transport = http_client._transport  # noqa: SLF001
    return transport.chainer if isinstance(transport, ChainedTransport) else None


def _replace_transports(http_client: Any, replace: Callable[[Any], Any]) -> None:
    """Replace all transports of an HTTP client: some addresses, or a proxy, may have their own."""
    http_client._transport = replace(http_client._transport)  # noqa: SLF001
    mounts: dict[Any, Any] = http_client._mounts  # noqa: SLF001
    for pattern, transport in mounts.items():
        mounts[pattern] = None if transport is None else replace(transport)


class ChainedTransport:
    """A transport that chains the requests of a client; the wrapped transport has all other members.

    Args:
        wrapped: The transport that sends requests.
        chainer: Rewrites them.
        library: The HTTP library of the client.
    """

    wrapped: Any = None

    def __init__(self, wrapped: Any, chainer: Chainer, library: Any) -> None:
        self.wrapped = wrapped
        self.chainer = chainer
        self.library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def handle_request(self, request: Any) -> Any:
        """Send a request of a synchronous client and return the response."""
        return _run(send(_Operations(self, is_async=False), request))

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request of an asynchronous client and return the response."""
        return await send(_Operations(self, is_async=True), request)


class _Operations:
    """The operations of a transport; a synchronous transport never waits.

    Args:
        chained: The transport of the client.
        is_async: Whether it is asynchronous.
    """

    def __init__(self, chained: ChainedTransport, *, is_async: bool) -> None:
        self.transport = chained.wrapped
        self.chainer = chained.chainer
        self.library = chained.library
        self._is_async = is_async
        self._time_slice = TimeSlice()

    async def send(self, request: Any) -> Any:
        if self._is_async:
            return await self.transport.handle_async_request(request)
        return self.transport.handle_request(request)

    def iterate(self, stream: Any) -> Any:
        return aiter(stream) if self._is_async else iter(stream)

    async def read(self, chunks: Any) -> bytes | None:
        if not self._is_async:
            return next(chunks, None)
        await self.share()  # a server may always have sent more already
        return await anext(chunks, None)

    async def share(self) -> None:
        """Let other tasks run, if there are any and it is time."""
        if self._is_async:
            await self._time_slice.share()

    async def close(self, resource: Any) -> None:
        if self._is_async:
            await resource.aclose()
        else:
            resource.close()

    async def call(self, work: Callable[[], T], size: int = 0) -> T:  # pyright: ignore[reportReturnType]
        """Run bookkeeping; in an event loop in a thread, if the index waits for a disk or a network, or it takes long.

        Args:
            work: The function.
            size: The number of bytes that it reads.
        """
        if not self._is_async:
            return work()
        with CancelScope(shield=True):  # a cancelled request is reported, too
            if self.chainer.index.is_blocking:
                return await to_thread.run_sync(work)
            return await compute(work, is_long=size > LARGE_BYTES)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a synchronous client cannot wait for an event loop")


async def send(io: _Operations, request: Any) -> Any:
    """Send a request and, if its anchor is rejected or ignored, the original one."""
    if not isinstance(request.stream, io.library.ByteStream):
        return await io.send(request)
    examine = partial(_examine, io.chainer, request)
    problem = "a request could not be examined and is sent as written"
    size = int(request.headers.get("content-length") or 0)
    program_request = await io.call(partial(_try, problem, examine), size)
    if program_request is None:
        return await io.send(request)
    try:
        if program_request.needs_probe:
            await _probe(io, request, program_request)
        return await _send_and_heal(io, request, program_request)
    except BaseException as error:  # the request failed or was cancelled
        end = partial(program_request.end, early=True, problem=type(error).__name__)
        _try("a response could not be recorded", end)
        raise


def _try(problem: str, work: Callable[[], T]) -> T | None:
    """Run bookkeeping, whose errors do not reach the program."""
    try:
        return work()
    except Exception:
        log.exception("%s", problem)
        return None


def _examine(chainer: Chainer, request: Any) -> ProgramRequest | None:
    program_request = chainer.examine(
        request.method,
        str(request.url),
        dict(request.headers.items()),  # with lower-case names
        b"".join(request.stream),
        request.extensions.get(USER, ""),
    )
    if PROGRAM_REQUEST in request.extensions:
        request.extensions[PROGRAM_REQUEST] = program_request
    if program_request is not None:
        program_request.retained_bytes = request.extensions.get(RETAINED_BYTES, 0)
    return program_request


async def _probe(io: _Operations, request: Any, program_request: ProgramRequest) -> None:
    """Request the items that the server stores for the anchor; errors are not passed to the program."""
    try:
        audit = await program_request.probe(_ProbeSource(io, request))
        await io.call(partial(program_request.record_probe, audit))
    except Exception:
        log.exception("the server could not be probed")
        program_request.distrust()


class _ProbeSource:
    """A source of JSON below the URL of a request, with its credentials."""

    def __init__(self, io: _Operations, request: Any) -> None:
        self._io = io
        self._request = request

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        check_path(path)
        probe = self._build_request(method, path, query)
        try:
            response = await self._io.send(probe)
            try:
                body = await self._read_body(response)
            finally:
                await self._io.close(response)
        except EngineError:
            raise
        except Exception as error:
            raise ServerFailed("the server could not be reached") from error
        return decode(body)

    def _build_request(self, method: str, path: str, query: dict[str, Any]) -> Any:
        request = self._request
        url = request.url.copy_with(path=request.url.path.rstrip("/") + path.removeprefix(_PATH))
        if query:
            url = url.copy_merge_params(query)
        headers = [
            (name, value)
            for name, value in request.headers.multi_items()
            if _describes_account(name)
        ]
        limits: dict[str, Any] = request.extensions.get("timeout") or {}
        timeout = {
            step: min(limits.get(step) or PROBE_SECONDS, PROBE_SECONDS)
            for step in ("connect", "read", "write", "pool")
        }
        return type(request)(
            method.upper(),
            url,
            headers=[*headers, ("Accept-Encoding", "identity")],
            extensions={"timeout": timeout},
        )

    async def _read_body(self, response: Any) -> bytearray:
        status = response.status_code
        if status != 200:
            raise RequestRefused(f"HTTP {status}", status=status)
        limit = self._io.chainer.max_response_bytes
        body = bytearray()
        chunks = self._io.iterate(response.stream)
        while (chunk := await self._io.read(chunks)) is not None:
            body += chunk
            if len(body) > limit:
                raise StreamTooLarge("response", limit)
        return body


def _describes_account(header: str) -> bool:
    """Return whether a header belongs to the client rather than to one request."""
    name = header.lower()
    return (
        not is_idempotency_key(name)
        and not name.startswith(("content-", "x-stainless-"))
        and name not in ("accept", "accept-encoding", "expect", "transfer-encoding")
    )


async def _send_and_heal(io: _Operations, request: Any, program_request: ProgramRequest) -> Any:
    """Send the rewritten request and, if that was in vain, the one that the program wrote."""
    response = await _attempt(io, request, program_request)
    if response is None:
        response = await _attempt(io, request, program_request)
    return response


async def _attempt(io: _Operations, request: Any, program_request: ProgramRequest) -> Any:
    """Send once, and return the response, or None if the original request must be sent instead."""
    response = await io.send(_rebuild(io.library, request, program_request.content))
    if response.has_redirect_location:  # no answer; the client may send another request
        return response
    # A transport may return a response whose body was read already; then it is not read again.
    is_read = response.is_stream_consumed
    source = io.library.ByteStream(response.content) if is_read else response.stream
    headers = dict(response.headers.items())
    if is_read:
        headers.pop("content-encoding", None)
    try:
        observer = await io.call(partial(program_request.observe, response.status_code, headers))
        body = _make_stream_class(io.library)(io, source, program_request, observer)
        await body.hold(complete=is_read)
        if observer.verdict == "resend":
            await io.close(response)
            problem = "a lost response could not be recorded"
            await io.call(partial(_try, problem, program_request.heal))
            return None
    except BaseException:
        await io.close(response)
        raise
    if not is_read:
        response.stream = body
    return response


@cache
def _make_stream_class(library: Any) -> Any:
    """Return the class of response bodies that are observed while they are passed on."""
    bases = (_ObservedBody, library.AsyncByteStream, library.SyncByteStream)
    return type("ObservedStream", bases, {})


class _ObservedBody:
    """A response body: first the chunks that were held back, then the rest as they arrive."""

    def __init__(
        self,
        io: _Operations,
        source: Any,
        program_request: ProgramRequest,
        observer: ResponseObserver,
    ) -> None:
        self._io = io
        self._source = source
        self._program_request = program_request
        self._observer = observer
        self._chunks = io.iterate(source)
        self._held = deque[bytes]()
        self._size = 0
        self._error: Exception | None = None

    async def hold(self, *, complete: bool) -> None:
        """Read until the program may receive the body, or all of it.

        The response is recorded before its last chunk is passed on, because the next request may follow
        immediately, and may be sent by another process.
        """
        while complete or self._observer.verdict == "waiting":
            try:
                chunk = await self._io.read(self._chunks)
            except Exception as error:  # noqa: BLE001 - raised where the program reads the body
                self._error = error
                return
            if chunk is None:
                self._program_request.body = b"".join(self._held)
                await self._end()
                return
            self._held.append(chunk)
            await self._feed(chunk)
        if self._observer.is_complete and self._observer.verdict != "resend":
            await self._end()

    async def _feed(self, chunk: bytes) -> None:
        self._size += len(chunk)
        try:
            for _ in self._observer.read_in_steps(chunk):
                await self._io.share()
        except Exception:
            log.exception("a response could not be read")

    async def _read(self) -> bytes | None:
        if self._held:
            return self._held.popleft()
        if self._error is not None:
            raise self._error
        chunk = None
        if self._program_request.body is None:
            chunk = await self._io.read(self._chunks)
        if chunk is not None:
            await self._feed(chunk)
        if chunk is None or self._observer.is_complete:
            await self._end()
        return chunk

    def __iter__(self) -> Iterator[bytes]:
        while (chunk := _run(self._read())) is not None:
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._read()) is not None:
            yield chunk

    def close(self) -> None:
        _run(self.aclose())

    async def aclose(self) -> None:
        try:
            await self._end(early=True)
        finally:
            await self._io.close(self._source)

    async def _end(self, *, early: bool = False) -> None:
        if not self._program_request.is_finished:
            work = partial(self._program_request.end, early=early)
            await self._io.call(partial(_try, "a response could not be recorded", work), self._size)


def _rebuild(library: Any, request: Any, content: bytes) -> Any:
    """Return a request with another body, whose response can be read; everything else is unchanged."""
    accepted = request.headers.get("accept-encoding", "")
    readable = limit_codings(accepted)
    if content == b"".join(request.stream) and readable == accepted:
        return request
    headers = [pair for pair in request.headers.raw if pair[0].lower() not in _REBUILT]
    if readable:
        headers.append((b"Accept-Encoding", readable.encode()))
    if "content-length" in request.headers:
        headers.append((b"Content-Length", str(len(content)).encode()))
    rebuilt = type(request)(
        request.method,
        request.url,
        headers=headers,
        stream=library.ByteStream(content),
        extensions=request.extensions,
    )
    rebuilt.read()
    return rebuilt
