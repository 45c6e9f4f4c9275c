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

A server rejects a context in which a call of a client-side tool has no result, or a result has no call. The rules
are a table, so that the items of hosted tools are checked as well.
"""

import hashlib
import struct
import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Literal

import msgspec

from kedge.planning.canonical import measure_canonical
from kedge.turns import Block, FrozenMap, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn
from kedge.turns.blocks import cache_digest, get_cached_digest
from kedge.turns.turn import cache_index, get_cached_index

ProblemKind = Literal["unanswered", "orphan", "answered_twice", "called_twice"]

# Provider items: type -> (family, whether it is a call, the fields that identify the call).
_OPAQUE_CALL_TYPES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "computer_call": ("computer", True, ("call_id",)),
    "computer_call_output": ("computer", False, ("call_id",)),
    "shell_call": ("shell", True, ("call_id",)),
    "shell_call_output": ("shell", False, ("call_id",)),
    "apply_patch_call": ("apply_patch", True, ("call_id",)),
    "apply_patch_call_output": ("apply_patch", False, ("call_id",)),
    # Its output has no call_id: clients send either the call's id or its call_id.
    "local_shell_call": ("local_shell", True, ("call_id", "id")),
    "local_shell_call_output": ("local_shell", False, ("id",)),
    "mcp_approval_request": ("mcp_approval", True, ("id",)),
    "mcp_approval_response": ("mcp_approval", False, ("approval_request_id",)),
}

_PROBLEM_MESSAGES: dict[ProblemKind, str] = {
    "unanswered": "call {call_id}{label} has no result; add one or remove the call",
    "orphan": "the result for {call_id} has no call before it; remove it or restore the call",
    "answered_twice": "call {call_id}{label} has a second result; remove one of them",
    "called_twice": "call {call_id}{label} is repeated before its result; use a new call_id",
}


FALLBACK_CALL_ID = "kedge.fallback_call_id"
"""Metadata key of a call: its ``call_id`` was assigned here, because the provider sent no usable one."""
ResultMatch = Literal["id", "fallback", "unmatched"]
"""How a result is matched to its call: by the provider's id of the call, by another id, or not at all."""
CallKey = tuple[str, str]
"""A family of calls, and the id that connects a call and its result."""
CallEffect = tuple[bool, tuple[CallKey, ...]]
"""Whether a block opens a call or answers one, and the keys of the call."""


class Problem(msgspec.Struct, frozen=True):
    """A tool call or result that prevents sending the Turn.

    Attributes:
        kind: ``unanswered``, ``orphan``, ``answered_twice`` or ``called_twice``.
        call_id: The id of the call.
        block_id: The block of the call or result.
        name: The tool's name, if it is known.
    """

    kind: ProblemKind
    call_id: str
    block_id: str
    name: str = ""

    def __str__(self) -> str:
        label = f" ({self.name})" if self.name else ""
        return _PROBLEM_MESSAGES[self.kind].format(call_id=self.call_id, label=label)


PairingIssue = tuple[int, ProblemKind]
"""The position of a call or result that does not match, and the kind of problem."""


def call_effect(block: Block) -> CallEffect | None:
    """Return the call that a block opens or answers, if any."""
    if type(block) is ToolCallBlock or type(block) is ToolResultBlock:  # faster than isinstance
        key = "custom" if block.custom else "function", block.call_id
        return type(block) is ToolCallBlock, (key,)
    if type(block) is OpaqueBlock and block.type in _OPAQUE_CALL_TYPES:
        family, opens, members = _OPAQUE_CALL_TYPES[block.type]
        values = (block.item.get(member) for member in members)
        keys = tuple((family, key) for key in values if isinstance(key, str))
        return (opens, keys) if keys else None
    return None


def is_async_call(block: Block) -> bool:
    """Return whether a call may be answered later: the model marked it as asynchronous."""
    item = block.item if isinstance(block, OpaqueBlock) else block.extra.get("item")
    return isinstance(item, FrozenMap) and item.get("async") is True


class ToolPairing:
    """Tracks open calls and mismatches along a sequence of blocks."""

    __slots__ = ("answered", "issues", "matches", "open", "positions")

    def __init__(self) -> None:
        # The position and all keys of each open call, and whether its id was assigned here.
        self.open: dict[CallKey, tuple[int, tuple[CallKey, ...], bool]] = {}
        self.answered: set[CallKey] = set()
        self.issues: list[PairingIssue] = []
        self.positions: list[int] = []  # the positions of all calls and results
        self.matches: list[tuple[int, ResultMatch]] = []  # of all results

    def add(self, position: int, block: Block) -> None:
        """Add the next block."""
        effect = call_effect(block)
        if effect is None:
            return
        self.positions.append(position)
        opens, keys = effect
        if opens:
            self._open(position, keys, is_assigned=block.metadata.get(FALLBACK_CALL_ID) is True)
        elif call := self.open.get(keys[0]):
            _, call_keys, is_assigned = call
            for key in call_keys:
                self.open.pop(key, None)
            self.answered.update(call_keys)
            is_other = is_assigned or keys[0] != call_keys[0]
            self.matches.append((position, "fallback" if is_other else "id"))
        else:
            self.matches.append((position, "unmatched"))
            kind = "answered_twice" if keys[0] in self.answered else "orphan"
            self.issues.append((position, kind))

    def _open(self, position: int, keys: tuple[CallKey, ...], *, is_assigned: bool) -> None:
        if self.open and not self.open.keys().isdisjoint(keys):
            self.issues.append((position, "called_twice"))
        for key in keys:
            self.open[key] = (position, keys, is_assigned)

    def copy(
        self, blocks: Turn | Sequence[Block], start: int = 0, offset: int = 0
    ) -> "ToolPairing":
        """Return a separate pairing from position ``start`` to the end of ``blocks``.

        Position 0 is ``blocks[offset]``.
        """
        pairing, positions = ToolPairing(), self.positions
        stop = len(blocks) - offset
        for position in positions[bisect_left(positions, start) : bisect_left(positions, stop)]:
            pairing.add(position, blocks[offset + position])
        return pairing

    def problems(self, blocks: Turn | Sequence[Block], offset: int) -> tuple[Problem, ...]:
        """Return the mismatches in the order of the blocks; position 0 is ``blocks[offset]``."""
        if not self.open and not self.issues:
            return ()
        waiting = {position for position, *_ in self.open.values()}
        unanswered: list[PairingIssue] = [
            (position, "unanswered")
            for position in waiting
            if not is_async_call(blocks[offset + position])
        ]
        return tuple(
            _build_problem(blocks[offset + position], kind)
            for position, kind in sorted([*self.issues, *unanswered])
        )


def _build_problem(block: Block, kind: ProblemKind) -> Problem:
    effect = call_effect(block)
    assert effect is not None  # noqa: S101 - only calls and results have issues
    name = block.name if isinstance(block, ToolCallBlock) else ""
    return Problem(kind, effect[1][0][1], block.id, name)


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
        # The pairing after a compaction, if needed.
        self.tail: tuple[int, ToolPairing] | None = None
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
                form, size = measure_canonical(block)
                if form is None:
                    cache_digest(block, b"")
                    self.skipped.append(position)
                    continue
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
                self.pairing.add(position, block)
                if self.tail:
                    self.tail[1].add(position, block)
                if is_compaction(block):
                    self.barriers.append(position)
        self.digests += b"".join(digests)
        self.sums.extend(sums)
        self.length = length + len(blocks)

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
        start = count * _DIGEST_SIZE
        return f"{ALGORITHM}:{self.digests[start : start + _DIGEST_SIZE].hex()}"

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
            pairing = self._get_tail(blocks, offset, start) if start else self.pairing
            if pairing.positions and pairing.positions[-1] >= stop:
                pairing = pairing.copy(blocks, start, offset)
            return pairing.problems(blocks, offset)

    def count_matches(self, start: int, stop: int) -> Mapping[ResultMatch, int]:
        """Return how the tool results from position ``start`` up to ``stop`` match their calls."""
        matches, key = self.pairing.matches, itemgetter(0)
        if not matches or matches[-1][0] < start:
            return {}
        found = matches[bisect_left(matches, start, key=key) : bisect_left(matches, stop, key=key)]
        return Counter(map(itemgetter(1), found))

    def _get_tail(self, blocks: Turn | Sequence[Block], offset: int, start: int) -> ToolPairing:
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
    index, indexed = get_cached_index(turn)
    if not isinstance(index, PrefixIndex):
        index, indexed = PrefixIndex(), 0
    if indexed < turn.body_length:
        index = extend_index(index, turn, indexed, turn.lead)
        cache_index(turn, index, turn.body_length)
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
    covered = index.count(turn.body_length)
    return index.digest(covered if count is None else max(0, min(count, covered)))


def covered_count(turn: Turn) -> int:
    """Return the number of blocks of the Turn that its digest covers.

    Args:
        turn: The Turn.

    Returns:
        The number of blocks without leading system blocks and reasoning.
    """
    return get_prefix_index(turn).count(turn.body_length)
