"""Run a real server in a thread and record its requests."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kedge._internal.arguments import check_type
from kedge.errors import InvalidSetting, UnknownSetting
from kedge.server.faults import Faults
from kedge.server.models import PracticeModel
from kedge.server.practice_model.script import Script
from kedge.server.settings import Limits, Settings
from kedge.server.uvicorn_server import ServerThread

if TYPE_CHECKING:
    from kedge.server.request_log import RecordedRequest
    from kedge.server.state import ServerState

SHUTDOWN_SECONDS = 1.0
"""Seconds that a stopping server waits for unfinished responses."""


class TestClock:
    """The current time plus an offset that a test sets."""

    __test__ = False  # not a test class

    def __init__(self) -> None:
        self._offset = 0.0

    def __call__(self) -> float:
        """Return Unix time."""
        return time.time() + self._offset

    def advance(self, *, days: float = 0, seconds: float = 0) -> None:
        """Move the clock forward.

        Args:
            days: Days to add.
            seconds: Seconds to add.
        """
        self._offset += days * 86_400 + seconds


class TestServer(ServerThread):
    """A running server, for sync and async tests.

    Attributes:
        requests: Every request so far, with its body and the context that the model saw.
        clock: The server's clock, which a test may advance.
        faults: The injected faults: ``server.faults.set("cut_after_events=3", times=1)``.

    Args:
        settings: The settings; clock and faults are replaced by those of the test server.
    """

    __test__ = False  # not a test class

    def __init__(self, settings: Settings) -> None:
        self.requests: list[RecordedRequest] = []
        self.clock = TestClock()
        self.faults = settings.faults or Faults()
        test_settings = replace(settings, clock=self.clock, faults=self.faults)
        super().__init__(test_settings, self.requests.append)

    @property
    def running(self) -> int:
        """The number of responses in progress."""
        return self.call(lambda service: len(service.running))

    def set_answers(self, *answers: Mapping[str, Any] | str) -> None:
        """Set fixed answers; the practice model answers where none applies, and after a call without answers.

        Args:
            *answers: Entries of a script: ``{"when": "weather", "say": "Sunny."}``. Texts are the answers of each
                conversation in this order; the last text is repeated.

        Raises:
            InvalidScript: An entry is invalid.
            InvalidSetting: The server has another model than the practice model.
        """
        model = self.settings.model
        if not isinstance(model, PracticeModel):
            raise InvalidSetting("set_answers needs the practice model; remove model= from serve")
        if not answers:
            model.set_script(None)
            return
        model.set_script(Script.from_data({"answers": list(_iter_entries(answers))}))

    def forget(self) -> None:
        """Delete every stored response, to simulate a server that lost its data."""
        self.call(lambda service: service.forget())

    def hang_up(self) -> None:
        """Abort every WebSocket connection."""

        def hang_up(service: "ServerState") -> None:
            for socket in list(service.sockets):
                socket.hang_up()

        self.call(hang_up)

    def purge(self) -> int:
        """Delete the responses that have expired by the server's clock.

        Returns:
            The number of deleted responses.
        """
        return self.call(lambda service: service.responses.purge())


def _iter_entries(answers: Sequence[Mapping[str, Any] | str]) -> Iterator[Mapping[str, Any]]:
    """Yield entries of a script; a text is the answer of the next turn, the last text that of all further turns."""
    last_turn = sum(isinstance(answer, str) for answer in answers)
    turn = 0
    for answer in answers:
        if not isinstance(answer, str):
            yield answer
            continue
        turn += 1
        if turn == last_turn:
            yield {"say": answer}
        else:
            yield {"say": answer, "turn": turn}


@contextmanager
def serve(settings: Settings | None = None, **changes: Any) -> Generator[TestServer]:
    """Run a server inside the block.

    Args:
        settings: Settings of the server.
        changes: Members of ``Settings`` that replace those of ``settings`` or the defaults.

    Yields:
        The running server.

    Raises:
        InvalidSetting: A setting has an invalid value; ``UnknownSetting`` if there is none of this name.

    Example:
        >>> with serve(retention=60) as server:
        ...     client = OpenAI(base_url=server.base_url, api_key="any")
    """
    known = Settings.__dataclass_fields__
    for name in changes.keys() - known:
        raise UnknownSetting(name, known, "a server")
    if settings is None:
        base = Settings(limits=Limits(shutdown_seconds=SHUTDOWN_SECONDS))
    else:
        check_type("settings", Settings, settings)
        base = settings
    server = TestServer(replace(base, **changes))
    server.start()
    try:
        yield server
    finally:
        server.stop()
