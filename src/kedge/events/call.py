"""A tool call as it grows, and what single events say about it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallSeen:
    """What one event of a stream says about a call; ``call_id`` may be anything, also nothing."""

    call_id: object = None
    name: str = ""
    item_id: str = ""
    output_index: int = -1
    custom: bool = False
    arguments: str | None = None
    cut: bool = False
    """Whether the model was stopped before it had written all of it."""


@dataclass(slots=True)
class ToolCall:
    """One call as it grows."""

    call_id: str
    name: str
    item_id: str
    output_index: int
    custom: bool
    fallback: str = ""
    """Why ``call_id`` is not the provider's own; empty when it is."""
    written: str | None = None
    """The arguments as a whole, once the provider has said them."""
    pieces: list[str] = field(default_factory=list[str])
    completed: bool = False
    cut: bool = False

    @property
    def arguments(self) -> str:
        """The arguments as far as they are known: the whole ones win over the joined pieces."""
        return self.written or "".join(self.pieces)


@dataclass(slots=True)
class EarlyWords:
    """Words that came before their call."""

    item_id: str
    output_index: int
    pieces: list[str] = field(default_factory=list[str])
    written: str | None = None


@dataclass(frozen=True, slots=True)
class CallSummary:
    """All calls of a response in the order of its output, and how their ids were come by."""

    completed: tuple[str, ...]
    open: tuple[str, ...]
    extracted: int
    fallen_back: int
    corrected: int
    failed: int


def usable(call_id: object) -> str:
    """The id, if it is one; else an empty string."""
    return call_id if isinstance(call_id, str) and call_id.strip() else ""


def flaw_of(call_id: object) -> str:
    """What is wrong with an id, in one word; an empty string if nothing is."""
    if usable(call_id):
        return ""
    return "missing" if call_id is None else "empty" if isinstance(call_id, str) else "malformed"


def same_place(call: ToolCall, output_index: int) -> bool:
    """Whether nothing speaks against the call being at this place."""
    return output_index in (-1, call.output_index) or call.output_index == -1


def belongs(early: EarlyWords, call: ToolCall) -> bool:
    """Whether early words are this call's."""
    if early.item_id and call.item_id:
        return early.item_id == call.item_id
    return early.output_index == call.output_index != -1
