"""The evidence that one engine has about the memory of its server, updated with each response.

``ServerMemory`` applies the pure rules of ``kedge.memory.evidence`` and
``kedge.memory.tokens`` to the plans and answers of an engine.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kedge.errors import KedgeError
from kedge.events import Outcome
from kedge.events.types import ResponseFacts
from kedge.memory.evidence import (
    KNOWN_IDENTITIES,
    EvidenceKey,
    EvidenceStore,
    KnownServer,
    Proof,
    ServerEvidence,
    Trust,
    validate_trust,
)
from kedge.memory.tokens import (
    SentTokens,
    Verdict,
    can_disprove,
    can_prove,
    count_response,
    judge_usage,
    measure_request,
)
from kedge.observe import get_logger
from kedge.planning import AnchorRecord, RejectedAnchor, RequestPlan, TokenCounts

MAX_REMEMBERED_RESPONSES = 4_096

log = get_logger("kedge.memory.judge")


def detect_echo_mismatch(response: ResponseFacts | Outcome, plan: RequestPlan) -> bool:
    """Return whether the server echoes another ``previous_response_id`` than the request had.

    Some servers echo it only when the response is finished, so both its start and its end are checked.
    """
    expected = plan.previous_response_id
    return bool(expected) and response.echoed and response.previous_response_id != expected


class ServerMemory:
    """The evidence of one engine, by model, streaming and transport."""

    def __init__(
        self,
        scope: str,
        *,
        trust: Trust,
        transport: str,
        clock: Callable[[], float],
        known: KnownServer | None = None,
        store: EvidenceStore | None = None,
    ) -> None:
        self.trust: Trust = validate_trust(trust)
        self._store = store
        self._is_configured = store is not None
        self._saved: dict[EvidenceKey, ServerEvidence | None] = {}
        self._scope = scope
        self._transport = transport
        self._clock = clock
        self._known = known
        self._proof: Proof = "table"
        self._evidence: dict[EvidenceKey, ServerEvidence] = {}
        self._counts: OrderedDict[str, TokenCounts | None] = OrderedDict()
        self._not_before = 0.0

    async def attach(self, store: EvidenceStore, model: str) -> None:
        """Use a store for the evidence, unless one is configured, and load its evidence about a model.

        An engine outlives the stores of its conversations: the newest one replaces the others, which
        may be closed.
        """
        if not self._is_configured and self._store is not store:
            self._store = store
            self._saved.clear()
        for streaming in (True, False):
            await self.load(model, streaming=streaming)

    async def load(self, model: str, *, streaming: bool) -> ServerEvidence:
        """Return the evidence for a request, read from the store at its first use."""
        key = self._key(model, streaming)
        if self._store is not None and key not in self._saved:
            form = await self._store.load_evidence(str(key))
            saved = self._saved[key] = None if form is None else ServerEvidence.from_json(form)
            if saved is not None and key not in self._evidence:
                self._evidence[key] = saved.copy()
                if saved.proof == "identity":
                    self.identify("kedge")
        return self.get(model, streaming=streaming)

    def get(self, model: str, *, streaming: bool) -> ServerEvidence:
        """Return the evidence for a request that is in memory."""
        key = self._key(model, streaming)
        evidence = self._evidence.get(key)
        if evidence is None:
            evidence = self._evidence[key] = ServerEvidence(not_before=self._not_before)
            self._apply(evidence)
        return evidence

    async def save(self, evidence: ServerEvidence) -> None:
        """Write evidence to the store, if there is one.

        An error is logged and not raised, because the response that the evidence is from must not be lost.
        """
        if self._store is None:
            return
        for key, stored in list(self._evidence.items()):  # other requests add theirs meanwhile
            if stored is evidence and self._saved.get(key) != evidence:
                saved = evidence.copy()
                try:
                    await self._store.save_evidence(str(key), saved.to_json())
                except KedgeError as error:
                    log.warning("evidence about a server was not stored: %s", error)
                    return
                self._saved[key] = saved

    def identify(self, identity: str) -> None:
        """Apply the known properties of a server with this identity to all evidence."""
        known = KNOWN_IDENTITIES.get(identity)
        if known is None:
            return
        if self._known is None:
            self._known = known
            self._proof = "identity"
        for evidence in self._evidence.values():
            self._apply(evidence)

    def max_depth(self, evidence: ServerEvidence, configured: int | None) -> int | None:
        """Return the longest chain to rely on: the configured, the known or the observed one."""
        limits = [limit for limit in (configured, evidence.max_depth) if limit is not None]
        return min(limits, default=None)

    def may_need_verdict(self, evidence: ServerEvidence) -> bool:
        """Return whether the answer to some plan must be judged before it is shown."""
        return self.trust == "earned" and evidence.must_hold(sys.maxsize, self._clock())

    def needs_verdict(self, plan: RequestPlan, evidence: ServerEvidence) -> bool:
        """Return whether an answer to this plan must be judged before it is shown."""
        if plan.anchor is None or plan.mode != "chained" or self.trust != "earned":
            return False
        return evidence.must_hold(plan.anchor.depth, self._clock())

    def needs_count(self, plan: RequestPlan, evidence: ServerEvidence) -> bool:
        """Return whether a plan may be used only if the server's count could show a loss.

        A server that was proven by its counts may begin to forget at any time, or at the next depth. A
        request whose count is no evidence (other instructions or tools than before, pictures, hosted
        tools) would not show it, and the answer would be wrong without notice.
        """
        is_chained = plan.anchor is not None and plan.mode == "chained"
        return is_chained and self.trust == "earned" and evidence.proof == "count"

    def measure(
        self, plan: RequestPlan, settings: Mapping[str, Any], evidence: ServerEvidence
    ) -> SentTokens | None:
        """Bound the tokens that a request sends."""
        crude = evidence.proof == "table"
        return measure_request(plan, settings, share=evidence.share, crude=crude)

    def reject_untrusted(
        self,
        plan: RequestPlan,
        full: RequestPlan,
        evidence: ServerEvidence,
        sent: SentTokens | None,
    ) -> RequestPlan:
        """Return the plan, or the full plan if the answer to a chained one could not be judged."""
        if plan.anchor is None:
            return plan
        anchor = self._with_counts(plan.anchor)
        overhead = evidence.get_overhead(sent)
        needs_proof = self.needs_verdict(plan, evidence)
        is_judged = (
            can_prove(anchor, sent, overhead)
            if needs_proof
            else can_disprove(anchor, sent, overhead, exact=evidence.counts_exactly)
        )
        if is_judged:
            return plan
        untrusted = RejectedAnchor(plan.anchor.response_id, "untrusted", plan.anchor)
        return replace(full, mode=plan.mode, rejected=(*plan.rejected, untrusted))

    def judge(
        self,
        outcome: Outcome,
        plan: RequestPlan,
        sent: SentTokens | None,
        evidence: ServerEvidence,
        *,
        counts_outweigh_audits: bool = False,
    ) -> Verdict:
        """Judge an answer to a chained request and update the evidence; the caller records losses.

        Args:
            outcome: The answer.
            plan: The plan of the request.
            sent: The bounds of the tokens that the request sent.
            evidence: The evidence about the server.
            counts_outweigh_audits: Whether a count that shows a loss outweighs an audit. Otherwise
                the audit is believed, and the counts of this server are no longer used.
        """
        if outcome.status in ("failed", "cut", "running"):
            return ""
        if plan.conversation_id:
            named = outcome.conversation_id
            return "lost" if self.is_other_conversation(named, plan, evidence) else ""
        if plan.anchor is None:
            return ""
        silent = evidence.echoes and not outcome.echoed
        if detect_echo_mismatch(outcome, plan) or (silent and self.trust != "always"):
            return "lost"
        evidence.echoes = evidence.echoes or outcome.echoed
        if self.trust == "always" or not evidence.counts:
            evidence.record_chained()
            return ""
        base = self._with_counts(plan.anchor).counted
        overhead = evidence.get_overhead(sent)
        verdict = judge_usage(outcome.usage, base, sent, overhead)
        if verdict in ("lost", "partial"):
            if evidence.proof != "audit":
                return verdict
            if counts_outweigh_audits:
                evidence.record_contradiction(self._clock())
                return verdict
            evidence.counts = False  # the audit listed the items, so the counts are unreliable
            return ""
        evidence.record_chained()
        if verdict == "remembered":
            evidence.record_remembered(plan.anchor.depth)
        if outcome.usage and base and sent and base.settings == sent.settings:
            evidence.record_agreement(outcome.usage, base, sent)
        return verdict

    def is_other_conversation(
        self, named: str | None, plan: RequestPlan, evidence: ServerEvidence
    ) -> bool:
        """Return whether a server answered without the conversation object that the request continues.

        Args:
            named: The object that the answer names; empty for none, None if the member is missing.
            plan: The plan of the request.
            evidence: The evidence about the server; a missing member is a loss only if it usually names objects.
        """
        if not plan.conversation_id or named == plan.conversation_id:
            return False
        return named is not None or evidence.names_conversations

    def record_loss(self, verdict: Verdict, plan: RequestPlan, evidence: ServerEvidence) -> None:
        """Record that the server answered without all or a part of the context."""
        depth = plan.anchor.depth if plan.anchor else 1
        evidence.record_silent_loss(self._clock(), depth, partial=verdict == "partial")

    def count(
        self, outcome: Outcome, plan: RequestPlan, sent: SentTokens | None, evidence: ServerEvidence
    ) -> TokenCounts | None:
        """Return the tokens that the server counted for a response, and remember them."""
        base = self._with_counts(plan.anchor).counted if plan.anchor else None
        crude = evidence.proof == "table"
        counted = count_response(outcome, plan, sent, base, share=evidence.share, crude=crude)
        if counted and plan.is_full and outcome.usage and sent:
            evidence.record_full_send(outcome.usage, sent)
        return counted

    def record_issued(
        self,
        response_id: str,
        counted: TokenCounts | None,
        evidence: ServerEvidence,
        *,
        known: bool,
    ) -> bool:
        """Remember a response id; return whether the server has issued it before."""
        if not response_id:
            return False
        reused = known or response_id in self._counts
        self._counts[response_id] = counted
        self._counts.move_to_end(response_id)
        while len(self._counts) > MAX_REMEMBERED_RESPONSES:
            self._counts.popitem(last=False)
        if reused:
            now = self._clock()
            evidence.record_reused_id(now)
            self._not_before = now
            for each in self._evidence.values():
                each.not_before = now
        return reused

    def _with_counts(self, anchor: AnchorRecord) -> AnchorRecord:
        """Return the record with its token counts, which not every store saves."""
        if anchor.counted is None and (counted := self._counts.get(anchor.response_id)):
            return replace(anchor, counted=counted)
        return anchor

    def _key(self, model: str, streaming: bool) -> EvidenceKey:
        return EvidenceKey(self._scope, model, streaming, self._transport)

    def _apply(self, evidence: ServerEvidence) -> None:
        if self._known is not None:
            proof = self._proof if self._known.remembers else ""
            evidence.identify(proof, self._known.max_depth)
