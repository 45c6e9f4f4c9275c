"""The HTTP client of engines: the headers of an account, timeouts and retries, over aiohttp.

The clients of the openai and anthropic packages have two more layers over aiohttp, which need a quarter of the CPU
time of a turn, and to import one of them takes longer than the first answer. An engine accepts them too
(``sdk_client``).
"""

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError

from kedge._internal.urls import is_loopback
from kedge._internal.wait_policy import WaitPolicy
from kedge.engines.http_errors import ErrorBuilder, find_root_cause
from kedge.engines.loading import is_loading
from kedge.engines.raw_response import RawResponse
from kedge.engines.response_bytes import read_start, resolve_limit
from kedge.engines.transport import KEEP_ALIVE, Content, Headers, Query
from kedge.errors import CannotConnect, EngineError, ServerFailed

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

DEFAULT_MAX_RETRIES = 2
REQUEST_WAITS = WaitPolicy(
    "a request that was not answered, or with a status that may be temporary",
    first=0.5,
    longest=8.0,
    spread=0.25,
)
"""Seconds before the first repetition of a request, doubled for each further one, and the maximum."""
MAX_RETRY_AFTER = 120.0
"""The longest delay in seconds that a server may request; after a longer one the caller gets the error."""
MAX_CONNECTIONS = 1_000
MAX_HEADER_BYTES = 64 * 1024
"""The maximum size of a header of a response; some gateways describe their decisions in several kilobytes."""
CLOSE_TURNS = 2
"""Turns of the loop in which it learns which connections were closed while it was busy. A request that is not repeated
must not be sent over one of them."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to wait for a connection, and for the next bytes of a response; None for no limit."""

    connect: float | None = 10.0
    read: float | None = 600.0

    @classmethod
    def of(cls, value: Any) -> "Timeouts":
        """Return the timeouts for a number of seconds, None, or an object with ``connect`` and ``read``."""
        return cls(getattr(value, "connect", value), getattr(value, "read", value))


DEFAULT_TIMEOUTS = Timeouts()


class HttpClient:
    """Sends requests to one server; it belongs to one event loop.

    Args:
        errors: Builds the errors of requests.
        headers: The headers of every request, such as those with the key.
        timeouts: How long to wait.
        max_retries: How many times a request is repeated that was not answered, or with a status that
            may be temporary.
        max_response_bytes: The maximum size of a response; None for the default.
    """

    # The session raises a RuntimeError if it was closed while it was used.
    read_errors: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError, RuntimeError)

    def __init__(
        self,
        errors: ErrorBuilder,
        headers: Mapping[str, str],
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        max_retries: int = DEFAULT_MAX_RETRIES,
        max_response_bytes: int | None = None,
    ) -> None:
        self.errors = errors
        self.max_response_bytes = resolve_limit(max_response_bytes)
        self.max_retries = max_retries
        self.timeouts = timeouts
        self._proxy = find_proxy(errors.base_url)
        self._options: Any = {"allow_redirects": False, "proxy": self._proxy}
        self._ssl: Any = None
        if errors.base_url.startswith("https:"):
            import httpx2  # with its certificates: those of the system, or of `SSL_CERT_FILE`

            try:
                self._ssl = httpx2.create_ssl_context()
            except OSError as error:
                raise CannotConnect(
                    f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error.strerror or error}"
                ) from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_ALIVE, ssl=self._ssl or True
            ),
            # Also for addresses without a name: a load balancer may keep its choice of a server in a cookie.
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            headers=headers,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=timeouts.connect, sock_read=timeouts.read
            ),
        )

    async def send(
        self,
        method: str,
        url: str,
        content: Content,
        headers: Headers,
        *,
        query: Query,
        retry: bool,
    ) -> RawResponse:
        """Send a request and return the response, which has a status of success.

        Raises:
            EngineError: The server cannot be reached, or answered with an error.
        """
        retries = self.max_retries if retry else 0
        if not retries:
            await _let_connections_close()
        while True:
            try:
                response = await self._session.request(
                    method, url, data=content, headers=headers, params=query, **self._options
                )
            except self.read_errors as exc:
                answer_error = self._build_answer_error(exc)
                if answer_error is not None:
                    raise answer_error from self.errors.find_cause(exc)
                timed_out = isinstance(exc, TimeoutError)  # also if its cause is a cancellation
                error = self.errors.build_unreachable(exc, timed_out=timed_out)
                error.retryable = not (self._session.closed or isinstance(exc, aiohttp.InvalidURL))
                error.__cause__ = self.errors.find_cause(exc)
            else:
                if response.status < 300:
                    # To release it closes the connection if the body has not arrived completely.
                    return RawResponse(
                        self,
                        self.errors,
                        source=response.content.iter_any(),
                        release=response.release,
                        headers=response.headers,
                    )
                with closing(response):  # also if the call is cancelled
                    body = await read_start(response.content.iter_any(), self.read_errors)
                text = body.decode("utf-8", "replace")
                error = self.errors.build_error(response.status, text, response.headers, url=url)
            retries = await wait_to_retry(error, retries, self.max_retries)

    def _build_answer_error(self, exc: Exception) -> EngineError | None:
        """Return the error of a server that has begun to answer, or None if it may not have received the request.

        The answer was generated; a repeated request would be paid for again, and fail in the same way.
        """
        cause = find_root_cause(exc)
        if isinstance(cause, ContentEncodingError):
            message = "the server compresses its response in a form that was not requested"
            return ServerFailed(message, provider=self.errors.provider)
        if isinstance(cause, HttpProcessingError):
            return self.errors.build_invalid_response(cause)
        if isinstance(cause, aiohttp.ServerDisconnectedError) and not isinstance(
            cause.message, str
        ):
            return self.errors.build_cut(cause)  # it has a part of the headers
        return None

    async def open_socket(self, url: str, **options: Any) -> "ClientConnection":
        """Open a WebSocket; ``options`` are those of ``websockets``."""
        from websockets.asyncio.client import connect

        return await connect(
            f"ws{url.removeprefix('http')}",
            additional_headers=self._session.headers,
            user_agent_header=None,
            max_size=None,
            compression=None,
            proxy=self._proxy,
            ssl=self._ssl,
            **options,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def _let_connections_close() -> None:
    for _ in range(CLOSE_TURNS):
        await asyncio.sleep(0)


async def wait_to_retry(error: EngineError, retries: int, max_retries: int) -> int:
    """Wait before a request is repeated.

    Args:
        error: Why it failed.
        retries: How many times it may still be repeated.
        max_retries: How many times it could be repeated at first.

    Returns:
        How many times it may be repeated after that.

    Raises:
        EngineError: The error, if it is not temporary, or the request must not be repeated again.
    """
    delay = error.retry_after
    if is_loading(error):  # for which a transport waits longer
        raise error
    if not retries or not error.retryable or (delay or 0) > MAX_RETRY_AFTER:
        raise error
    await asyncio.sleep(delay or REQUEST_WAITS.pause(max_retries - retries))
    return retries - 1


def find_proxy(url: str) -> str | None:
    """Return the proxy for an address, from the environment or the settings of the system; none for this machine."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy
