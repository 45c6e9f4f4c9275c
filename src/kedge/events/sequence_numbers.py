"""Sequence numbers: what they tell about events that came twice, late or never.

Events are numbered one by one. A number seen before with the same event is a duplicate (a proxy that
retried, a stream that was resumed a little too early); a number from a gap is a late event; a jump is a
gap. Some servers number everything 0, or start anew with every item. As soon as one number stands for
two different events, the numbers are not believed any more: dropping what looks like a duplicate would
then lose text.
"""

from typing import Literal

SequenceStatus = Literal["fresh", "duplicate", "late", "gap"]

WINDOW_SIZE = 1024
"""How many events are remembered to tell a duplicate from a number used twice."""
MAX_GAPS = 64
"""How many gaps are remembered to tell a late event from a duplicate."""


class SequenceChecker:
    """The numbers of one stream."""

    def __init__(self) -> None:
        self.reliable = True
        self._next = -1
        self._gaps: list[range] = []
        self._fingerprints = [0] * WINDOW_SIZE

    def classify(self, number: int, fingerprint: int) -> SequenceStatus:
        """Judge an event by its number; ``fingerprint`` tells one event from another."""
        expected = self._next
        if not self.reliable:
            return "fresh"
        if number < expected:
            return self._classify_old(number, fingerprint)
        self._next = number + 1
        self._fingerprints[number % WINDOW_SIZE] = fingerprint
        if number == expected:
            return "fresh"
        self._gaps = [*self._gaps, range(max(expected, 0), number)][-MAX_GAPS:]
        # The first number of a stream may be any: a resumed stream starts in the middle.
        return "fresh" if expected < 0 else "gap"

    def _classify_old(self, number: int, fingerprint: int) -> SequenceStatus:
        recent = number >= self._next - WINDOW_SIZE
        if self._fill_gap(number):
            if recent:
                self._fingerprints[number % WINDOW_SIZE] = fingerprint
            return "late"
        if recent and self._fingerprints[number % WINDOW_SIZE] != fingerprint:
            self.reliable = False
            return "fresh"
        return "duplicate"

    def _fill_gap(self, number: int) -> bool:
        """Whether the number was missing; from now on it is not."""
        for index, gap in enumerate(self._gaps):
            if number in gap:
                parts = (range(gap.start, number), range(number + 1, gap.stop))
                self._gaps[index : index + 1] = [part for part in parts if part]
                return True
        return False
