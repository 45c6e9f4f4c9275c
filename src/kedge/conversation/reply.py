"""What a Conversation gives back: the answer, and the node where it is kept."""

from dataclasses import dataclass, field

from kedge.events import Usage
from kedge.planning import RequestPlan
from kedge.turns import AssistantBlock, Turn


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one message.

    ``node`` is where it is kept in the tree. ``usage`` adds up all responses of this call, ``plan``
    is the newest request's; ``stored`` tells that nothing was sent, because the answer was there
    already.
    """

    text: str
    turn: Turn
    node: int
    conversation: str
    usage: Usage = field(default_factory=Usage)
    plan: RequestPlan | None = field(default=None, repr=False)
    stored: bool = False

    @property
    def refusal(self) -> str:
        """The words with which the model refused, if it did."""
        last = next((b for b in reversed(self.turn.blocks) if isinstance(b, AssistantBlock)), None)
        return last.refusal if last else ""
