"""Sync versions of the streams and methods of engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kedge._internal.event_loops import ResourceT, SyncCall, SyncFacade, delegate, wrap_method
from kedge.engines.base import Engine, RunStream
from kedge.events import Event

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_Request = tuple[Callable[[], Awaitable[Any]], "Future[Any]"]


def wrap_stream(
    method: Callable[Concatenate[ResourceT, P], RunStream[R]],
) -> "Callable[Concatenate[SyncFacade[ResourceT], P], SyncStream[R]]":
    """Return the sync version of a method that returns a stream, for a facade."""

    @wraps(method)
    def call(facade: SyncFacade[ResourceT], *args: P.args, **kwargs: P.kwargs) -> SyncStream[R]:
        return SyncStream(method(facade._target, *args, **kwargs))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return call


class SyncStream(Generic[R]):
    """The events of a run, for sync code.

    The run continues only when the next event is requested. It is one task of the background loop: cancel
    scopes and timeouts inside a run belong to the task that entered them.

    Args:
        source: The async stream. Its properties can be used, such as ``plan`` or ``reply``.

    Example:
        ```python
        with conversation.sync.stream("Hello") as stream:
            for event in stream:
                ...
        print(stream.reply.text)
        ```
    """

    def __init__(self, source: RunStream[R]) -> None:
        self.source: Any = source  # a Stream, a ChatStream or a ConversationStream
        self._requests: asyncio.Queue[_Request | None] = asyncio.Queue()
        self._call: SyncCall[None] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        source = self.source  # the run must not refer to this object, which ends it when dropped
        event = self._request(lambda: anext(source, None))
        if event is None:
            raise StopIteration
        return event

    def text_deltas(self) -> Iterator[str]:
        """Consume the events and yield the text of the answer as it arrives."""
        deltas: AsyncIterator[str] = self.source.text_deltas()
        while (delta := self._request(lambda: anext(deltas, None))) is not None:
            yield delta

    @property
    def reply(self) -> Any:
        """The reply; available once the stream has ended."""
        return self.source.reply

    def finish(self) -> R:
        """Consume the remaining events, close the run and return the result."""
        return self._request(self.source.finish)

    def close(self) -> None:
        """Close the run; events that were not consumed are lost."""
        call, self._call = self._call, None
        if call is not None and not call.done:  # an interrupt may have ended it already
            call.loop.call_soon_threadsafe(self._requests.put_nowait, None)
            call.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._call is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._call.loop.call_soon_threadsafe(self._requests.put_nowait, None)

    def _request(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._call is None or self._call.done:
            self._call = SyncCall(_serve(self.source, self._requests)).start()
        answer: Future[T] = Future()
        try:
            self._call.loop.call_soon_threadsafe(self._requests.put_nowait, (work, answer))
            return self._call.wait_for(answer)
        except BaseException:
            # An interrupt can also occur before the wait; then the run does not read another request.
            if not answer.done():
                self._call.end()
            raise


async def _serve(source: RunStream[Any], requests: "asyncio.Queue[_Request | None]") -> None:
    """Run the requests to a stream, and close the stream at the end."""
    async with source:
        while await _serve_next(requests):
            pass


async def _serve_next(requests: "asyncio.Queue[_Request | None]") -> bool:
    """Run a request; afterwards nothing refers to it, because the traceback of an error refers to its sync stream."""
    request = await requests.get()
    if request is None:
        return False
    work, answer = request
    try:
        answer.set_result(await work())
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised where the event was requested
        answer.set_exception(error)
    return True


class SyncEngine(SyncFacade[Engine]):
    """The methods of an engine for sync code; see ``Engine.sync``."""

    run = wrap_method(Engine.run)
    ask = wrap_method(Engine.ask)
    stream = wrap_stream(Engine.stream)
    poll = wrap_method(Engine.poll)
    cancel = wrap_method(Engine.cancel)
    probe_and_plan = wrap_method(Engine.probe_and_plan)
    plan = delegate(Engine.plan)

    @property
    def name(self) -> str:
        """The name of the provider."""
        return self._target.name
