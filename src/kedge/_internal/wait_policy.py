"""How long a place waits before it repeats something: one type, so that every place also says what it repeats.

Each place has a constant of this type; "Where do retries wait?" in `docs/architecture.md` lists them. A policy has no
state: the place decides whether a failure is temporary, and counts how often it has repeated something.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_MAX_EXPONENT = 64
"""A pause that has grown this often is the longest one; a larger power would be no finite number."""


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """The pauses before the repetitions of something.

    Attributes:
        repeats: What is repeated, and why that is safe.
        first: The seconds before the first repetition.
        longest: The maximum of the seconds before a repetition.
        factor: How many times longer each pause is than the one before.
        spread: The part of each pause that is chosen at random, from 0 to 1, so that clients that failed at the same
            time do not return at the same time.
    """

    repeats: str
    first: float
    longest: float
    factor: float = 2.0
    spread: float = 0.0

    def pause(self, repetition: int) -> float:
        """Return the seconds before a repetition; the first one has number 0."""
        pause = min(self.first * self.factor ** min(repetition, _MAX_EXPONENT), self.longest)
        return pause * (1 - self.spread * random.random())  # noqa: S311

    def pauses(self) -> Iterator[float]:
        """Yield the seconds before each repetition, without an end."""
        return map(self.pause, count())

    def pauses_within(self, seconds: float) -> Iterator[float]:
        """Yield the seconds before each repetition until they add up to ``seconds``, at which the last one ends."""
        remaining = seconds
        pauses = self.pauses()
        while remaining > 0:
            pause = min(next(pauses), remaining)
            remaining -= pause
            yield pause
