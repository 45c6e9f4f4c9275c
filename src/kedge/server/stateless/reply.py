"""One stateless answer while it is written: told as it comes, or given whole.

It ends in one of three ways: whole, refused by an error that its voice words, or not at all because
its client went away. Nothing is kept.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from kedge.server.access import report
from kedge.server.errors import SERVER_FAILED, ApiError
from kedge.server.models import Counted, Piece, written
from kedge.server.opening import Opening
from kedge.server.output import Writer, count_answer
from kedge.server.patience import Patience
from kedge.server.service import Service
from kedge.server.sse import HEADERS, Outbox, Watch
from kedge.server.stateless.question import Asked
from kedge.server.stopping import stopping
from kedge.server.weighing import count_ahead


class Voice(Protocol):
    """How one API tells an answer.

    The bytes are frames of a stream; ``writer`` holds what was written so far, the newest piece
    included.
    """

    def begin(self, input_tokens: int) -> bytes:
        """Open the stream."""
        ...

    def tell(self, piece: Piece, writer: Writer) -> bytes:
        """Tell of one piece."""
        ...

    def end(self, writer: Writer, counted: Counted) -> bytes:
        """Close the stream."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Break the stream off with an error."""
        ...

    def whole(self, writer: Writer, counted: Counted) -> Mapping[str, Any]:
        """Give the whole answer at once."""
        ...


class Reply:
    """One answer. ``stop`` ends it from outside."""

    def __init__(self, service: Service, asked: Asked, writer: Writer, voice: Voice) -> None:
        self._service = service
        self._asked = asked
        self._writer = writer
        self._voice = voice
        self._patience = Patience(service.settings.limits.answer_seconds, self._on_waiting)
        self._watch: Callable[[], None] | None = None
        self.error: ApiError | None = SERVER_FAILED()  # until the answer is whole
        self.begun = False
        """Whether the model has said anything."""
        self.grace = asked.model.grace
        self._gone = False
        service.running.add(self)

    async def whole(self, watch: Callable[[], None]) -> Mapping[str, Any] | None:
        """Write the answer and give it whole; None where nobody is left to read it."""
        self._watch = watch
        given: Mapping[str, Any] = {}
        try:
            with self._patience:
                async for piece in self._pieces():
                    self._writer.take(piece)
                await count_ahead((self._writer.items, self._writer.thoughts))
                given = self._voice.whole(self._writer, self._counted())
                self.error = None
        except ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            report("the model failed", error)
        finally:
            self.end()
        if self.refused is not None:
            raise self.refused
        return None if self._gone else given

    async def live(
        self, put: Callable[[bytes], Awaitable[None]], watch: Callable[[], None]
    ) -> None:
        """Write the answer and tell it as it comes."""
        self._watch = watch
        try:
            with self._patience:
                await put(self._voice.begin(self._asked.input_tokens))
                async for piece in self._pieces():
                    self.begun = True
                    self._writer.take(piece)
                    if told := self._voice.tell(piece, self._writer):
                        await put(told)
                await count_ahead((self._writer.items, self._writer.thoughts))
                self.error = None
        except ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            report("the model failed", error)
        finally:
            self.end()
        if self.error is None:
            await put(self._voice.end(self._writer, self._counted()))
        elif self.refused is not None:
            await put(self._voice.fail(self.refused))

    def stop(self, status: str) -> None:
        """End the answer from outside, as ``failed`` or as ``cancelled``."""
        self._gone = status == "cancelled"
        self._patience.end()

    @property
    def refused(self) -> ApiError | None:
        """Why there is no answer; None where there is one, or nobody to read it."""
        return None if self._gone else self.error

    def end(self) -> None:
        """Let go of everything."""
        self._service.running.discard(self)

    def _on_waiting(self) -> None:
        if self._watch is not None:
            self._watch()

    async def _pieces(self) -> AsyncIterator[Piece]:
        prompt = self._asked.prompt
        async with written(self._asked.model, prompt) as pieces:
            async for piece in stopping(pieces, prompt.stop) if prompt.stop else pieces:
                yield piece

    def _counted(self) -> Counted:
        return count_answer(self._writer, self._asked.input_tokens)


class ReplyStream:
    """The answer to a streaming request: an ASGI response that runs the model."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every frame."""
        opening = Opening(send, self._reply.grace)

        async def put(frames: bytes) -> None:
            if not opening.released and self._reply.begun:
                await opening.release()
            await outbox.put(frames)

        try:
            await opening({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async with Outbox(opening) as outbox:
                with Watch(self._reply, receive) as watch:
                    await self._reply.live(put, watch.start)
        finally:
            self._reply.end()
            opening.close()
        if self._reply.refused is not None and not opening.released:
            raise self._reply.refused
        await opening.release()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
