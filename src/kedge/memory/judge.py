"""Decide whether a request may rely on a server's memory, and judge the answer.

A ``MemoryCheck`` accompanies one request, of an engine, a dry run, a chained client or the proxy:

1. ``decide`` returns how a planned request may use its anchor: directly, if the answer is held back until it is
   judged, after a probe, or not at all.
2. ``judge`` returns what the answer shows and what follows from it, and updates the evidence.
3. ``count`` returns the server's token counts, from which the next answer is judged.

The rules are those of ``kedge.memory.evidence`` and ``kedge.memory.tokens``. With ``trust="always"`` nothing is held
back or probed, and token counts are only reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kedge.events import Outcome, Usage
from kedge.events.types import ResponseFacts
from kedge.memory.evidence import DOUBTS_OF_CHAINING, Doubt, ServerEvidence
from kedge.memory.tokens import (
    ORDINARY_EXCESS,
    SentTokens,
    Verdict,
    can_disprove,
    can_prove,
    count_response,
    expected_tokens,
    has_foreign_tokens,
    judge_usage,
    list_sent,
    measure_blocks,
)
from kedge.planning import AnchorRecord, RequestPlan, TokenCounts
from kedge.turns import Block

if TYPE_CHECKING:
    from kedge.memory.server_memory import ServerMemory

Way = Literal["direct", "held", "probe", "full"]
"""How a request may use its anchor: directly, if its answer is judged before it is shown, after a probe, or not."""

Action = Literal["accept", "report", "resend"]
"""What follows from an answer: nothing, a report, or a full send if none of the answer was shown."""


class Judgment(NamedTuple):
    """What an answer shows about the server's memory, and what follows from it."""

    verdict: Verdict = ""
    action: Action = "accept"
    reason: Literal["", "forgot", "unproven", "conversation"] = ""


def detect_echo_mismatch(response: ResponseFacts | Outcome, plan: RequestPlan) -> bool:
    """Return whether the server echoes another ``previous_response_id`` than the request had.

    Some servers echo it only when the response is finished, so both its start and its end are checked.
    """
    expected = plan.previous_response_id
    return bool(expected) and response.echoed and response.previous_response_id != expected


@dataclass(slots=True)
class MemoryCheck:
    """The decisions about one request and its answer.

    Attributes:
        memory: The evidence about this endpoint and account.
        evidence: The evidence for the requested model, with or without streaming.
        conversation: Identifies the conversation; missing responses of one do not concern the others.
        can_hold: Whether the answer can be held back until it is judged.
        believes_probes: Whether a probe proves the memory of a server that reports no token counts.
        way: How the request uses its anchor.
    """

    memory: "ServerMemory"
    evidence: ServerEvidence
    conversation: str = ""
    can_hold: bool = True
    believes_probes: bool = False
    way: Way = "direct"
    plan: RequestPlan | None = field(default=None, init=False)
    _body: Mapping[str, Any] = field(default_factory=dict[str, Any], init=False)
    _sent: Sequence[Block] | None = field(default=None, init=False)
    _visible: int = field(default=0, init=False)
    """The minimum count of the visible context, known from the anchor that is not used."""
    _measured: dict[tuple[float, float, bool], SentTokens | None] = field(
        default_factory=dict[tuple[float, float, bool], SentTokens | None], init=False
    )

    # Before a request

    @property
    def doubt(self) -> Doubt:
        """The reason why the server must not be chained on now; empty if it may be."""
        doubt = self.evidence.open_doubt(self.memory.clock(), self.conversation)
        return "" if self.is_always and doubt not in DOUBTS_OF_CHAINING else doubt

    @property
    def is_always(self) -> bool:
        """Whether the server is chained on whatever the evidence."""
        return self.memory.trust == "always"

    def get_max_depth(self, configured: int | None) -> int | None:
        """Return the longest chain to rely on: the configured, the known or the observed one."""
        limits = [limit for limit in (configured, self.evidence.max_depth) if limit is not None]
        return min(limits, default=None)

    def describe(
        self, plan: RequestPlan, body: Mapping[str, Any], sent: Sequence[Block] | None = None
    ) -> None:
        """Set the request that is sent.

        Args:
            plan: The plan of the request.
            body: The members of its body that change how many tokens a server counts, or all of them.
            sent: The blocks that it sends, if they are not those of the plan.
        """
        self.plan, self._body, self._sent = plan, body, sent
        self._measured.clear()

    def decide(
        self, plan: RequestPlan, body: Mapping[str, Any], sent: Sequence[Block] | None = None
    ) -> Way:
        """Decide how a request may use its anchor; the arguments are those of ``describe``."""
        self.describe(plan, body, sent)
        self.way = self._choose_way(plan)
        self._visible = 0
        if self.way in ("probe", "full") and plan.anchor:
            base, bounds = self.memory.add_counts(plan.anchor).counted, self._measure()
            if base and bounds and base.settings == bounds.settings:
                self._visible = expected_tokens(base, bounds)
        return self.way

    def _choose_way(self, plan: RequestPlan) -> Way:
        evidence, now = self.evidence, self.memory.clock()
        if plan.anchor is None or plan.mode == "stateless" or self.memory.trust != "earned":
            return "direct"
        if not evidence.must_hold(plan.anchor.depth, now):
            # A server that was proven by its counts may begin to forget at any time, so it is used only where
            # its count would show that.
            is_safe = evidence.proof != "count" or self._can_disprove(plan.anchor)
            return "direct" if is_safe else "full"
        if (self.can_hold or evidence.stores) and self._can_prove(plan.anchor, evidence.excess):
            return "held" if self.can_hold else "direct"
        if evidence.stores or now < evidence.next_probe_at:
            return "full"
        is_proof = self.believes_probes and not evidence.reports
        return "probe" if is_proof or self._can_prove(plan.anchor, ORDINARY_EXCESS) else "full"

    def _can_prove(self, anchor: AnchorRecord, excess: float) -> bool:
        sent = self._measure(excess)
        return can_prove(self.memory.add_counts(anchor), sent, self.evidence.get_overhead(sent))

    def _can_disprove(self, anchor: AnchorRecord) -> bool:
        sent, anchor = self._measure(), self.memory.add_counts(anchor)
        overhead, exact = self.evidence.get_overhead(sent), self.evidence.counts_exactly
        return can_disprove(anchor, sent, overhead, exact=exact)

    def _measure(self, excess: float | None = None) -> SentTokens | None:
        plan, evidence = self.plan, self.evidence
        if plan is None:
            return None
        key = (evidence.share, evidence.excess if excess is None else excess, self._is_crude)
        if key not in self._measured:
            share, excess, crude = key
            blocks = list_sent(plan) if self._sent is None else self._sent
            self._measured[key] = measure_blocks(
                blocks, self._body, share=share, excess=excess, crude=crude
            )
        return self._measured[key]

    @property
    def _is_crude(self) -> bool:
        """Whether exact bounds are not needed: for a server that needs no proof, or while it gets none."""
        return self.evidence.proof == "table" or bool(self.doubt)

    def record_probe(self, agrees: bool | None) -> None:
        """Record whether the server listed what it should have stored; None if it listed nothing."""
        with self.memory.lock:
            self.evidence.record_probe(agrees=agrees, now=self.memory.clock())
            if agrees and self.believes_probes and not self.evidence.reports:
                self.evidence.record_success("audit")

    # After a request

    def names_another(self, named: str | None) -> bool:
        """Return whether a server answered without the conversation object that the request continues.

        Args:
            named: The object that the answer names; empty for none, None if the member is missing, which is a
                loss only for a server that usually names objects.
        """
        expected = self.plan.conversation_id if self.plan else ""
        if not expected or named == expected:
            return False
        return named is not None or self.evidence.names_conversations

    def judge(self, outcome: Outcome) -> Judgment:
        """Judge an answer, and update the evidence."""
        evidence, plan = self.evidence, self.plan
        usage = outcome.usage
        with self.memory.lock:
            if usage is not None and usage.input_tokens > 0:
                evidence.reports = True
            if (
                plan is None
                or plan.anchor is None
                or outcome.status in ("failed", "cut", "running")
            ):
                return Judgment()
            if self._was_ignored(outcome, plan):
                return self.record_forgotten()
            verdict = self._judge_count(outcome, plan.anchor)
            if verdict == "foreign":
                action = "report" if self.is_always else "resend"
                return Judgment(verdict, action, "conversation")
            if verdict in ("lost", "partial"):
                return self.record_forgotten(verdict, counted=True)
            if self.way == "held" and verdict != "remembered":
                evidence.record_loss(self.memory.clock(), "no_verdict")
                return Judgment(verdict, "resend", "unproven")
            return Judgment(verdict)

    def _was_ignored(self, outcome: Outcome, plan: RequestPlan) -> bool:
        """Return whether the answer itself says that it was generated without the requested context."""
        if plan.conversation_id:
            return self.names_another(outcome.conversation_id)
        is_silent = self.evidence.echoes and not outcome.echoed and not self.is_always
        if is_silent or detect_echo_mismatch(outcome, plan):
            return True
        self.evidence.echoes = self.evidence.echoes or outcome.echoed
        return False

    def _judge_count(self, outcome: Outcome, anchor: AnchorRecord) -> Verdict:
        evidence, sent, usage = self.evidence, self._measure(), outcome.usage
        base = self.memory.add_counts(anchor).counted
        known = evidence.proof in ("table", "identity")
        verdict = judge_usage(usage, base, sent, evidence.get_overhead(sent), known=known)
        if verdict == "partial" and evidence.proof == "table" and not self.is_always:
            verdict = verdict if evidence.record_shortfall() else ""
        if verdict in ("lost", "partial"):
            return verdict
        if self._has_foreign_tokens(usage, base):
            return "foreign"
        evidence.record_chained()
        if verdict == "remembered":
            evidence.record_remembered(anchor.depth)
        if usage and base and sent:
            evidence.record_agreement(usage, base, sent)
        return verdict

    def is_comparable(self, outcome: Outcome) -> bool:
        """Return whether the token count of an answer can be compared with that of its anchor."""
        anchor = self.plan.anchor if self.plan else None
        base = self.memory.add_counts(anchor).counted if anchor else None
        usage, sent = outcome.usage, self._measure()
        if base is None or sent is None or usage is None or usage.input_tokens <= 0:
            return False
        return base.settings == sent.settings

    def _has_foreign_tokens(self, usage: Usage | None, base: TokenCounts | None) -> bool:
        """Return whether the server read more than the conversation object should have."""
        plan, evidence = self.plan, self.evidence
        if plan is None or plan.anchor is None or not plan.conversation_id:
            return False
        last = plan.anchor.response_id
        output = [block for block in plan.source[: plan.start] if block.response_id == last]
        measured = measure_blocks(
            output,
            self._body,
            share=evidence.share,
            excess=evidence.excess,
            crude=self._is_crude,
        )
        exact = evidence.counts_exactly and not self._is_crude
        return has_foreign_tokens(usage, base, measured, self._measure(), exact=exact)

    def record_forgotten(self, verdict: Verdict = "lost", *, counted: bool = False) -> Judgment:
        """Record that the server answered without all or a part of the context.

        Args:
            verdict: What it answered without.
            counted: Whether only its token count shows this, and not the answer itself.
        """
        if self.is_always:
            return Judgment(verdict, "report" if counted else "resend", "forgot")
        depth = self.plan.anchor.depth if self.plan and self.plan.anchor else 1
        with self.memory.lock:
            now = self.memory.clock()
            self.evidence.record_silent_loss(now, depth, partial=verdict == "partial")
        return Judgment(verdict, "resend", "forgot")

    def count(self, outcome: Outcome) -> TokenCounts | None:
        """Return the tokens that the server counted for a response, from which the next one is judged."""
        plan, evidence = self.plan, self.evidence
        if plan is None or outcome.usage is None:
            return None
        sent = self._measure()
        base = self.memory.add_counts(plan.anchor).counted if plan.anchor else None
        counted = count_response(
            outcome,
            plan,
            sent,
            base,
            visible=self._visible,
            crude=self._is_crude,
        )
        if counted and plan.is_full and sent:
            with self.memory.lock:
                evidence.record_full_send(outcome.usage, sent)
        return counted

    def record_rejection(self, reason: str, created_at: float, now: float) -> None:
        """Record that the server rejected an anchor: it is missing, or chaining is not supported.

        Args:
            reason: How the server rejected it; see ``kedge.engines.heal_rules``.
            created_at: The Unix time at which the response was created.
            now: The time of the rejection.
        """
        with self.memory.lock:
            if reason == "unsupported":
                self.evidence.record_unsupported()
            elif reason == "gone" and not self.is_always:
                self.evidence.record_missing(now, created_at, self.conversation)

    def record_error(self) -> None:
        """Record that a chained request was answered with a server error."""
        with self.memory.lock:
            self.evidence.record_error(self.memory.clock())
