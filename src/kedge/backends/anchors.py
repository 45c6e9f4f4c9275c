"""Which responses a stateful server upstream holds, found by content alone.

The server behind this one remembers what it was asked before. Each finished answer is noted under the
digest of everything up to and including it; a later request whose beginning has that digest can be
chained on it, whichever client sent it and under whichever id it knows the conversation. The notes
are bounded and live in memory: to lose one costs one full send.
"""

from collections import OrderedDict

from kedge.planning import AnchorRecord, covered_count, get_state
from kedge.planning.ledger import ledger_of
from kedge.turns import Turn

MOST = 10_000
TRIED = 64
"""How many of the newest prefixes of a Turn are looked up."""


class Anchors:
    """Records of one scope by digest, the least recently used ones dropped."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._records: OrderedDict[str, AnchorRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def note(self, turn: Turn) -> None:
        """Note what became of a Turn: its newest response, and which ones are lost."""
        for record in get_state(turn).anchors:
            if record.status == "lost":
                self._records.pop(record.digest, None)
            elif record.stored:
                self._records[record.digest] = record
                self._records.move_to_end(record.digest)
        while len(self._records) > self._most:
            self._records.popitem(last=False)

    def candidates(self, turn: Turn) -> tuple[AnchorRecord, ...]:
        """The noted responses that hold a beginning of this Turn, the longest first."""
        ledger, covered = ledger_of(turn), covered_count(turn)
        digests = (ledger.digest(count) for count in range(covered, max(covered - TRIED, 0), -1))
        return tuple(self._records[digest] for digest in digests if digest in self._records)
