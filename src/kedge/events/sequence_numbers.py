"""Detect duplicate, late and missing events by their sequence numbers.

Events are numbered consecutively. A number seen before with the same event is a duplicate (a proxy
retried, or a stream was resumed too early); a number from a gap is a late event; a jump is a gap. Some
servers number every event 0, or restart with every item. Once a number was used for two different
events, the numbers are ignored: dropping an apparent duplicate would lose text.
"""

from typing import Literal

SequenceStatus = Literal["fresh", "duplicate", "late", "gap"]

WINDOW_SIZE = 1024
"""How many fingerprints are stored to distinguish a duplicate from a number used twice."""
MAX_GAPS = 64
"""How many gaps are stored to distinguish a late event from a duplicate."""


class SequenceChecker:
    """Checks the sequence numbers of one stream."""

    def __init__(self) -> None:
        self.reliable = True
        self._next = -1
        self._gaps: list[range] = []
        self._fingerprints = [0] * WINDOW_SIZE

    def classify(self, number: int, fingerprint: int) -> SequenceStatus:
        """Classify an event by its number; ``fingerprint`` identifies its content."""
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
        # A stream may start with any number: a resumed one starts in the middle.
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
        """Return whether the number was missing, and remove it from its gap."""
        for index, gap in enumerate(self._gaps):
            if number in gap:
                parts = (range(gap.start, number), range(number + 1, gap.stop))
                self._gaps[index : index + 1] = [part for part in parts if part]
                return True
        return False
