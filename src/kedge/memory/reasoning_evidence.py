"""Evidence of whether a server returns encrypted reasoning, per scope and model.

A response that a server stores keeps its reasoning there. But the server may lose the response, expire it or turn
out not to store anything, and then the reasoning is lost unless the client has it. So encrypted reasoning is
requested for stored responses as well: from known hosts at once, from others after an answer of the model contained
reasoning. Servers and models without it reject the request, some with a server error; it is then repeated once without.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kedge.errors import KedgeError
from kedge.events import Outcome
from kedge.memory.evidence import EvidenceStore
from kedge.observe import get_logger
from kedge.turns import ReasoningBlock

REJECTION_STATUSES = (400, 422, 500)
"""The HTTP statuses with which servers reject an unknown value of ``include``."""

KEY_SUFFIX = "encrypted-reasoning"
"""The end of the keys of this evidence in a store."""

log = get_logger("kedge.memory.reasoning_evidence")


@dataclass(slots=True)
class ReasoningEvidence:
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


class ReasoningMemory:
    """The evidence of one engine about the models of its server.

    Args:
        scope: The provider, endpoint and account.
        get_store: Returns the store of the evidence, if there is one.
    """

    def __init__(self, scope: str, get_store: Callable[[], EvidenceStore | None]) -> None:
        self._scope = scope
        self._get_store = get_store
        self._store: EvidenceStore | None = None
        self._evidence: dict[str, ReasoningEvidence] = {}
        self._loaded: dict[str, ReasoningEvidence] = {}

    def get(self, model: str) -> ReasoningEvidence:
        """Return the evidence about a model that is in memory."""
        return self._evidence.setdefault(model, ReasoningEvidence())

    async def load(self, model: str) -> None:
        """Read the evidence about a model from the store at its first use."""
        store = self._get_store()
        if store is not self._store:
            self._store = store
            self._loaded.clear()
        if store is not None and model not in self._loaded:
            loaded = _read_evidence(await store.load_evidence(self._key(model)) or {})
            self._loaded[model] = loaded
            self._evidence.setdefault(model, replace(loaded))

    async def save(self, model: str) -> None:
        """Write the evidence about a model to the store, if it changed; an error is only logged."""
        store, evidence = self._get_store(), replace(self.get(model))
        if store is None or self._loaded.get(model) == evidence:
            return
        try:
            await store.save_evidence(self._key(model), asdict(evidence))
        except KedgeError as error:
            log.warning("evidence about a server was not stored: %s", error)
            return
        self._loaded[model] = evidence

    def _key(self, model: str) -> str:
        return f"{self._scope} {model} {KEY_SUFFIX}"


def _read_evidence(form: Mapping[str, Any]) -> ReasoningEvidence:
    """Return stored evidence; members that are not known or have another type are ignored."""
    names = {each.name for each in fields(ReasoningEvidence)} & form.keys()
    return ReasoningEvidence(**{name: form[name] for name in names if type(form[name]) is bool})
