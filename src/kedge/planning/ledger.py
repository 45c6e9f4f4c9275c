"""The ledger of a Turn: rolling digests, byte sums and open calls of every prefix of its body.

``d0 = H(tag)``, ``di = H(d(i-1) || H(canonical(block_i)))``: one digest stands for a whole prefix, and
the next one costs two small hashes. The ledger is kept in the Turn's memo and shared along its lineage:
planning a Turn that grew by k blocks costs k. A Turn that branched off takes a copy of what it shares.

Only content is recorded here, never ids or metadata, so an equal rebuild has an equal ledger. The
canonical form of a block is hashed once and kept in the block itself.
"""

import hashlib
import struct
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from kedge.planning.calls import Pairing
from kedge.planning.canonical import canonical_json
from kedge.turns import Block, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn
from kedge.turns.turn import Memo

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

    __slots__ = ("barriers", "digests", "length", "lock", "pairing", "skipped", "sums")

    def __init__(self) -> None:
        self.length = 0
        self.digests = bytearray(_START)
        self.sums = array("Q", [0])  # bytes of the covered blocks up to each digest
        self.skipped: list[int] = []  # positions of the blocks that no digest covers
        self.barriers: list[int] = []  # positions of compaction items
        self.pairing = Pairing()
        self.lock = threading.Lock()

    def extend(self, blocks: Sequence[Block]) -> None:
        """Take further blocks into account."""
        # The hot loop of a cold plan: two hashes and little else for each block.
        last, total = bytes(self.digests[-_SIZE:]), self.sums[-1]
        digests: list[bytes] = []
        sums: list[int] = []
        add_digest, add_sum, add_move = digests.append, sums.append, self.pairing.add
        for position, block in enumerate(blocks, self.length):
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
                add_move(position, block)
                if is_compaction(block):
                    self.barriers.append(position)
        self.digests += b"".join(digests)
        self.sums.extend(sums)
        self.length += len(blocks)

    def fork(self, blocks: Sequence[Block]) -> "Ledger":
        """A ledger of its own for these blocks, which are the first of ours."""
        length = len(blocks)
        ledger = Ledger()
        count = self.count(length)
        ledger.length = length
        ledger.digests = self.digests[: (count + 1) * _SIZE]
        ledger.sums = self.sums[: count + 1]
        ledger.skipped = self.skipped[: bisect_left(self.skipped, length)]
        ledger.barriers = [position for position in self.barriers if position < length]
        ledger.pairing = self.pairing.copy(blocks)
        return ledger

    def count(self, length: int) -> int:
        """How many of the first ``length`` blocks the digests cover."""
        return length - bisect_left(self.skipped, length)

    def digest(self, count: int) -> str:
        """The digest of the first ``count`` covered blocks, under the name of its algorithm."""
        return f"{ALGORITHM}:{self.digests[count * _SIZE : (count + 1) * _SIZE].hex()}"

    def end(self, count: int) -> int:
        """Where the first ``count`` covered blocks end: behind the last of them."""
        skipped = self.skipped
        before = bisect_left(range(len(skipped)), count, key=lambda i: skipped[i] - i)
        return count + before if count else 0

    def weight(self, start: int, stop: int) -> int:
        """About how many bytes the blocks from ``start`` up to ``stop`` take on the wire."""
        return self.sums[self.count(stop)] - self.sums[self.count(start)]


def is_compaction(block: Block) -> bool:
    """Whether this block is a server's own summary of what came before it."""
    return isinstance(block, OpaqueBlock) and block.type == "compaction"


_MOVING = frozenset({ToolCallBlock, ToolResultBlock, OpaqueBlock})


def ledger_of(turn: Turn) -> Ledger:
    """The ledger that covers this Turn's body (and maybe more: a longer Turn may share it)."""
    memo, length = turn.memo, len(turn.blocks) - turn.lead
    ledger = memo.value
    if isinstance(ledger, Ledger) and memo.kept == length:
        return ledger
    return _brought_up(memo, turn, length)


def _brought_up(memo: Memo, turn: Turn, length: int) -> Ledger:
    ledger = memo.value if isinstance(memo.value, Ledger) else Ledger()
    kept = min(memo.kept, length)
    with ledger.lock:
        if ledger.length != kept:
            ledger = ledger.fork(turn.blocks[turn.lead : turn.lead + kept])
        ledger.extend(turn.blocks[turn.lead + kept :])
    memo.value, memo.kept = ledger, length
    return ledger


def prefix_digest(turn: Turn, count: int | None = None) -> str:
    """The rolling digest of the Turn's first ``count`` covered blocks (all of them by default)."""
    ledger = ledger_of(turn)
    covered = ledger.count(len(turn.body))
    return ledger.digest(covered if count is None else min(count, covered))


def covered_count(turn: Turn) -> int:
    """How many blocks of the Turn its digest covers."""
    return ledger_of(turn).count(len(turn.blocks) - turn.lead)
