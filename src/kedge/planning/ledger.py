"""The ledger of a Turn: rolling digests, byte sums and open calls of every prefix of its body.

``d0 = H(tag)``, ``di = H(d(i-1) || H(canonical(block_i)))``: one digest stands for a whole prefix, and
the next one costs two small hashes. The ledger is kept in the Turn's memo and shared along its lineage:
planning a Turn that grew by k blocks costs k. A Turn that branched off takes a copy of what it shares.
A ledger only ever grows, under its lock, so that whoever reads a prefix of it needs none.

Only content is recorded here, never ids or metadata, so an equal rebuild has an equal ledger. The
canonical form of a block is hashed once and kept in the block itself.
"""

import hashlib
import struct
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from kedge.planning.calls import Pairing, Problem
from kedge.planning.canonical import canonical_json
from kedge.turns import Block, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn

ALGORITHM = "sha256"
ITEM_BYTES = 48
"""About what the wire form of a block weighs beyond its canonical form."""

_SIZE = 32
_sha256 = hashlib.sha256
_pack, _unpack = struct.Struct("<Q").pack, struct.Struct("<Q").unpack
# A block keeps its leaf: the digest of its canonical form, then its size; empty for reasoning. The
# slot is set past the frozen dataclass, because it is derived from what is frozen.
_set_leaf = Block.leaf.__set__  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportAttributeAccessIssue, reportOptionalMemberAccess]
_START = _sha256(b"kedge.turn/1").digest()


class Ledger:
    """What planning knows about every prefix of a sequence of blocks.

    Positions count all blocks, reasoning included; counts tell how many of them the digests cover.
    """

    __slots__ = ("barriers", "digests", "length", "lock", "pairing", "skipped", "sums", "tail")

    def __init__(self) -> None:
        self.length = 0
        self.digests = bytearray(_START)
        self.sums = array("Q", [0])  # bytes of the covered blocks up to each digest
        self.skipped: list[int] = []  # positions of the blocks that no digest covers
        self.barriers: list[int] = []  # positions of compaction items
        self.pairing = Pairing()
        self.tail: tuple[int, Pairing] | None = (
            None  # the account from a barrier on, once asked for
        )
        self.lock = threading.Lock()

    def extend(self, blocks: Sequence[Block]) -> None:
        """Take further blocks into account."""
        # While it grows a ledger has no length. Should it be interrupted it keeps none: nobody
        # extends it again, and a fork takes only what was there before.
        length, self.length = self.length, -1
        # The hot loop of a cold plan: two hashes and little else for each block.
        last, total = bytes(self.digests[-_SIZE:]), self.sums[-1]
        digests: list[bytes] = []
        sums: list[int] = []
        add_digest, add_sum = digests.append, sums.append
        for position, block in enumerate(blocks, length):
            leaf = block.leaf
            if leaf is None:
                form = canonical_json(block)
                if form is None:
                    _set_leaf(block, b"")
                    self.skipped.append(position)
                    continue
                size = len(form) + ITEM_BYTES
                digest = _sha256(form).digest()
                _set_leaf(block, digest + _pack(size))
            elif leaf:
                digest = leaf[:_SIZE]
                (size,) = _unpack(leaf[_SIZE:])
            else:
                self.skipped.append(position)
                continue
            last = _sha256(last + digest).digest()
            total += size
            add_digest(last)
            add_sum(total)
            if type(block) in _MOVING:
                self._move(position, block)
        self.digests += b"".join(digests)
        self.sums.extend(sums)
        self.length = length + len(blocks)

    def _move(self, position: int, block: Block) -> None:
        self.pairing.add(position, block)
        if self.tail:
            self.tail[1].add(position, block)
        if is_compaction(block):
            self.barriers.append(position)

    def fork(self, blocks: Sequence[Block]) -> "Ledger":
        """A ledger of its own for these blocks, which are the first of ours."""
        length = len(blocks)
        ledger = Ledger()
        count = self.count(length)
        ledger.length = length
        ledger.digests = self.digests[: (count + 1) * _SIZE]
        ledger.sums = self.sums[: count + 1]
        ledger.skipped = self.skipped[: bisect_left(self.skipped, length)]
        ledger.barriers = self.barriers[: bisect_left(self.barriers, length)]
        ledger.pairing = self.pairing.copy(blocks)
        return ledger

    def count(self, length: int) -> int:
        """How many of the first ``length`` blocks the digests cover."""
        return length - bisect_left(self.skipped, length)

    def uncovered(self, start: int, stop: int) -> list[int]:
        """The positions from ``start`` up to ``stop`` that no digest covers: reasoning."""
        skipped = self.skipped
        return skipped[bisect_left(skipped, start) : bisect_left(skipped, stop)]

    def digest(self, count: int) -> str:
        """The digest of the first ``count`` covered blocks, under the name of its algorithm."""
        return f"{ALGORITHM}:{self.digests[count * _SIZE : (count + 1) * _SIZE].hex()}"

    def end(self, count: int) -> int:
        """Where the first ``count`` covered blocks end: behind the last of them."""
        skipped = self.skipped
        before = bisect_left(range(len(skipped)), count, key=lambda i: skipped[i] - i)
        return count + before if count else 0

    def problems(self, blocks: Sequence[Block], offset: int, start: int) -> tuple[Problem, ...]:
        """What stands in the way of sending the blocks from position ``start`` to the end.

        Position 0 is ``blocks[offset]``.
        """
        stop = len(blocks) - offset
        with self.lock:  # a longer Turn may be extending the account
            pairing = self._account(blocks, offset, start)
            if not pairing.covers(stop):
                pairing = pairing.copy(blocks, start, offset)
            return pairing.problems(blocks, offset)

    def _account(self, blocks: Sequence[Block], offset: int, start: int) -> Pairing:
        if not start:
            return self.pairing
        if self.tail and self.tail[0] == start:
            return self.tail[1]
        pairing = self.pairing.copy(blocks, start, offset)
        if self.length == len(blocks) - offset:
            self.tail = start, pairing
        return pairing

    def weight(self, start: int, stop: int) -> int:
        """About how many bytes the blocks from ``start`` up to ``stop`` take on the wire."""
        return self.sums[self.count(stop)] - self.sums[self.count(start)]


def is_compaction(block: Block) -> bool:
    """Whether this block is a server's own summary of what came before it."""
    return isinstance(block, OpaqueBlock) and block.type == "compaction"


_MOVING = frozenset({ToolCallBlock, ToolResultBlock, OpaqueBlock})


def ledger_of(turn: Turn) -> Ledger:
    """The ledger that covers this Turn's body (and maybe more: a longer Turn may share it)."""
    ledger, kept = turn.memo.known
    length = len(turn.blocks) - turn.lead
    if isinstance(ledger, Ledger):
        return ledger if kept == length else _brought_up(turn, ledger, kept)
    return _brought_up(turn, Ledger(), 0)


def _brought_up(turn: Turn, ledger: Ledger, kept: int) -> Ledger:
    """The ledger for the whole Turn, from one that describes its first ``kept`` blocks."""
    with ledger.lock:
        if ledger.length != kept:
            ledger = ledger.fork(turn.blocks[turn.lead : turn.lead + kept])
        ledger.extend(turn.blocks[turn.lead + kept :])
    turn.memo.known = ledger, len(turn.blocks) - turn.lead
    return ledger


def prefix_digest(turn: Turn, count: int | None = None) -> str:
    """The rolling digest of the Turn's first ``count`` covered blocks (all of them by default)."""
    covered = covered_count(turn)
    return ledger_of(turn).digest(covered if count is None else max(0, min(count, covered)))


def covered_count(turn: Turn) -> int:
    """How many blocks of the Turn its digest covers."""
    return ledger_of(turn).count(len(turn.blocks) - turn.lead)
