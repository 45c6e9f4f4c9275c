"""Send the requests of an openai client by aiohttp, without the layers of the client and of httpx.

Those layers need more CPU time than the request itself. The address, the headers, the key, the timeouts and the
number of retries are those of the client, and so are the rules for retries.
"""

import random
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING
from urllib.request import getproxies

from anyio import sleep

from kedge.engines.retry_after import parse_retry_after

if TYPE_CHECKING:
    import aiohttp
    from multidict import CIMultiDict
    from openai import AsyncOpenAI

MAX_CONNECTIONS = 1_000
KEEPALIVE_SECONDS = 5.0
"""The connections of a client, and for how long an idle one is kept open."""
INITIAL_BACKOFF = 0.5
MAX_BACKOFF = 8.0
MAX_RETRY_AFTER = 120.0
"""Seconds before the first retry, between two retries at most, and at most if the server demands them."""
RETRY_COUNT_HEADER = "x-stainless-retry-count"


class DirectClientFactory:
    """Creates openai clients for which a ``DirectSender`` may send requests.

    A client that a caller created is no such client: it may have an authentication, hooks or a transport of its
    own, which only the client itself applies.

    Args:
        make: Creates a client with this configuration of TLS.
    """

    def __init__(self, make: "Callable[[ssl.SSLContext], AsyncOpenAI]") -> None:
        self._make = make

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        """The certificates that are trusted, which take long to load."""
        import httpx2

        return httpx2.create_ssl_context()

    def __call__(self) -> "AsyncOpenAI":
        """Return a new client."""
        return self._make(self.ssl_context)


class DirectResponse:
    """A response of aiohttp, with those members of an httpx response that are used here."""

    __slots__ = ("_response", "headers", "status_code")

    def __init__(self, response: "aiohttp.ClientResponse") -> None:
        self._response = response
        self.headers: Mapping[str, str] = response.headers
        self.status_code = response.status

    async def aread(self) -> bytes:
        """Return the complete body."""
        return await self._response.read()

    async def aiter_bytes(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        async for chunk in self._response.content.iter_any():
            yield chunk

    async def aclose(self) -> None:
        """Release the connection; it is closed if the body was not read to its end."""
        self._response.release()


class DirectSender:
    """Sends requests in place of an openai client, in the running event loop.

    Args:
        client: The client.
        ssl_context: The certificates that are trusted.
        omitted: The names of headers of the client that are not sent.
    """

    def __init__(
        self, client: "AsyncOpenAI", ssl_context: ssl.SSLContext, omitted: Iterable[str]
    ) -> None:
        import aiohttp
        import httpx2

        timeout = httpx2.Timeout(client.timeout)
        headers = _merge_headers(
            client.auth_headers, client.default_headers, dict.fromkeys(omitted)
        )
        headers[RETRY_COUNT_HEADER] = "0"
        if timeout.read is not None:
            headers["x-stainless-read-timeout"] = str(timeout.read)
        self._retries = client.max_retries
        self._retried_errors = aiohttp.ClientConnectionError
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_SECONDS, ssl=ssl_context
            ),
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # like httpx, also for addresses of hosts
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                connect=timeout.pool, sock_connect=timeout.connect, sock_read=timeout.read
            ),
        )

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, retry: bool = True
    ) -> DirectResponse:
        """Send a request, and return the response, with any status, after the last retry."""
        retries, taken = self._retries if retry else 0, 0
        while True:
            try:
                response = await self._session.post(
                    url, data=body, headers=headers, allow_redirects=False
                )
                delay = None if response.ok else get_retry_delay(response.status, response.headers)
                if delay is None or taken >= retries:
                    return DirectResponse(response)
                response.close()
            except self._retried_errors:
                if taken >= retries:
                    raise
                delay = 0.0
            backoff = min(INITIAL_BACKOFF * 2**taken, MAX_BACKOFF)
            await sleep(delay or backoff * random.uniform(0.75, 1.0))  # noqa: S311
            taken += 1
            headers = {**headers, RETRY_COUNT_HEADER: str(taken)}

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()


def _merge_headers(*mappings: Mapping[str, object]) -> "CIMultiDict[str]":
    """Return the headers of all mappings; a later one replaces those before, or omits them if it is no text."""
    from multidict import CIMultiDict

    headers = CIMultiDict[str]()
    for name, value in chain.from_iterable(mapping.items() for mapping in mappings):
        headers.pop(name, None)
        if isinstance(value, str):
            headers[name] = value
    return headers


def get_retry_delay(status: int, headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server demands before a retry, 0 if it does not say, or None for no retry."""
    after = parse_retry_after(headers) or 0.0
    advice = headers.get("x-should-retry")
    temporary = status in (408, 409, 429) or status >= 500
    if after > MAX_RETRY_AFTER or advice == "false" or not (temporary or advice == "true"):
        return None
    return after


def can_send_directly() -> bool:
    """Return whether aiohttp is installed and no proxy is configured: httpx has rules of its own for those."""
    proxies = getproxies()
    return find_spec("aiohttp") is not None and not any(map(proxies.get, ("http", "https", "all")))
