"""``serve``: one real server in a thread of its own, with a view of what it was sent."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kedge.server.settings import Settings
from kedge.server.thread import ServerThread

if TYPE_CHECKING:
    from kedge.server.access import Exchange


class TestServer(ServerThread):
    """A running server. Use it from sync and async tests alike.

    ``requests`` holds every request so far, with its body and with the context the model saw.
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(self, settings: Settings) -> None:
        self.requests: list[Exchange] = []
        super().__init__(settings, self.requests.append)


@contextmanager
def serve(**settings: Any) -> Generator[TestServer]:
    """Run a server for as long as the block lasts."""
    server = TestServer(Settings(**settings))
    server.start()
    try:
        yield server
    finally:
        server.stop()
