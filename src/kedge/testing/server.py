"""``serve``: one real server in a thread of its own, with a view of what it was sent."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kedge.server.faults import Faults
from kedge.server.settings import Limits, Settings
from kedge.server.thread_server import ServerThread

if TYPE_CHECKING:
    from kedge.server.request_log import RecordedRequest
    from kedge.server.state import ServerState

SHUTDOWN_SECONDS = 1.0
"""A test does not wait long for what it left running."""


class TestClock:
    """The real time, plus what the test has added to it."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(self) -> None:
        self._offset = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return time.time() + self._offset

    def advance(self, *, days: float = 0, seconds: float = 0) -> None:
        """Let time pass."""
        self._offset += days * 86_400 + seconds


class TestServer(ServerThread):
    """A running server. Use it from sync and async tests alike.

    ``requests`` holds every request so far, with its body and with the context the model saw.
    ``clock`` is the server's clock, which a test may advance; ``faults`` are what the server does
    wrong on purpose: ``server.faults.set("cut_after_events=3", times=1)``.
    """

    __test__ = False  # likewise

    def __init__(self, settings: Settings) -> None:
        self.requests: list[RecordedRequest] = []
        self.clock = TestClock()
        self.faults = settings.faults or Faults()
        made = replace(settings, clock=self.clock, faults=self.faults)
        super().__init__(made, self.requests.append)

    @property
    def running(self) -> int:
        """How many responses are being written right now."""
        return self.call(lambda service: len(service.running))

    def forget(self) -> None:
        """Delete every stored response, as a server does that lost its memory."""
        self.call(lambda service: service.forget())

    def hang_up(self) -> None:
        """Break every WebSocket connection off, as networks do."""

        def hang_up(service: "ServerState") -> None:
            for socket in list(service.sockets):
                socket.hang_up()

        self.call(hang_up)

    def purge(self) -> int:
        """Delete what has expired by the server's clock; say how many responses that were."""
        return self.call(lambda service: service.responses.purge())


@contextmanager
def serve(settings: Settings | None = None, **changes: Any) -> Generator[TestServer]:
    """Run a server for as long as the block lasts.

    Takes ``Settings``, or the members of it that differ from their defaults.
    """
    given = settings or Settings(limits=Limits(shutdown_seconds=SHUTDOWN_SECONDS))
    server = TestServer(replace(given, **changes))
    server.start()
    try:
        yield server
    finally:
        server.stop()
