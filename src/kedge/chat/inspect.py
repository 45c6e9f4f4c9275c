"""Describe state bytes: their content, and why they would be discarded."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.chat.state import DiscardedState, DiscardReason, StateCipher, decode_state, is_encrypted
from kedge.turns.frozen_json import EMPTY, FrozenMap


@dataclass(frozen=True, slots=True)
class StateReport:
    """The content of state bytes, without any message text.

    Attributes:
        usable: Whether the state can be used.
        size: The number of bytes.
        reason: Why it would be discarded; one of ``DISCARD_REASONS``.
        problem: A description of the reason.
        encrypted: Whether it is encrypted.
        version: The version of its format, if it could be read.
        provider: The provider that it belongs to.
        blocks: The number of blocks.
        processed_length: The number of blocks that a model has read.
        responses: The number of responses that can be continued.
        kinds: The number of blocks of each kind.
    """

    usable: bool
    size: int
    reason: DiscardReason | None = None
    problem: str = ""
    encrypted: bool = False
    version: int | None = None
    provider: str = ""
    blocks: int = 0
    processed_length: int = 0
    responses: int = 0
    kinds: Mapping[str, int] = EMPTY

    @property
    def pending(self) -> int:
        """The number of blocks that no model has read yet."""
        return max(0, self.blocks - self.processed_length)

    def __str__(self) -> str:
        if not self.size:
            return "no state: a fresh conversation"
        encrypted = ", encrypted" if self.encrypted else ""
        lines = [f"{self.size} bytes{encrypted}, version {self.version or 'unknown'}"]
        if self.provider:
            lines[0] += f", provider {self.provider}"
        if self.usable:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
            lines.append(f"blocks: {self.blocks} ({kinds or 'none'}), pending: {self.pending}")
            lines.append(f"responses to chain on: {self.responses}")
        else:
            lines.append(f"would be discarded: {self.problem}")
        return "\n".join(lines)


def build_report(data: bytes, provider: str | None, cipher: StateCipher | None) -> StateReport:
    """Return a report on state bytes, of any provider if ``provider`` is None. Never raises."""
    if not data:
        return StateReport(True, 0)
    found = decode_state(data, provider, cipher)
    known: dict[str, Any] = {"size": len(data), "encrypted": is_encrypted(data)}
    if isinstance(found, DiscardedState):
        version, name = found.members.get("version"), found.members.get("provider")
        return StateReport(
            False,
            **known,
            reason=found.reason,
            problem=str(found),
            version=version if type(version) is int else None,
            provider=name[:80] if isinstance(name, str) else "",
        )
    return StateReport(
        True,
        **known,
        version=found.version,
        provider=found.provider,
        blocks=len(found.blocks),
        processed_length=found.processed_length,
        responses=len(found.conversation_state.anchors),
        kinds=FrozenMap(Counter(block.kind for block in found.blocks)),
    )
