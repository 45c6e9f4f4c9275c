"""Group the blocks of a Turn into alternating model output and input, for the stateless APIs.

These APIs have no items, only messages of two roles, and they require the results of calls directly after the
message with the calls. So blocks are grouped into ``AssistantGroup`` and ``UserGroup``, and within a user group
the results come first.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

from kedge.errors import UnsupportedBlock
from kedge.planning import RequestPlan
from kedge.planning.canonical import get_members
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

OutputBlock = AssistantBlock | ToolCallBlock | ReasoningBlock | OpaqueBlock


@dataclass(slots=True)
class AssistantGroup:
    """Consecutive output of the model: text, calls, reasoning, and opaque items of its provider."""

    blocks: list[OutputBlock] = field(default_factory=list[OutputBlock])

    @property
    def calls(self) -> list[ToolCallBlock]:
        """The calls in this output."""
        return [block for block in self.blocks if isinstance(block, ToolCallBlock)]


@dataclass(slots=True)
class UserGroup:
    """Input of the model between two outputs: tool results first, then messages."""

    results: list[ToolResultBlock] = field(default_factory=list[ToolResultBlock])
    inputs: list[UserBlock | SystemBlock] = field(default_factory=list[UserBlock | SystemBlock])


Message = dict[str, Any]
MessageGroup = AssistantGroup | UserGroup
G = TypeVar("G", AssistantGroup, UserGroup)


class MessageRenderer(ABC):
    """Renders a plan as the messages of one API.

    Args:
        provider: The name of the provider, for errors.
        ids: The call ids that the provider accepts.
    """

    def __init__(self, provider: str, ids: "CallIds") -> None:
        self.provider = provider
        self.ids = ids

    def render(self, plan: RequestPlan) -> list[Message]:
        """Return the messages of the blocks that a plan sends; the results follow their calls directly.

        Raises:
            UnsupportedBlock: The API has no form for a block.
        """
        plan.check()
        groups = self._group_blocks(plan.sent)
        self._check_tool_results(groups)
        messages: list[Message] = []
        for group in groups:
            match group:
                case AssistantGroup():
                    messages += self._render_assistant(group)
                case UserGroup():
                    messages += self._render_user(group)
        return messages

    @abstractmethod
    def _render_assistant(self, group: AssistantGroup) -> list[Message]:
        """Return the messages of consecutive output."""

    @abstractmethod
    def _render_user(self, group: UserGroup) -> list[Message]:
        """Return the messages of the input between two outputs."""

    def _reject(self, block: Block, remedy: str, detail: str = "") -> UnsupportedBlock:
        """Return the error for a block that the provider cannot express, with the reason and the remedy."""
        kind = f"opaque {block.type}" if isinstance(block, OpaqueBlock) else block.kind
        what = f"block {block.id} ({kind})" + (f": {detail}" if detail else "")
        message = f"{self.provider} cannot express {what}; {remedy} before sending"
        return UnsupportedBlock(message, block.id)

    def _group_blocks(self, blocks: Iterable[Block]) -> list[MessageGroup]:
        groups: list[MessageGroup] = []
        for block in blocks:
            match block:
                case AssistantBlock() | ToolCallBlock() | ReasoningBlock() | OpaqueBlock():
                    _open_group(groups, AssistantGroup).blocks.append(block)
                case ToolResultBlock() | UserBlock() | SystemBlock() if members := get_members(
                    block
                ):
                    names = ", ".join(sorted(members))
                    detail = f"it has members of an item of another API ({names})"
                    raise self._reject(block, "remove them from its extra", detail)
                case ToolResultBlock():
                    _open_group(groups, UserGroup).results.append(block)
                case UserBlock() | SystemBlock():
                    _open_group(groups, UserGroup).inputs.append(block)
                case UnknownBlock():
                    raise UnsupportedBlock(
                        f"block {block.id} is of a kind that this version of Kedge does not know "
                        f"({block.form.get('kind')!r}); remove it or upgrade Kedge",
                        block.id,
                    )
        return groups

    def _check_tool_results(self, groups: Sequence[MessageGroup]) -> None:
        """Reject results that come after further model output, which these APIs cannot express."""
        for before, after in pairwise((UserGroup(), *groups, UserGroup())):
            calls = before.calls if isinstance(before, AssistantGroup) else []
            if isinstance(after, UserGroup):
                answered = {result.call_id for result in after.results}
                called = {call.call_id for call in calls}
                unanswered = [call for call in calls if call.call_id not in answered]
                misplaced = [each for each in after.results if each.call_id not in called]
                for block in (*unanswered, *misplaced):
                    remedy = "move the result directly after its call, or remove both"
                    raise self._reject(block, remedy, f"the result of {block.call_id} comes later")


def _open_group(groups: list[MessageGroup], kind: type[G]) -> G:
    """Return the last group if it is of a kind, or else a new one."""
    if not groups or not isinstance(groups[-1], kind):
        groups.append(kind())
    return cast("G", groups[-1])


def hash_call_id(text: str) -> str:
    """Return a call id that every provider accepts, always the same for a text."""
    return "call_" + hashlib.sha256(text.encode()).hexdigest()[:24]


class CallIds:
    """A mapping of call ids to the ids that a provider accepts, each of them used once."""

    def __init__(self, allowed: str, *, unique: bool = False) -> None:
        self._allowed = re.compile(allowed, re.DOTALL)
        self._unique = unique
        self._assigned: dict[str, str] = {}
        self._used: set[str] = set()

    def assign(self, call: ToolCallBlock) -> str:
        """Return the id for a call; it is unchanged if the provider accepts it."""
        name = call.call_id
        if not self._allowed.fullmatch(name) or (self._unique and name in self._used):
            mixed = f"kedge.call/1 {len(self._used) if name in self._used else ''} {name}"
            name = hash_call_id(mixed)
        self._used.add(name)
        self._assigned[call.call_id] = name
        return name

    def resolve(self, result: ToolResultBlock) -> str:
        """Return the id for the result of a call."""
        return self._assigned.get(result.call_id, result.call_id)
