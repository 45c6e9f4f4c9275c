"""A time that passes only while something waits, for tests of pauses."""


class FakeTime:
    """A clock, and a function that waits by advancing it.

    Args:
        now: The Unix time at the start.
    """

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.pauses: list[float] = []
        """The seconds of each wait, in order."""

    def clock(self) -> float:
        """Return the time."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.pauses.append(seconds)
        self.now += seconds
