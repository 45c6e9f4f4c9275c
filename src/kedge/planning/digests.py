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

from kedge.planning.canonical import canonical_json
from kedge.planning.tool_pairing import Problem, ToolPairing
from kedge.turns import Block, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn
from kedge.turns.blocks import cache_digest, get_cached_digest
from kedge.turns.turn import cache_index, get_cached_index

ALGORITHM = "sha256"
ITEM_OVERHEAD_BYTES = 48
"""About what the wire form of a block weighs beyond its canonical form."""

_DIGEST_SIZE = 32
_sha256 = hashlib.sha256
_pack, _unpack = struct.Struct("<Q").pack, struct.Struct("<Q").unpack
_INITIAL_DIGEST = _sha256(b"kedge.turn/1").digest()


class PrefixIndex:
    """What planning knows about every prefix of a sequence of blocks.

    Positions count all blocks, reasoning included; counts tell how many of them the digests cover.
    """

    __slots__ = ("barriers", "digests", "length", "lock", "pairing", "skipped", "sums", "tail")

    def __init__(self) -> None:
        self.length = 0
        self.digests = bytearray(_INITIAL_DIGEST)
        self.sums = array("Q", [0])  # bytes of the covered blocks up to each digest
        self.skipped: list[int] = []  # positions of the blocks that no digest covers
        self.barriers: list[int] = []  # positions of compaction items
        self.pairing = ToolPairing()
        self.tail: tuple[int, ToolPairing] | None = (
            None  # the account from a barrier on, once asked for
        )
        self.lock = threading.Lock()

    def extend(self, blocks: Sequence[Block]) -> None:
        """Take further blocks into account."""
        # While it grows a ledger has no length. Should it be interrupted it keeps none: nobody
        # extends it again, and a fork takes only what was there before.
        length, self.length = self.length, -1
        # The hot loop of a cold plan: two hashes and little else for each block.
        last, total = bytes(self.digests[-_DIGEST_SIZE:]), self.sums[-1]
        digests: list[bytes] = []
        sums: list[int] = []
        add_digest, add_sum = digests.append, sums.append
        for position, block in enumerate(blocks, length):
            leaf = get_cached_digest(block)
            if leaf is None:
                form = canonical_json(block)
                if form is None:
                    cache_digest(block, b"")
                    self.skipped.append(position)
                    continue
                size = len(form) + ITEM_OVERHEAD_BYTES
                digest = _sha256(form).digest()
                cache_digest(block, digest + _pack(size))
            elif leaf:
                digest = leaf[:_DIGEST_SIZE]
                (size,) = _unpack(leaf[_DIGEST_SIZE:])
            else:
                self.skipped.append(position)
                continue
            last = _sha256(last + digest).digest()
            total += size
            add_digest(last)
            add_sum(total)
            if type(block) in _TRACKED_TYPES:
                self._track_block(position, block)
        self.digests += b"".join(digests)
        self.sums.extend(sums)
        self.length = length + len(blocks)

    def _track_block(self, position: int, block: Block) -> None:
        self.pairing.add(position, block)
        if self.tail:
            self.tail[1].add(position, block)
        if is_compaction(block):
            self.barriers.append(position)

    def fork(self, blocks: Sequence[Block]) -> "PrefixIndex":
        """A ledger of its own for these blocks, which are the first of ours."""
        length = len(blocks)
        ledger = PrefixIndex()
        count = self.count(length)
        ledger.length = length
        ledger.digests = self.digests[: (count + 1) * _DIGEST_SIZE]
        ledger.sums = self.sums[: count + 1]
        ledger.skipped = self.skipped[: bisect_left(self.skipped, length)]
        ledger.barriers = self.barriers[: bisect_left(self.barriers, length)]
        ledger.pairing = self.pairing.copy(blocks)
        return ledger

    def count(self, length: int) -> int:
        """How many of the first ``length`` blocks the digests cover."""
        return length - bisect_left(self.skipped, length)

    def uncovered_positions(self, start: int, stop: int) -> list[int]:
        """The positions from ``start`` up to ``stop`` that no digest covers: reasoning."""
        skipped = self.skipped
        return skipped[bisect_left(skipped, start) : bisect_left(skipped, stop)]

    def digest(self, count: int) -> str:
        """The digest of the first ``count`` covered blocks, under the name of its algorithm."""
        return (
            f"{ALGORITHM}:{self.digests[count * _DIGEST_SIZE : (count + 1) * _DIGEST_SIZE].hex()}"
        )

    def end_position(self, count: int) -> int:
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
            pairing = self._get_pairing(blocks, offset, start)
            if not pairing.ends_before(stop):
                pairing = pairing.copy(blocks, start, offset)
            return pairing.problems(blocks, offset)

    def _get_pairing(self, blocks: Sequence[Block], offset: int, start: int) -> ToolPairing:
        if not start:
            return self.pairing
        if self.tail and self.tail[0] == start:
            return self.tail[1]
        pairing = self.pairing.copy(blocks, start, offset)
        if self.length == len(blocks) - offset:
            self.tail = start, pairing
        return pairing

    def byte_size(self, start: int, stop: int) -> int:
        """About how many bytes the blocks from ``start`` up to ``stop`` take on the wire."""
        return self.sums[self.count(stop)] - self.sums[self.count(start)]


def is_compaction(block: Block) -> bool:
    """Whether this block is a server's own summary of what came before it."""
    return isinstance(block, OpaqueBlock) and block.type == "compaction"


_TRACKED_TYPES = frozenset({ToolCallBlock, ToolResultBlock, OpaqueBlock})


def get_prefix_index(turn: Turn) -> PrefixIndex:
    """The ledger that covers this Turn's body (and maybe more: a longer Turn may share it)."""
    ledger, kept = get_cached_index(turn)
    length = len(turn.blocks) - turn.lead
    if isinstance(ledger, PrefixIndex):
        return ledger if kept == length else _extend_index(turn, ledger, kept)
    return _extend_index(turn, PrefixIndex(), 0)


def _extend_index(turn: Turn, index: PrefixIndex, indexed: int) -> PrefixIndex:
    """The ledger for the whole Turn, from one that describes its first ``kept`` blocks."""
    with index.lock:
        if index.length != indexed:
            index = index.fork(turn.blocks[turn.lead : turn.lead + indexed])
        index.extend(turn.blocks[turn.lead + indexed :])
    cache_index(turn, index, len(turn.blocks) - turn.lead)
    return index


def prefix_digest(turn: Turn, count: int | None = None) -> str:
    """The rolling digest of the Turn's first ``count`` covered blocks (all of them by default)."""
    covered = covered_count(turn)
    return get_prefix_index(turn).digest(covered if count is None else max(0, min(count, covered)))


def covered_count(turn: Turn) -> int:
    """How many blocks of the Turn its digest covers."""
    return get_prefix_index(turn).count(len(turn.blocks) - turn.lead)
