"""A transport with the face of the other one, which sends responses over WebSocket.

Everything else (objects, audits, counting) goes over HTTP as before. A refusal that comes as a message is
the same error as one that comes with a status; a connection that ends in the middle of an answer is a cut
stream. What only a connection remembered is lost with it: the next plan sends everything.
"""

import json
from asyncio import sleep, timeout
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from kedge.engines.sockets.connection import TOO_OLD, Connection
from kedge.engines.sockets.lanes import Lane, Lost, Message
from kedge.engines.sockets.pool import Pool
from kedge.engines.transport import Transport, tapped, unsaid
from kedge.errors import EngineError, RequestRefused, StreamCut, Unreachable
from kedge.loops import PerLoop
from kedge.planning import AnchorRecord

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.resources.responses.responses import AsyncResponsesConnection

    from kedge.engines.protocol import Tap

CONNECTIONS, LANES = 4, 16
"""How many connections there are at most, and how many responses at once on each of them."""
NEWEST = 256
"""How many of a Turn's newest records are looked through for what a connection remembers."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
LONGEST_WAIT = 60.0
"""Seconds that a server may ask us to wait for, as with the official client over HTTP."""
MOST_ROTATIONS = 3
"""How often a request is taken to a younger connection because the server found one too old."""


@dataclass(slots=True)
class SocketReply:
    """An answer on a lane; close it when done with it."""

    pool: Pool
    connection: Connection
    lane: Lane
    provider: str
    patience: float | None
    first: Message
    tell: "Callable[[bytes], None] | None"
    request_id: str = ""
    is_stream: bool = True

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The messages as they come, up to the last, each as an event of a stream."""
        message, came = self.first, list[bytes]()
        try:
            while True:
                if self.tell:
                    came.append(message.data)
                yield b"data: %b\n\n" % b" ".join(message.data.splitlines())
                if message.is_last:
                    return
                message = await self._next()
        finally:
            if self.tell:
                self.tell(b"\n".join(came))

    async def body(self) -> bytes:
        """Nothing: there are no whole answers here."""
        return b""

    async def aclose(self) -> None:
        """Give the lane back."""
        self.pool.leave(self.connection, self.lane)

    async def _next(self) -> Message:
        try:
            async with timeout(self.patience):
                return await self.lane.next()
        except (Lost, TimeoutError) as error:
            words = f"the answer broke off: {str(error) or 'the server fell silent'}"
            raise StreamCut(words, provider=self.provider, retryable=True) from None


class SocketTransport(Transport):
    """Sends responses to one server over WebSocket, and everything else over HTTP."""

    def __init__(
        self,
        make_client: "Callable[[], AsyncOpenAI]",
        provider: str,
        *,
        connections: int = CONNECTIONS,
        lanes: int = LANES,
    ) -> None:
        super().__init__(make_client, provider)
        self._pools = PerLoop(
            lambda: Pool(self._open, connections=connections, lanes=lanes),
            lambda pool: pool.aclose(),
        )

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._pools.aclose()
        await super().aclose()

    def packed(self, body: dict[str, Any]) -> bytes:
        """The request as it is sent: a socket always streams, so nobody asks for it."""
        return super().packed({name: body[name] for name in body if name != "stream"})

    def remembered(self, records: Iterable[AnchorRecord]) -> tuple[AnchorRecord, ...]:
        """The unstored records that a live connection makes good, as if they were stored."""
        pool = self._pools.known()
        live = pool.remembered() if pool else frozenset[str]()
        newest = (record for record, _ in zip(records, range(NEWEST), strict=False))
        return tuple(
            replace(record, stored=True)
            for record in (newest if live else ())
            if not record.stored and record.response_id in live
        )

    async def respond(
        self,
        content: bytes,
        body: dict[str, Any],
        *,
        retry: bool = True,
        tap: "Tap | None" = None,
    ) -> SocketReply:
        """Send a request for a response; the reply must be closed."""
        with tapped(tap, content):
            return await self._answered(content, body, retry=retry, tap=tap)

    async def _answered(
        self, content: bytes, body: dict[str, Any], *, retry: bool, tap: "Tap | None"
    ) -> SocketReply:
        left = self.client.max_retries if retry else 0
        rotations, pause = MOST_ROTATIONS, FIRST_PAUSE
        while True:
            try:
                return await self._sent(content, body.get("previous_response_id") or "", tap)
            except EngineError as error:
                if error.code == TOO_OLD and rotations:
                    rotations -= 1
                elif left and error.retryable:
                    left -= 1
                    after: float | None = getattr(error, "retry_after", None)
                    if after is not None and not 0 <= after <= LONGEST_WAIT:
                        raise  # whoever asked should know, rather than wait in silence
                    await sleep(pause if after is None else after)
                    pause = min(pause * 2, LONGEST_PAUSE)
                else:
                    raise

    async def _sent(self, content: bytes, after: str, tap: "Tap | None") -> SocketReply:
        pool = self._pools.get()
        connection, lane = await pool.take(after)
        try:
            first = await self._first(connection, lane, content)
        except BaseException:
            pool.leave(connection, lane)
            raise
        if first.is_refusal:
            pool.leave(connection, lane)
            raise self._refusal(first)

        def tell(came: bytes) -> None:
            if tap:
                tap(content, self.clean(came.decode("utf-8", "replace")).encode(), 200)

        told = tell if tap else None
        return SocketReply(pool, connection, lane, self.provider, self._patience(), first, told)

    async def _first(self, connection: Connection, lane: Lane, content: bytes) -> Message:
        from websockets.exceptions import WebSocketException

        try:
            async with timeout(self._patience()):
                await connection.send(lane, content)
                return await lane.next()
        except TimeoutError:
            words = "the server did not answer in time"
            raise Unreachable(words, provider=self.provider, retryable=True) from None
        except Lost as lost:
            words = f"nothing came of the answer: {lost}"
            raise StreamCut(words, provider=self.provider, retryable=True) from None
        except (WebSocketException, OSError) as error:
            words = f"the connection ended before the request was sent ({type(error).__name__})"
            raise Unreachable(words, provider=self.provider, retryable=True) from None

    def _refusal(self, message: Message) -> EngineError:
        status = message.said.get("status")
        given = message.error.get("headers")
        headers = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        words = json.dumps({"error": message.said.get("error")})
        return self.refusal(status if isinstance(status, int) else 400, words, headers)

    async def _open(self) -> "AsyncResponsesConnection":
        from websockets.exceptions import InvalidStatus, WebSocketException

        try:
            manager = self.client.responses.connect(extra_headers=unsaid(self.sdk))
            return await manager.enter()
        except InvalidStatus as error:
            raise self._closed_door(error) from None
        except (WebSocketException, OSError, TimeoutError) as error:
            words = f"could not open a WebSocket to the server ({type(error).__name__})"
            raise Unreachable(words, provider=self.provider, retryable=True) from None

    def _closed_door(self, error: Any) -> EngineError:
        response = error.response
        status: int = response.status_code
        words = (response.body or b"").decode("utf-8", "replace")
        refused = self.refusal(status, words, response.headers)
        # Many answer to a path that takes no sockets with 403 and without a word.
        if type(refused) is RequestRefused or (status == 403 and not words):
            said = f"this server takes no WebSocket ({status}): leave transport='websocket' out"
            return RequestRefused(said, provider=self.provider, status=status)
        return refused

    def _patience(self) -> float | None:
        """Seconds of silence after which an answer is given up: as long as the client waits."""
        given = self.client.timeout
        seconds = getattr(given, "read", given)
        return float(seconds) if isinstance(seconds, int | float) else None
