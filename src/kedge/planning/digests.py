"""The prefix index of a Turn: digests, sizes and open tool calls of every prefix of its body.

``d0 = H(tag)``, ``di = H(d(i-1) || H(canonical(block_i)))``: one digest identifies a complete prefix, and the next
one costs two small hashes. Only content is indexed, never ids or metadata, so an equal rebuild of a Turn has an
equal index.

The index grows instead of being rebuilt, because an agent plans after every block it adds, and hashing the
conversation each time would cost O(n) per request and O(n^2) per conversation. So a Turn and its continuations
share one index, cached in the Turn, and planning a Turn that grew by k blocks costs O(k). Sharing is safe because
an index only grows, under its lock, and the entries of a prefix never change: a shorter Turn that shares it
reads its prefix without locking, even while a longer one extends it. But only one Turn can extend it. When
two Turns grow from the same one, the second finds that the index is longer than their common prefix and
copies that prefix (``fork``). An index whose extension is interrupted has no valid length, and is never
extended again.
"""

import hashlib
import struct
import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from kedge.planning.canonical import canonical_json, measure_item
from kedge.planning.tool_pairs import Problem, ResultMatch, ToolPairing
from kedge.turns import Block, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn
from kedge.turns.blocks import cache_digest, get_cached_digest
from kedge.turns.turn import cache_index, get_cached_index

ALGORITHM = "sha256"

_DIGEST_SIZE = 32
_sha256 = hashlib.sha256
_pack, _unpack = struct.Struct("<Q").pack, struct.Struct("<Q").unpack
_INITIAL_DIGEST = _sha256(b"kedge.turn/1").digest()


class PrefixIndex:
    """Digests, sizes and open tool calls of every prefix of a sequence of blocks.

    A position counts all blocks, including reasoning; a count includes only those that the digests cover.
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
            None  # the pairing after a compaction, if needed
        )
        self.lock = threading.Lock()

    def extend(self, blocks: Sequence[Block]) -> None:
        """Index further blocks."""
        # While the index grows it has no valid length. If this is interrupted, the length stays invalid: the
        # index is not extended again, and a fork copies only the earlier entries.
        length, self.length = self.length, -1
        # Most of the time of a plan without a cached index is spent in this loop.
        last, total = self.digests[-_DIGEST_SIZE:], self.sums[-1]
        digests: list[bytes] = []
        sums: list[int] = []
        add_digest, add_sum = digests.append, sums.append
        for position, block in enumerate(blocks, length):
            cached = get_cached_digest(block)
            if cached is None:
                form = canonical_json(block)
                if form is None:
                    cache_digest(block, b"")
                    self.skipped.append(position)
                    continue
                size = measure_item(block, form)
                digest = _sha256(form).digest()
                cache_digest(block, digest + _pack(size))
            elif cached:  # empty for reasoning
                digest = cached[:_DIGEST_SIZE]
                (size,) = _unpack(cached[_DIGEST_SIZE:])
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
        if type(block) is OpaqueBlock and is_compaction(block):
            self.barriers.append(position)

    def fork(self, blocks: Sequence[Block]) -> "PrefixIndex":
        """Return a separate index of these blocks, which are the first ones of this index."""
        length = len(blocks)
        index = PrefixIndex()
        count = self.count(length)
        index.length = length
        index.digests = self.digests[: (count + 1) * _DIGEST_SIZE]
        index.sums = self.sums[: count + 1]
        index.skipped = self.skipped[: bisect_left(self.skipped, length)]
        index.barriers = self.barriers[: bisect_left(self.barriers, length)]
        index.pairing = self.pairing.copy(blocks)
        return index

    def count(self, length: int) -> int:
        """Return the number of the first ``length`` blocks that the digests cover."""
        return length - bisect_left(self.skipped, length) if self.skipped else length

    def uncovered_positions(self, start: int, stop: int) -> list[int]:
        """Return the positions from ``start`` up to ``stop`` that no digest covers: reasoning."""
        skipped = self.skipped
        return skipped[bisect_left(skipped, start) : bisect_left(skipped, stop)]

    def digest(self, count: int) -> str:
        """Return the digest of the first ``count`` covered blocks, prefixed with its algorithm."""
        return (
            f"{ALGORITHM}:{self.digests[count * _DIGEST_SIZE : (count + 1) * _DIGEST_SIZE].hex()}"
        )

    def end_position(self, count: int) -> int:
        """Return the position after the first ``count`` covered blocks."""
        skipped = self.skipped
        if not skipped:
            return count
        before = bisect_left(range(len(skipped)), count, key=lambda i: skipped[i] - i)
        return count + before if count else 0

    def problems(
        self, blocks: Turn | Sequence[Block], offset: int, start: int
    ) -> tuple[Problem, ...]:
        """Return the problems of the tool calls from position ``start`` to the end.

        Position 0 is ``blocks[offset]``.
        """
        stop = len(blocks) - offset
        with self.lock:  # a longer Turn may be extending the pairing
            pairing = self._get_pairing(blocks, offset, start)
            if not pairing.ends_before(stop):
                pairing = pairing.copy(blocks, start, offset)
            return pairing.problems(blocks, offset)

    def count_matches(self, start: int, stop: int) -> Counter[ResultMatch]:
        """Return how the tool results from position ``start`` up to ``stop`` match their calls."""
        matches = self.pairing.matches
        found = matches[bisect_left(matches, start, key=itemgetter(0)) :]
        return Counter(match for position, match in found if position < stop)

    def _get_pairing(self, blocks: Turn | Sequence[Block], offset: int, start: int) -> ToolPairing:
        if not start:
            return self.pairing
        if self.tail and self.tail[0] == start:
            return self.tail[1]
        pairing = self.pairing.copy(blocks, start, offset)
        if self.length == len(blocks) - offset:
            self.tail = start, pairing
        return pairing

    def byte_size(self, start: int, stop: int) -> int:
        """Return the bytes of the covered blocks from ``start`` up to ``stop`` in the input of a request."""
        return self.sums[stop] - self.sums[start]


def is_compaction(block: Block) -> bool:
    """Return whether a block is a compaction item of a server."""
    return isinstance(block, OpaqueBlock) and block.type == "compaction"


_TRACKED_TYPES = frozenset({ToolCallBlock, ToolResultBlock, OpaqueBlock})


def get_prefix_index(turn: Turn) -> PrefixIndex:
    """Return the index of this Turn's body; it may cover more, if a longer Turn shares it."""
    cached, indexed = get_cached_index(turn)
    index = cached if isinstance(cached, PrefixIndex) else PrefixIndex()
    length = len(turn) - turn.lead
    if indexed < length or index is not cached:
        index = extend_index(index, turn, indexed, turn.lead)
        cache_index(turn, index, length)
    return index


def extend_index(
    index: PrefixIndex, blocks: Turn | Sequence[Block], indexed: int, offset: int = 0
) -> PrefixIndex:
    """Return an index of the blocks from ``offset`` on, of which this one has the first ``indexed``.

    The same index is extended if it has no other blocks.
    """
    with index.lock:
        if index.length != indexed:
            index = index.fork(blocks[offset : offset + indexed])
        index.extend(blocks[offset + indexed :])
    return index


def prefix_digest(turn: Turn, count: int | None = None) -> str:
    """Return the digest of a prefix of the Turn.

    Args:
        turn: The Turn.
        count: The number of covered blocks in the prefix; all of them by default.

    Returns:
        The digest, prefixed with the name of its algorithm.
    """
    index = get_prefix_index(turn)
    covered = index.count(len(turn) - turn.lead)
    return index.digest(covered if count is None else max(0, min(count, covered)))


def covered_count(turn: Turn) -> int:
    """Return the number of blocks of the Turn that its digest covers.

    Args:
        turn: The Turn.

    Returns:
        The number of blocks without leading system blocks and reasoning.
    """
    return get_prefix_index(turn).count(len(turn) - turn.lead)
