"""How far a server's memory is trusted.

A server that says it cannot chain is believed for good. One that forgot without a word may have lost
one response, may have been restarted, or may never remember anything. So chaining rests for a minute
and is then tried again; each further lapse makes the rest twice as long, up to an hour, and an answer
given with its memory makes it a minute again.
"""

from collections.abc import Callable
from typing import Literal

REST = 60.0
LONGEST_REST = 3_600.0


class Trust:
    """Whether one server may be chained on now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refuses = False
        self._lapses = 0
        self._until = 0.0

    @property
    def doubt(self) -> Literal["", "unsupported", "forgot"]:
        """Why it should not be chained on now; empty if it may be."""
        if self._refuses:
            return "unsupported"
        return "forgot" if self._lapses and self._clock() < self._until else ""

    def refused(self) -> None:
        """It says that it does not chain."""
        self._refuses = True

    def forgot(self) -> None:
        """It answered without the memory it was asked for."""
        rest = min(REST * 2.0**self._lapses, LONGEST_REST)
        self._lapses = min(self._lapses + 1, 16)
        self._until = self._clock() + rest

    def remembered(self) -> None:
        """It answered a chained request, and nothing speaks against its memory."""
        self._lapses = 0
