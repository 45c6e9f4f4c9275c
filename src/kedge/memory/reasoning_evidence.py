"""Evidence of whether a server returns encrypted reasoning, per scope and model.

A response that a server stores keeps its reasoning there. But the server may lose the response, expire it or turn
out not to store anything, and then the reasoning is lost unless the client has it. So encrypted reasoning is
requested for stored responses as well: from known hosts at once, from others after an answer of the model contained
reasoning. Servers and models without it reject the request, some with a server error; it is then repeated once without.
"""

from kedge.events import Outcome
from kedge.memory.evidence import Evidence
from kedge.turns import ReasoningBlock

REJECTION_STATUSES = (400, 422, 500)
"""The HTTP statuses with which servers reject an unknown value of ``include``."""

KEY_SUFFIX = "encrypted-reasoning"
"""The end of the keys of this evidence in a store."""


class ReasoningEvidence(Evidence):
    """What the answers of one model have shown.

    Attributes:
        accepted: Whether a request for encrypted reasoning was answered; None before the first one.
        reasons: Whether an answer contained reasoning.
        stores: Whether responses are stored; not if an answer had ``store: false`` and the request did not.
    """

    accepted: bool | None = None
    reasons: bool = False
    stores: bool = True

    def should_request(self, *, known: bool, unstored: bool, heal: bool) -> bool:
        """Return whether to request encrypted reasoning.

        Args:
            known: Whether the server is a known host.
            unstored: Whether the response is not stored, so that its reasoning is lost otherwise.
            heal: Whether a rejected request may be repeated without.
        """
        if self.accepted is not None:
            return self.accepted
        return heal and (known or unstored or self.reasons)

    def record(self, outcome: Outcome, *, requested: bool, rejected: bool, stored: bool) -> None:
        """Record an answer.

        Args:
            outcome: The answer.
            requested: Whether encrypted reasoning was requested.
            rejected: Whether the request was repeated without, after the server had rejected it.
            stored: Whether the server was to store the response.
        """
        if outcome.status not in ("completed", "incomplete"):
            return
        if requested or rejected:
            self.accepted = requested
        self.reasons |= any(isinstance(block, ReasoningBlock) for block in outcome.blocks)
        self.stores &= not (stored and outcome.stored is False)
