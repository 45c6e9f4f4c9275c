"""`kedge.chain(client)`: send anchors and deltas from a client that replays its history.

The hook is the `send` method of the HTTP client. Its class is replaced by a subclass, so connection pool,
proxies, authentication, hooks, cookies and timeouts are unchanged, and nothing is closed twice. The program
receives the bytes of the server: while a rewritten request is unconfirmed its response is buffered, and
from then on each chunk is passed on as it arrives.

No additional errors are raised here: an unexpected error in the bookkeeping is logged, and the request is
sent as the program wrote it.
"""

import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, closing, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, TypeVar

from anyio import CancelScope, to_thread

from kedge.engines.response_limit import (
    MAX_ERROR_BYTES,
    SizeLimit,
    make_inflater,
    resolve_limit,
)
from kedge.errors import InvalidSetting, RequestRefused, ServerFailed
from kedge.incremental.exchange import (
    Chainer,
    Exchange,
    ResponseObserver,
    is_idempotency_key,
    limit_codings,
)
from kedge.incremental.index import AnchorIndex
from kedge.incremental.report import ChainedRequest, ChainReport
from kedge.incremental.store_index import StoreIndex
from kedge.memory.evidence import Trust
from kedge.observe import get_logger
from kedge.planning import DEFAULT_RETENTION
from kedge.security.urls import check_path
from kedge.store import Store
from kedge.text.json_text import decode

log = get_logger("kedge.incremental")

ClientT = TypeVar("ClientT")
T = TypeVar("T")
_CHAINER = "_kedge_chainer"
_OPENED = "_kedge_opened_index"
PROBE_SECONDS = 10.0
"""The timeout of each step of a probe, unless that of the program's request is shorter."""
_PATH = "/responses"
_REBUILT = (b"content-length", b"accept-encoding")
"""Headers that depend on the body, or on the compressions that can be read."""
EXCHANGE = "kedge.exchange"
"""The request extension that is set to the exchange, if the request has it."""
USER = "kedge.user"
"""The request extension with the user for whom a proxy sends a request; users do not share anchors."""
BODY = "kedge.body"
"""The response extension with the body, if it was read completely before it is passed on."""
HOOK_ERROR = "kedge.hook_error"
"""The response extension with the error that an event hook of the program raised for it."""
_RECEIVED = "kedge.received"
"""The request extension with the list of the responses that were received for it, before event hooks see them."""


def chain(
    client: ClientT,
    *,
    store: Store | str | None = None,
    index: AnchorIndex | None = None,
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
            `postgresql://…`), or an open `kedge.Store`. All processes that use it chain on the responses
            of each other. By default responses are stored in this process only.
        index: An index, instead of `store`. Pass the same one to several clients to share it.
        retention: The seconds for which the server stores a response; None if it does not expire.
        max_depth: The number of responses of a chain that the server passes to the model, if it is limited.
        trust: Which servers are chained on: `earned` for those known to use stored context (OpenAI, Azure,
            xAI and `kedge serve`) and those that prove it by their token counts or the items they list,
            `always` for all, `never` for none. Requests to others are sent as the program wrote them.
        on_request: Called with a `ChainedRequest` after each request.

    Returns:
        The same client.

    Raises:
        TypeError: The client cannot be chained, or both `store` and `index` are passed.
        StoreError: The store cannot be opened.
        InvalidSetting: `retention`, `max_depth` or `trust` has an invalid value.

    Example:
        ```python
        client = kedge.chain(OpenAI())
        history = [{"role": "user", "content": "Hello"}]
        response = client.responses.create(model="gpt-5.1", input=history)
        ```
    """
    http_client = _get_http_client(client)
    if store is not None and index is not None:
        raise TypeError("kedge.chain accepts a store or an index, not both")
    previous = _get_chainer(http_client)
    opened = None if store is None else StoreIndex(store)
    index = opened or index
    if index is None and previous is not None and http_client.__dict__[_OPENED] is None:
        index = previous.index
    try:
        chainer = Chainer(
            index, retention=retention, max_depth=max_depth, trust=trust, on_request=on_request
        )
    except InvalidSetting:
        if opened is not None:
            opened.close()
        raise
    if previous is not None:
        chainer.continue_report(previous)
    unchain(client)
    http_client.__class__ = _make_hooked_class(http_client.__class__)
    http_client.__dict__ |= {_CHAINER: chainer, _OPENED: opened}
    return client


def unchain(client: ClientT) -> ClientT:
    """Undo `chain`: from now on the client sends requests as the program writes them.

    A store that `chain` opened is closed.

    Args:
        client: A client that was passed to `chain`; any other is not changed.

    Returns:
        The same client.
    """
    http_client = _get_http_client(client)
    if http_client.__dict__.pop(_CHAINER, None) is not None:
        http_client.__class__ = type(http_client).__mro__[1]
    opened: StoreIndex | None = http_client.__dict__.pop(_OPENED, None)
    if opened is not None:
        opened.close()
    return client


def chain_report(client: object) -> ChainReport:
    """Return the report of a chained client: what it sent, saved, healed and passed through.

    Args:
        client: A client that was passed to `chain`.

    Returns:
        Totals and the newest requests.

    Raises:
        TypeError: The client is not chained.
    """
    chainer = _get_chainer(_get_http_client(client))
    if chainer is None:
        raise TypeError("this client is not chained; call kedge.chain(client) first")
    return chainer.report


def _get_http_client(client: object) -> Any:
    """Return the HTTP client behind an SDK client, or the HTTP client itself."""
    candidates: tuple[Any, ...] = (client, getattr(client, "_client", None))
    for candidate in candidates:
        if _find_library(candidate.__class__) is not None:
            return candidate
    raise TypeError(
        f"kedge.chain accepts an OpenAI client or an httpx2 client, not {type(client).__name__}"
    )


def _get_chainer(http_client: Any) -> Chainer | None:
    return http_client.__dict__.get(_CHAINER)


def _find_library(cls: type) -> tuple[Any, bool] | None:
    """Return the HTTP library of a client class and whether the class is asynchronous."""
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("httpx2", "httpx") and base.__name__ in ("Client", "AsyncClient"):
            return import_module(root), base.__name__ == "AsyncClient"
    return None


@cache
def _make_hooked_class(cls: type) -> type:
    """Return a subclass of an HTTP client class whose `send` rewrites requests."""
    library_info = _find_library(cls)
    assert library_info is not None  # noqa: S101 - checked by the caller
    library, is_async = library_info
    methods = {
        "send": _make_async_send(library, cls) if is_async else _make_sync_send(library, cls),
        # The only place where a response is available although an event hook raises an error for it.
        "_send_single_request": _make_async_receive(cls) if is_async else _make_sync_receive(cls),
    }
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})


def _make_sync_receive(cls: Any) -> Any:
    def send_single_request(self: Any, request: Any) -> Any:
        response = cls._send_single_request(self, request)
        request.extensions.get(_RECEIVED, []).append(response)
        return response

    return send_single_request


def _make_async_receive(cls: Any) -> Any:
    async def send_single_request(self: Any, request: Any) -> Any:
        response = await cls._send_single_request(self, request)
        request.extensions.get(_RECEIVED, []).append(response)
        return response

    return send_single_request


def _make_sync_send(library: Any, cls: Any) -> Any:
    def send(self: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
        if (begin := _prepare(self, library, request, options)) is None:
            return cls.send(self, request, stream=stream, **options)
        result, sender, response = None, partial(cls.send, self, **options), None
        try:
            with closing(_send_steps(library, request, begin)) as steps:
                while (step := steps.send(result))[0] != "done":
                    result = _perform(sender, *step)
                    response = result if step[0] == "send" else response
            response = step[1]
            if response is None:
                return cls.send(self, request, stream=stream, **options)
            if not stream:
                response.read()
        except BaseException as error:
            _name_request(library, error, request)
            if response is not None:
                response.close()
            raise
        return response

    return send


def _perform(send: Any, action: "Action", target: Any) -> Any:
    """Perform one step."""
    match action:
        case "call":
            return target()
        case "fetch":
            with (
                suppress(Exception),  # also those of the program's event hooks
                closing(send(target, stream=True, follow_redirects=False)) as response,
            ):
                limit = SizeLimit(resolve_limit())
                return response.status_code, b"".join(map(limit.add, response.iter_bytes()))
        case "send":
            try:
                return send(target, stream=True)
            except Exception as error:
                if (response := _find_response(target, error)) is None:
                    raise
                return response
        case "open":
            return iter(target)
        case "next":
            try:
                return next(target, None)
            except Exception as error:  # noqa: BLE001 - raised where the program reads the body
                return error
        case _:
            return target.close()


def _make_async_send(library: Any, cls: Any) -> Any:
    async def send(self: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
        if (begin := _prepare(self, library, request, options)) is None:
            return await cls.send(self, request, stream=stream, **options)
        result, sender, response = None, partial(cls.send, self, **options), None
        try:
            with closing(_send_steps(library, request, begin)) as steps:
                while (step := steps.send(result))[0] != "done":
                    result = await _perform_async(sender, _get_chainer(self), *step)
                    response = result if step[0] == "send" else response
            response = step[1]
            if response is None:
                return await cls.send(self, request, stream=stream, **options)
            if not stream:
                await response.aread()
        except BaseException as error:
            _name_request(library, error, request)
            if response is not None:
                await response.aclose()
            raise
        return response

    return send


async def _perform_async(send: Any, chainer: Chainer | None, action: "Action", target: Any) -> Any:
    """Perform one step."""
    match action:
        case "call":
            return await _call_in_thread(chainer, target)
        case "fetch":
            with suppress(Exception):  # also those of the program's event hooks
                response = await send(target, stream=True, follow_redirects=False)
                limit = SizeLimit(resolve_limit())
                async with aclosing(response):
                    chunks = [limit.add(chunk) async for chunk in response.aiter_bytes()]
                return response.status_code, b"".join(chunks)
        case "send":
            try:
                return await send(target, stream=True)
            except Exception as error:
                if (response := _find_response(target, error)) is None:
                    raise
                return response
        case "open":
            return aiter(target)
        case "next":
            try:
                return await anext(target, None)
            except Exception as error:  # noqa: BLE001 - raised where the program reads the body
                return error
        case _:
            return await target.aclose()


def _name_request(library: Any, error: Any, request: Any) -> None:
    """Set the request of an error of the HTTP library, as its client does while reading a body."""
    if isinstance(error, library.RequestError):
        error.request = request


def _find_response(request: Any, error: Exception) -> Any:
    """Return the response for which an event hook of the program raised an error, or None."""
    received = request.extensions[_RECEIVED]
    if not received:
        return None
    received[-1].extensions[HOOK_ERROR] = error
    return received[-1]


async def _call_in_thread(chainer: Chainer | None, work: Callable[[], T]) -> T:
    """Run bookkeeping, in a worker thread if the index waits for a disk or a network."""
    if chainer is None or not chainer.index.is_blocking:
        return work()
    return await to_thread.run_sync(work)


Action = Literal["call", "fetch", "send", "open", "next", "close", "done"]
Steps = Generator[tuple[Action, Any], Any, Any]


def _send_steps(library: Any, request: Any, begin: Callable[[], Exchange | None]) -> Steps:
    """Send a request and, if its anchor is rejected or ignored, the original one.

    The steps are the same for synchronous and asynchronous clients: each is yielded to the caller, which
    performs it and sends the result back. The last one, `done`, has the response, or None if the request
    must be sent as it is.
    """
    exchange = yield "call", begin
    response = None
    if exchange is not None:
        try:
            if exchange.needs_probe:
                yield from _probe_steps(request, exchange)
            response = yield from _attempt_steps(library, request, exchange)
            if response is None:
                # A key of an event hook belongs to the first body; the hook may set another one.
                for name in filter(is_idempotency_key, list(request.headers)):
                    del request.headers[name]
                response = yield from _attempt_steps(library, request, exchange)
        except BaseException:  # the request failed or was cancelled
            _finish(exchange, None)
            raise
    yield "done", response


def _probe_steps(request: Any, exchange: Exchange) -> Steps:
    """Request the items that the server stores for the anchor; errors are not passed to the program."""
    try:
        found = yield from exchange.probe(_ProbeSource(request)).__await__()
        yield "call", partial(exchange.record_probe, found)
    except Exception:
        log.exception("the server could not be probed")
        exchange.decision = "untrusted"


class _ProbeSource:
    """A source of JSON below the URL of a request, with its credentials.

    The coroutine does not wait for an event loop: each `await` is a step of the caller.
    """

    def __init__(self, request: Any) -> None:
        self._request = request

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        request = self._request
        check_path(path)
        url = request.url.copy_with(path=request.url.path.rstrip("/") + path.removeprefix(_PATH))
        headers = [(k, v) for k, v in request.headers.multi_items() if _describes_account(k)]
        limits: dict[str, Any] = request.extensions.get("timeout") or {}
        timeout = {
            step: min(limits.get(step) or PROBE_SECONDS, PROBE_SECONDS)
            for step in ("connect", "read", "write", "pool")
        }
        answer = await _Step(
            "fetch",
            type(request)(
                method.upper(),
                url.copy_merge_params(query) if query else url,
                headers=headers,
                extensions={"timeout": timeout},
            ),
        )
        if answer is None:
            raise ServerFailed("the server could not be reached")
        status, body = answer
        if status != 200:
            raise RequestRefused(f"HTTP {status}", status=status)
        return decode(body)


class _Step:
    """An awaitable that passes one step to the code that drives the steps."""

    def __init__(self, action: "Action", target: Any) -> None:
        self._step = action, target

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._step)


def _describes_account(header: str) -> bool:
    """Return whether a header belongs to the client rather than to one request."""
    name = header.lower()
    return (
        not is_idempotency_key(name)
        and not name.startswith(("content-", "x-stainless-"))
        and name not in ("accept", "expect", "transfer-encoding")
    )


def _receive_steps(library: Any, request: Any, exchange: Exchange) -> Steps:
    """Send once, and return the response and the error of an event hook, if any.

    The response is None if an event hook sent a request on an anchor to another account.
    """
    sent = _rebuild(library, request, exchange.content)
    planned = sent.url, sent.headers.raw
    sent.extensions[_RECEIVED] = []
    try:
        response = yield "send", sent
    finally:
        del sent.extensions[_RECEIVED]
    is_changed = (sent.url, sent.headers.raw) != planned
    hook_error = response.extensions.pop(HOOK_ERROR, None)
    if response.request is sent:  # and not a request that follows a redirect
        if is_changed:
            _copy_headers(sent, request)
        response.request = request
        if isinstance(hook_error, library.HTTPError):
            hook_error.request = request
    if is_changed and _is_other_account(sent, exchange):
        was_chained = bool(exchange.rewritten)
        exchange.detach()
        if was_chained:
            yield "close", response
            return None, None
    return response, hook_error


def _attempt_steps(library: Any, request: Any, exchange: Exchange) -> Steps:
    """Send once, and return the response, or None if the original request must be sent instead."""
    response, hook_error = yield from _receive_steps(library, request, exchange)
    if response is None:
        return None
    if response.status_code >= 400:
        return (yield from _read_error_steps(library, response, exchange, hook_error))
    if hook_error:
        raise hook_error
    observer = yield "call", partial(exchange.observe, dict(response.headers.items()))
    source = response.stream
    chunks = yield "open", source
    buffered: list[bytes] = []
    is_last = False
    # A transport may return a response whose body was read already; then it is not read again.
    while observer.verdict == "waiting" or response.is_stream_consumed:
        chunk = yield "next", chunks
        if chunk is None:
            yield "call", partial(_finish, exchange, observer)
            response.extensions[BODY] = b"".join(buffered)
            break
        if isinstance(chunk, Exception):
            chunks = _FailedChunks(chunk)
            break
        buffered.append(chunk)
        is_last = _feed(observer, chunk)
    if observer.verdict == "resend":
        yield "close", response
        yield "call", partial(_heal, exchange)
        return None
    if is_last:
        yield "call", partial(_finish, exchange, observer)
    if not response.is_stream_consumed:
        response.stream = _make_stream_class(library)(buffered, chunks, source, exchange)
    return response


def _read_error_steps(
    library: Any, response: Any, exchange: Exchange, hook_error: Exception | None
) -> Steps:
    """Return an error response, or None if it rejects the anchor.

    The body is read only if it may be such a rejection. The program can then read it as if it was not.

    Args:
        library: The HTTP library.
        response: The response.
        exchange: The exchange.
        hook_error: The error that an event hook of the program raised for the response, if any.
    """
    if exchange.rewritten:
        source, chunks, buffered = response.stream, None, list[bytes]()
        if not response.is_closed:
            chunks = yield "open", source
            size = 0
            while isinstance(chunk := (yield "next", chunks), bytes):
                buffered.append(chunk)
                size += len(chunk)
                if size > MAX_ERROR_BYTES:
                    break
            if chunk is None:
                response.extensions[BODY] = b"".join(buffered)
            elif not isinstance(chunk, bytes):
                chunks = _FailedChunks(chunk)
        body = _decode_body(library, response)
        if (yield "call", partial(_is_chain_error, exchange, response.status_code, body)):
            yield "close", response
            yield "call", partial(_heal, exchange)
            return None
        if chunks is not None:
            response.stream = _make_stream_class(library)(buffered, chunks, source, exchange)
    if hook_error:
        raise hook_error
    yield "call", partial(_finish, exchange, None)
    return response


def _decode_body(library: Any, response: Any) -> bytes | None:
    """Return the start of the decoded body of a response, or None if it was not read completely."""
    raw: bytes | None = response.extensions.get(BODY)
    if raw is None:
        with suppress(library.ResponseNotRead):
            return response.content
        return None
    inflate = make_inflater(response.headers.get("content-encoding", ""))
    with suppress(zlib.error):
        if inflate is not None:
            return next(inflate(raw), b"")
    return raw


@cache
def _make_stream_class(library: Any) -> Any:
    """Return the class of response bodies that are observed while they are passed on."""
    bases = (_ObservedBody, library.AsyncByteStream, library.SyncByteStream)
    return type("ObservedStream", bases, {})


class _FailedChunks:
    """The rest of a body that could not be read: an iterator that raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        raise self._error

    def __aiter__(self) -> AsyncIterator[bytes]:
        raise self._error


class _ObservedBody:
    """A response body: first the buffered chunks, then the rest as they arrive."""

    def __init__(self, buffered: list[bytes], chunks: Any, source: Any, exchange: Exchange) -> None:
        self.buffered, self.chunks, self.source, self.exchange = buffered, chunks, source, exchange

    @property
    def elapsed(self) -> Any:
        """The duration of the exchange, after it is closed; the response reads it from its stream."""
        return getattr(self.source, "elapsed", None)

    def __iter__(self) -> Iterator[bytes]:
        yield from self.buffered
        for chunk in self.chunks:
            if _feed(self.exchange.observer, chunk):
                _finish(self.exchange, self.exchange.observer)
            yield chunk
        _finish(self.exchange, self.exchange.observer)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.buffered:
            yield chunk
        async for chunk in self.chunks:
            if _feed(self.exchange.observer, chunk):
                await self._call(_finish, self.exchange, self.exchange.observer)
            yield chunk
        await self._call(_finish, self.exchange, self.exchange.observer)

    def close(self) -> None:
        _finish_early(self.exchange)
        self.source.close()

    async def aclose(self) -> None:
        try:
            with CancelScope(shield=True):  # a cancelled request is reported, too
                await self._call(_finish_early, self.exchange)
        finally:
            await self.source.aclose()

    async def _call(self, work: Callable[..., None], *values: Any) -> None:
        if not self.exchange.is_finished:
            await _call_in_thread(self.exchange.chainer, partial(work, *values))


def _prepare(
    http_client: Any, library: Any, request: Any, options: dict[str, Any]
) -> Callable[[], Exchange | None] | None:
    """Return a function that starts an exchange for a request, or None to send it as it is."""
    chainer = _get_chainer(http_client)
    # Credentials that are added while the request is sent are not available here.
    auth = options.get("auth")
    if auth is None or auth is library.USE_CLIENT_DEFAULT:
        auth = http_client.auth
    if chainer is None or auth is not None:
        return None
    if not isinstance(request.stream, library.ByteStream):
        return None
    return partial(_begin, chainer, request)


def _begin(chainer: Chainer, request: Any) -> Exchange | None:
    try:
        headers = dict(request.headers.items())  # with lower-case names
        if request.url.userinfo:  # the client sends it in this header, and in no other way
            login = f"{request.url.username}:{request.url.password}".encode()
            headers["authorization"] = f"Basic {b64encode(login).decode()}"
        content = b"".join(request.stream)
        user = request.extensions.get(USER, "")
        exchange = chainer.begin(request.method, str(request.url), headers, content, user)
    except Exception:
        log.exception("a request could not be examined and is sent as written")
        return None
    if EXCHANGE in request.extensions:
        request.extensions[EXCHANGE] = exchange
    return exchange


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
    rebuilt.extensions = request.extensions  # event hooks of the program may add to it
    rebuilt.read()
    return rebuilt


def _is_other_account(sent: Any, exchange: Exchange) -> bool:
    """Return whether event hooks of the program have changed the account or the server of a request."""
    headers = dict(sent.headers.items())
    user = sent.extensions.get(USER, "")
    return exchange.chainer.scope(sent.method, str(sent.url), headers, user) != exchange.scope


def _copy_headers(sent: Any, request: Any) -> None:
    """Set the headers that event hooks of the program have set in the request that was sent."""
    for name, value in sent.headers.items():
        if name.encode() not in _REBUILT and request.headers.get(name) != value:
            request.headers[name] = value


def _feed(observer: ResponseObserver | None, chunk: bytes) -> bool:
    """Read a chunk, and return whether it was the last one of the response.

    The response is recorded before its last chunk is passed on, because the next request may follow
    immediately, and may be sent by another process.
    """
    try:
        if observer is not None:
            observer.feed(chunk)
            return observer.is_complete
    except Exception:
        log.exception("a response could not be read")
    return False


def _is_chain_error(exchange: Exchange, status: int, body: bytes | None) -> bool:
    try:
        return exchange.is_chain_error(status, body)
    except Exception:
        log.exception("a failed response could not be recorded")
        return False


def _heal(exchange: Exchange) -> None:
    try:
        exchange.heal()
    except Exception:
        log.exception("a lost response could not be recorded")


def _finish(exchange: Exchange, observer: ResponseObserver | None) -> None:
    """Record a response that was passed on completely, or report one that ended early."""
    if exchange.is_finished:
        return
    try:
        outcome = observer.finish() if observer else None
        if observer is None or observer.verdict != "resend":
            exchange.finish(outcome)
    except Exception:
        log.exception("a response could not be recorded")


def _finish_early(exchange: Exchange) -> None:
    """Record a response whose body was closed, because a client may stop reading at the last event."""
    observer = exchange.observer
    is_recorded = observer is not None and (observer.is_complete or exchange.is_background)
    _finish(exchange, observer if is_recorded else None)
