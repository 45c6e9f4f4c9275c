"""Render a plan as the messages of an API that has no items, only messages of two roles.

These APIs require the results of calls directly after the message with the calls. So blocks are grouped into
alternating output and input of the model, and the results come first in the input.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any, ClassVar

from kedge import turns
from kedge.errors import UnsupportedBlock
from kedge.planning import RequestPlan
from kedge.planning.digests import get_members

Message = dict[str, Any]
Results = Sequence[turns.ToolResultBlock]
Inputs = Sequence[turns.UserBlock | turns.SystemBlock]


def hash_call_id(text: str) -> str:
    """Return a call id that every provider accepts, always the same for a text."""
    return "call_" + hashlib.sha256(text.encode()).hexdigest()[:24]


class MessageRenderer(ABC):
    """Renders a plan as the messages of one API.

    Args:
        provider: The name of the provider, for errors.
        call_ids: A pattern of the call ids that the provider accepts; others are replaced.
    """

    has_unique_ids: ClassVar[bool] = False
    """Whether the provider accepts an id only once."""

    def __init__(self, provider: str, call_ids: str) -> None:
        self.provider = provider
        self._allowed_ids = re.compile(call_ids, re.DOTALL)
        self._assigned_ids: dict[str, str] = {}
        self._used_ids: set[str] = set()

    def render(self, plan: RequestPlan) -> list[Message]:
        """Return the messages of the blocks that a plan sends; the results follow their calls directly.

        Raises:
            UnsupportedBlock: The API has no form for a block.
        """
        plan.check()
        for block in plan.sent:
            self._check_block(block)
        messages: list[Message] = []
        calls: list[turns.ToolCallBlock] = []
        for is_output, group in groupby(plan.sent, _is_output):
            blocks = list(group)
            if is_output:
                calls = [each for each in blocks if isinstance(each, turns.ToolCallBlock)]
                messages += self._render_assistant(blocks)
                continue
            results = [each for each in blocks if isinstance(each, turns.ToolResultBlock)]
            self._check_tool_results(calls, results)
            inputs = [b for b in blocks if isinstance(b, turns.UserBlock | turns.SystemBlock)]
            calls = []
            messages += self._render_user(results, inputs)
        self._check_tool_results(calls, [])
        return messages

    @abstractmethod
    def _render_assistant(self, blocks: Sequence[turns.Block]) -> list[Message]:
        """Return the messages of consecutive output: text, calls, reasoning, and opaque items of its provider."""

    @abstractmethod
    def _render_user(self, results: Results, inputs: Inputs) -> list[Message]:
        """Return the messages of the input between two outputs."""

    def _reject(self, block: turns.Block, remedy: str, detail: str = "") -> UnsupportedBlock:
        """Return the error for a block that the provider cannot express, with the reason and the remedy."""
        kind = block.kind
        if isinstance(block, turns.OpaqueBlock):
            kind = f"opaque {block.type}"
        description = f"block {block.id} ({kind})"
        if detail:
            description += f": {detail}"
        message = f"{self.provider} cannot express {description}; {remedy} before sending"
        return UnsupportedBlock(message, block.id)

    def _assign_id(self, call: turns.ToolCallBlock) -> str:
        """Return the id for a call; it is unchanged if the provider accepts it."""
        call_id = call.call_id
        is_used = call_id in self._used_ids
        if not self._allowed_ids.fullmatch(call_id) or (self.has_unique_ids and is_used):
            # Their number makes the id of a repeated call another one.
            position = len(self._used_ids) if is_used else ""
            call_id = hash_call_id(f"kedge.call/1 {position} {call_id}")
        self._used_ids.add(call_id)
        self._assigned_ids[call.call_id] = call_id
        return call_id

    def _resolve_id(self, result: turns.ToolResultBlock) -> str:
        """Return the id for the result of a call."""
        return self._assigned_ids.get(result.call_id, result.call_id)

    def _check_block(self, block: turns.Block) -> None:
        if isinstance(block, turns.UnknownBlock):
            raise UnsupportedBlock(
                f"block {block.id} is of a kind that this version of Kedge does not know "
                f"({block.form.get('kind')!r}); remove it or upgrade Kedge",
                block.id,
            )
        if _is_output(block):
            return
        members = get_members(block)
        if members:
            names = ", ".join(sorted(members))
            detail = f"it has members of an item of another API ({names})"
            raise self._reject(block, "remove them from its extra", detail)

    def _check_tool_results(
        self, calls: Sequence[turns.ToolCallBlock], results: Sequence[turns.ToolResultBlock]
    ) -> None:
        """Reject results that come after further model output, which these APIs cannot express."""
        paired = {call.call_id for call in calls} & {result.call_id for result in results}
        for block in (*calls, *results):
            if block.call_id not in paired:
                remedy = "move the result directly after its call, or remove both"
                raise self._reject(block, remedy, f"the result of {block.call_id} comes later")


def _is_output(block: turns.Block) -> bool:
    return block.kind in ("assistant", "tool_call", "reasoning", "opaque")
