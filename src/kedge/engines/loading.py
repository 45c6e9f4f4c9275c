"""Wait for a server that is loading its model.

llama.cpp, for example, answers 503 with "Loading model" until the model is in memory, which may take minutes. A request
that it rejects for that has no effect, so it is repeated for longer than one that a busy server rejects.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar

import anyio

from kedge._internal.wait_policy import WaitPolicy
from kedge.errors import EngineError
from kedge.observe import get_logger

log = get_logger("kedge.engines")

MAX_LOADING_SECONDS = 300.0
"""The seconds to wait for a model altogether."""
LOADING_WAITS = WaitPolicy(
    "a request that a server rejects while it loads its model, which has no effect",
    first=0.5,
    longest=5.0,
)
_LOADING = re.compile(
    r"\bload(ing|s) (the |its )?model\b|\bmodel\b.{0,100}\b(is|being) (still |currently )?load(ing|ed)\b",
    re.IGNORECASE,
)

LoadingListener = Callable[[float], None]
loading_listener: ContextVar[LoadingListener | None] = ContextVar("loading_listener", default=None)
"""Called with the seconds waited so far before each pause of a request in this context."""


def is_loading(error: EngineError) -> bool:
    """Return whether a server rejected a request because it is loading its model."""
    return error.status == 503 and _LOADING.search(error.message) is not None


class LoadingWait:
    """The time that one request has waited for a model."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._repetitions = 0

    async def pause(self, error: EngineError) -> None:
        """Wait before a request is repeated, for as long as the server asks or twice as long as the last time.

        Raises:
            EngineError: The error, if the server is not loading its model, or takes too long.
        """
        pause = LOADING_WAITS.pause(self._repetitions)
        if error.retry_after is not None:
            pause = error.retry_after
        if not is_loading(error) or self.seconds + pause > MAX_LOADING_SECONDS:
            raise error
        if not self.seconds:
            log.info("the server is loading its model; waiting for up to %d s", MAX_LOADING_SECONDS)
        listener = loading_listener.get()
        if listener is not None:
            listener(self.seconds)
        await anyio.sleep(pause)
        self.seconds += pause
        self._repetitions += 1
