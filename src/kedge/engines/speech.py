"""A Turn as the stateless APIs see it: what the model said, and what it heard, by turns.

These APIs know no items, only messages of two sides, and they are strict about one thing: the results of
calls come directly behind the message that made the calls, before anything else. So blocks are gathered
into passages, ``Said`` and ``Heard``, and within what was heard the results come first.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kedge.errors import UnsupportedBlock
from kedge.planning import RequestPlan
from kedge.turns import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    SystemBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
)

SaidBlock = AssistantBlock | ToolCallBlock | ReasoningBlock | OpaqueBlock


@dataclass(slots=True)
class Said:
    """What the model said in one go: words, calls, thoughts, and what only its provider reads."""

    blocks: list[SaidBlock] = field(default_factory=list[SaidBlock])

    @property
    def calls(self) -> list[ToolCallBlock]:
        """The calls among it."""
        return [block for block in self.blocks if isinstance(block, ToolCallBlock)]


@dataclass(slots=True)
class Heard:
    """What the model heard before it went on: results first, then words."""

    results: list[ToolResultBlock] = field(default_factory=list[ToolResultBlock])
    words: list[UserBlock | SystemBlock] = field(default_factory=list[UserBlock | SystemBlock])


Passage = Said | Heard


def passages(plan: RequestPlan, provider: str) -> list[Passage]:
    """What a plan sends, by turns; every call with its results directly behind it."""
    plan.check()
    left_out = {block.id for block in plan.left_out}
    found = _gathered((block for block in plan.delta if block.id not in left_out), provider)
    _check_answers(found, provider)
    return found


def _gathered(blocks: Iterable[Block], provider: str) -> list[Passage]:
    found: list[Passage] = []
    for block in blocks:
        match block:
            case AssistantBlock() | ToolCallBlock() | ReasoningBlock() | OpaqueBlock():
                _last_said(found).blocks.append(block)
            case ToolResultBlock():
                _last_heard(found).results.append(block)
            case UserBlock() | SystemBlock():
                _last_heard(found).words.append(block)
            case UnknownBlock():
                raise UnsupportedBlock(
                    f"block {block.id} is of a kind this Kedge does not know "
                    f"({block.form.get('kind')!r}); remove it or use a newer Kedge"
                )
            case _:
                raise unsupported(block, provider, "remove it")
    return found


def _last_said(found: list[Passage]) -> Said:
    if found and isinstance(last := found[-1], Said):
        return last
    found.append(made := Said())
    return made


def _last_heard(found: list[Passage]) -> Heard:
    if found and isinstance(last := found[-1], Heard):
        return last
    found.append(made := Heard())
    return made


def _check_answers(found: Sequence[Passage], provider: str) -> None:
    """Refuse results that do not come before the model goes on: these APIs cannot say that."""
    for before, after in pairwise((Heard(), *found, Heard())):
        late: list[ToolCallBlock | ToolResultBlock] = []
        if isinstance(before, Said) and isinstance(after, Heard):
            answered = {result.call_id for result in after.results}
            late += [call for call in before.calls if call.call_id not in answered]
        if isinstance(after, Heard):
            called = {call.call_id for call in before.calls} if isinstance(before, Said) else ()
            late += [result for result in after.results if result.call_id not in called]
        for block in late:
            remedy = "move the result directly behind its call, or remove both"
            raise unsupported(block, provider, remedy, f"the result of {block.call_id} comes later")


class CallIds:
    """The ids that calls go by at a provider that takes only some ids, and each only once."""

    def __init__(self, allowed: str, *, unique: bool = False) -> None:
        self._allowed = re.compile(allowed, re.DOTALL)
        self._unique = unique
        self._names: dict[str, str] = {}
        self._used: set[str] = set()

    def called(self, call: ToolCallBlock) -> str:
        """The id for a call: its own, if the provider takes it."""
        name = call.call_id
        if not self._allowed.fullmatch(name) or (self._unique and name in self._used):
            mixed = f"kedge.call/1 {len(self._used) if name in self._used else ''} {name}"
            name = "call_" + hashlib.sha256(mixed.encode()).hexdigest()[:24]
        self._used.add(name)
        self._names[call.call_id] = name
        return name

    def answered(self, result: ToolResultBlock) -> str:
        """The id under which a call is answered."""
        return self._names.get(result.call_id, result.call_id)


def unsupported(block: Block, provider: str, remedy: str, what: str = "") -> UnsupportedBlock:
    """The error for a block that a provider cannot express: which, why, and what to do."""
    kind = f"opaque {block.type}" if isinstance(block, OpaqueBlock) else block.kind
    why = f": {what}" if what else ""
    return UnsupportedBlock(
        f"{provider} cannot express block {block.id} ({kind}){why}; {remedy} before sending"
    )
