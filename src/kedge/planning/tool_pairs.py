"""Match tool calls with their results, and find those that do not match.

A server rejects a context in which a call of a client-side tool has no result, or a result has no call. The rules
are a table, so that the items of hosted tools are checked as well.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec

from kedge.turns import Block, FrozenMap, OpaqueBlock, ToolCallBlock, ToolResultBlock, Turn

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

    def ends_before(self, stop: int) -> bool:
        """Return whether no call or result is at ``stop`` or after it."""
        return not self.positions or self.positions[-1] < stop

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
