"""Decide whether a request may rely on a server's memory, and judge the answer.

A ``MemoryCheck`` accompanies one request, of an engine, a dry run, a chained client or the proxy:

1. ``decide`` returns how a planned request may use its anchor: directly, if the answer is held back until it is
   judged, after a probe, or not at all.
2. ``judge`` returns what the answer shows, what follows from it, and the server's token counts, from which the next
   answer is judged. It updates the evidence.

The rules are in ``kedge.evidence.server_evidence`` and ``kedge.evidence.tokens``. With ``trust="always"`` nothing is
held back or probed, and token counts are only reported. ``EvidenceRegistry`` has the evidence, in memory
and in a store.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import msgspec

from kedge._internal.arguments import check_choice, parse_switch, read_variable
from kedge._internal.bounded_dict import BoundedDict
from kedge.errors import KedgeError
from kedge.events import Outcome, Usage
from kedge.events.types import ResponseFacts
from kedge.evidence import tokens
from kedge.evidence.server_evidence import (
    DOUBTS_OF_CHAINING,
    KEY_SUFFIX,
    KNOWN_IDENTITIES,
    TRUST_LEVELS,
    Doubt,
    Evidence,
    EvidenceStore,
    KnownServer,
    ReasoningEvidence,
    ServerEvidence,
    Trust,
)
from kedge.observe import get_logger
from kedge.planning import AnchorRecord, RequestPlan, SentRequest, TokenCounts
from kedge.turns import Block

log = get_logger("kedge.evidence")

CHAINING_VARIABLE = "ENABLE_RESPONSE_BOUNDARY_TRACKING"
"""The environment variable that can disable chaining."""
Way = Literal["direct", "held", "probe", "full"]
"""How a request may use its anchor: directly, if its answer is judged before it is shown, after a probe, or not."""


class Judgment(NamedTuple):
    """What an answer shows about the server's memory, and what follows from it."""

    reason: Literal["", "forgot", "unproven", "conversation"] = ""
    """Why the answer is not used; empty if it is."""
    resend: bool = False
    """Whether everything is sent again if none of the answer was shown; otherwise the loss is only reported."""
    counted: TokenCounts | None = None
    """The tokens that the server counted for an answer that is used."""


def names_other_response(response: ResponseFacts | Outcome, expected: str) -> bool:
    """Return whether the server echoes another ``previous_response_id`` than the request had.

    Some servers echo it only when the response is finished, so both its start and its end are checked.
    """
    return bool(expected) and response.echoed and response.previous_response_id != expected


def is_chaining_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether chaining is enabled: it is, unless the environment variable has a value that does not mean on."""
    word = read_variable(CHAINING_VARIABLE, environ)
    if not word:
        return True
    is_on = parse_switch(word)
    if is_on is None:
        # The purpose of the variable is to disable chaining, so an unknown word does.
        _warn_of_unknown_word(word[:100])
    return is_on is True


@lru_cache(maxsize=16)
def _warn_of_unknown_word(word: str) -> None:
    """Warn once that a word is neither on nor off."""
    log.warning(
        "%s=%r means neither on nor off, so chaining is disabled: set it to 1 or 0",
        CHAINING_VARIABLE,
        word,
    )


class MemoryCheck(msgspec.Struct):
    """The decisions about one request and its answer.

    Attributes:
        registry: The evidence about this endpoint and account.
        scope: The provider, endpoint and account.
        records: Both of the following, by their keys in a store.
        evidence: The evidence for the requested model, with or without streaming.
        reasoning: The evidence about the encrypted reasoning of the model.
        conversation: Identifies the conversation; missing responses of one do not concern the others.
        can_hold: Whether the answer can be held back until it is judged.
        encrypts: Whether the server encrypts reasoning, by its host or as it says itself; None if that is not known.
        way: How the request uses its anchor.
        plan: The plan of the request, if it was decided.
    """

    registry: "EvidenceRegistry"
    scope: str
    records: Mapping[str, Evidence]
    evidence: ServerEvidence
    reasoning: ReasoningEvidence
    conversation: str = ""
    can_hold: bool = True
    encrypts: bool | None = None
    way: Way = "direct"
    plan: RequestPlan | None = None
    _body: Mapping[str, Any] | None = None
    """The settings of a request that may be sent; None once it is sent."""
    _settings: int | None = None
    """Identifies the settings of the request that was sent; None where its token counts are no evidence."""
    _sent: tokens.SentTokens | None = None
    _visible: int = 0
    """The minimum count of the visible context, known from the anchor that is not used."""

    # Before a request

    @property
    def doubt(self) -> Doubt:
        """The reason why the server must not be chained on now; empty if it may be."""
        doubt = self.evidence.find_doubt(self.registry.clock(), self.conversation)
        if self.is_always and doubt not in DOUBTS_OF_CHAINING:
            return ""
        return doubt

    @property
    def is_always(self) -> bool:
        """Whether the server is chained on whatever the evidence."""
        return self.registry.trust == "always"

    def set_request(self, plan: RequestPlan, body: Mapping[str, Any]) -> None:
        """Set the request that is sent.

        Args:
            plan: The plan of the request.
            body: The members of its body that change how many tokens a server counts, or all of them.
        """
        self.plan = plan
        self._body = body
        self._sent = None

    def set_sent(self, request: SentRequest | None, plan: RequestPlan) -> None:
        """Set the request that was sent, by which alone its answer is judged.

        Args:
            request: The request; None if it is not known, so that its answer gives no evidence.
            plan: Its plan.
        """
        self.plan = None
        self._body = None
        self._sent = None
        if request is not None:
            self.plan = plan
            self._settings = request.settings
            self._visible = request.visible

    @property
    def visible(self) -> int:
        """The minimum count of the context that the request could have continued; 0 if it is not known."""
        return self._visible

    def decide(self, plan: RequestPlan, body: Mapping[str, Any]) -> Way:
        """Decide how a request may use its anchor; for the arguments see ``set_request``."""
        self.set_request(plan, body)
        self.way = self._choose_way(plan)
        self._visible = 0
        if not plan.is_full and self.way in ("probe", "full"):
            self._visible = tokens.bound_visible(plan, self._measure())
        return self.way

    def _choose_way(self, plan: RequestPlan) -> Way:
        if plan.anchor is None or plan.mode == "stateless" or self.registry.trust != "earned":
            return "direct"
        evidence = self.evidence
        now = self.registry.clock()
        base = plan.anchor.counted

        if not evidence.must_hold(plan.anchor.depth, now):
            if evidence.proof == "count" and not tokens.can_disprove(base, self._measure()):
                # A server that was proven by its counts may begin to forget at any time, so it is used only where
                # its count would show that.
                return "full"
            return "direct"

        sent = self._measure()
        if (self.can_hold or evidence.stores) and tokens.can_prove(base, sent):
            return "held" if self.can_hold else "direct"

        # Its count would prove nothing. A probe is made if what it shows would change that.
        if evidence.stores or now < evidence.next_probe_at:
            return "full"
        if self._believes_lists(base):
            return "probe"
        if sent and tokens.can_prove(base, sent._replace(excess=tokens.ORDINARY_EXCESS)):
            return "probe"
        return "full"

    def _believes_lists(self, base: TokenCounts | None) -> bool:
        """Return whether a list of stored items is a proof: counts of any kind of request outweigh it."""
        return self.registry.believes_probes and not self.evidence.reports and base is None

    def _measure(
        self, before: Sequence[Block] = (), *, exactly: bool = False
    ) -> tokens.SentTokens | None:
        """Return the tokens of the request and of blocks before it, with bounds that follow from the evidence."""
        sent = self._sent
        if self.plan and (before or exactly or sent is None):
            blocks = [*before, *self.plan.sent]
            # Exact bounds are not needed for a server that needs no proof, or while it gets none, before it is accused.
            is_crude = not exactly and (self.evidence.proof == "table" or bool(self.doubt))
            if self._body is not None:
                sent = tokens.measure_request(blocks, self._body, crude=is_crude)
            elif self._settings is not None:
                sent = tokens.measure_blocks(blocks, self._settings, crude=is_crude)
            if not before:
                self._sent = sent
        if sent is None:
            return None
        return self.evidence.bound(sent)

    def record_probe(self, agrees: bool | None) -> None:
        """Record whether the server listed what it should have stored; None if it listed nothing."""
        with self.registry.lock:
            base = None
            if self.plan and self.plan.anchor:
                base = self.plan.anchor.counted
            proves = self._believes_lists(base)
            self.evidence.record_probe(agrees=agrees, proves=proves, now=self.registry.clock())

    # After a request

    def names_another(self, response: ResponseFacts | Outcome) -> bool:
        """Return whether an answer names another context than the request continues.

        Args:
            response: The start or the end of the answer. That it names no conversation object is a loss only for a
                server that usually names objects.
        """
        if self.plan is None:
            return False
        if not self.plan.conversation_id:
            return names_other_response(response, self.plan.anchor_id)
        object_id = response.conversation_id
        should_name_one = object_id is not None or self.evidence.names_conversations
        return should_name_one and object_id != self.plan.conversation_id

    def judge(self, outcome: Outcome) -> Judgment:
        """Judge an answer, and update the evidence."""
        plan = self.plan
        usage = outcome.usage
        if plan is None:
            return Judgment()
        with self.registry.lock:
            self.evidence.reports |= usage is not None and usage.input_tokens > 0
            if plan.anchor and outcome.status not in ("failed", "cut", "running"):
                judgment = self._judge_chained(outcome, plan, plan.anchor)
                if judgment.reason:
                    return judgment
            sent = self._measure()
            counted = tokens.count_response(outcome, plan, sent, visible=self._visible)
            if plan.is_full and usage and counted and sent:
                self.evidence.record_full_send(usage, sent)
            return Judgment(counted=counted)

    def _judge_chained(self, outcome: Outcome, plan: RequestPlan, anchor: AnchorRecord) -> Judgment:
        evidence = self.evidence
        usage = outcome.usage
        evidence.echoes |= outcome.echoed
        can_be_silent = plan.conversation_id or outcome.echoed or self.is_always
        if (evidence.echoes and not can_be_silent) or self.names_another(outcome):
            return self.record_forgotten()

        sent = self._measure()
        verdict = self._judge_count(usage, plan, anchor, sent)
        if verdict in ("lost", "partial"):
            return self.record_forgotten(partial=verdict == "partial", counted=True)
        if self._continues_foreign_items(usage, plan, anchor):
            return Judgment("conversation", resend=not self.is_always)

        evidence.record_chained()
        if verdict == "remembered":
            evidence.record_remembered(anchor.depth)
        if usage and anchor.counted and sent:
            evidence.record_agreement(usage, anchor.counted, sent)
        if self.way == "held" and verdict != "remembered":
            # An answer is held back only if its count would prove that the server remembers. This one counted in
            # another way than expected, and so would the next ones: they are not held back for a while.
            evidence.record_loss(self.registry.clock(), "no_verdict")
            return Judgment("unproven", resend=True)
        return Judgment()

    def _judge_count(
        self,
        usage: Usage | None,
        plan: RequestPlan,
        anchor: AnchorRecord,
        sent: tokens.SentTokens | None,
    ) -> tokens.Verdict:
        """Return what the server's token count shows, as far as it is believed."""
        base = anchor.counted
        verdict = tokens.judge_usage(usage, base, sent)
        if base and sent and base.settings != sent.settings:
            # The counts cannot be compared, but texts have a minimum of tokens with any settings.
            if tokens.lacks_context(usage, plan):
                verdict = "partial" if verdict == "remembered" else "lost"
        elif verdict in ("lost", "partial") and sent and not sent.tokens:
            # The bounds were crude, which is not enough for an accusation.
            verdict = tokens.judge_usage(usage, base, self._measure(exactly=True))
        is_hosted = self.evidence.proof == "table" and not self.is_always
        if verdict == "partial" and is_hosted and not self.evidence.record_shortfall():
            return ""
        return verdict

    def _continues_foreign_items(
        self, usage: Usage | None, plan: RequestPlan, anchor: AnchorRecord
    ) -> bool:
        """Return whether a conversation object has items that are not from this line of history."""
        if not plan.conversation_id:
            return False
        context = plan.source[: plan.start]
        answer = [block for block in context if block.response_id == anchor.response_id]
        return tokens.has_foreign_tokens(usage, anchor.counted, self._measure(answer))

    def record_forgotten(self, *, partial: bool = False, counted: bool = False) -> Judgment:
        """Record that the server answered without the context.

        Args:
            partial: Whether only a part of the context is missing.
            counted: Whether only its token count shows this, and not the answer itself.
        """
        if self.is_always:
            return Judgment("forgot", resend=not counted)
        depth = 1
        if self.plan and self.plan.anchor:
            depth = self.plan.anchor.depth
        with self.registry.lock:
            self.evidence.record_silent_loss(self.registry.clock(), depth, partial=partial)
        return Judgment("forgot", resend=True)

    def record_rejection(self, reason: str, created_at: float, now: float) -> None:
        """Record that the server rejected an anchor: it is missing, or chaining is not supported.

        Args:
            reason: How the server rejected it; see ``kedge.engines.heal_rules``.
            created_at: The Unix time at which the response was created.
            now: The time of the rejection.
        """
        with self.registry.lock:
            if reason == "unsupported":
                self.evidence.doubt = "unsupported"
            elif reason == "gone" and not self.is_always:
                self.evidence.record_missing(now, created_at, self.conversation)

    def record_error(self) -> None:
        """Record that a chained request was answered with a server error."""
        with self.registry.lock:
            self.evidence.record_error(self.registry.clock())


MAX_ENTRIES = 4_096
"""The number of records in memory, and of responses, endpoints and accounts that are remembered."""
_INITIAL_MEMBERS = frozenset({"proof", "max_depth", "not_before"})
"""The members of evidence that do not need a request of this process."""
_make_cache = partial(BoundedDict[str, Any], MAX_ENTRIES)


class EvidenceRegistry(msgspec.Struct, eq=False):
    """The evidence by scope, model, streaming and transport; a scope is an endpoint and account.

    Attributes:
        trust: Which servers are chained on.
        clock: Returns Unix time.
        transport: The transport; servers implement each separately.
        store: Where the evidence is stored, if anywhere.
        holds_streams: Whether streams can be held back until they are judged.
        believes_probes: Whether a probe proves the memory of a server that reports no token counts.
    """

    trust: Trust
    clock: Callable[[], float]
    transport: str = "http"
    store: EvidenceStore | None = None
    holds_streams: bool = True
    believes_probes: bool = False
    lock: threading.RLock = msgspec.field(default_factory=threading.RLock)
    _is_configured: bool = False
    _records: BoundedDict[str, Any] = msgspec.field(default_factory=_make_cache)
    _saved: BoundedDict[str, Mapping[str, Any]] = msgspec.field(default_factory=_make_cache)
    _identified: BoundedDict[str, KnownServer] = msgspec.field(default_factory=_make_cache)
    _issued: BoundedDict[str, None] = msgspec.field(default_factory=_make_cache)
    _reissued: BoundedDict[str, float] = msgspec.field(default_factory=_make_cache)

    def __post_init__(self) -> None:
        check_choice("trust", self.trust, TRUST_LEVELS)
        self._is_configured = self.store is not None

    def check(
        self,
        scope: str,
        model: str,
        *,
        streaming: bool,
        objects: bool = False,
        conversation: str = "",
        known: KnownServer | None = None,
        transport: str = "",
    ) -> MemoryCheck:
        """Return the check of one request, with the evidence that is in memory.

        Args:
            scope: The provider, endpoint and account.
            model: The model; gateways route by model.
            streaming: Whether the answer is streamed, which is other code in most servers.
            objects: Whether the request continues a conversation object, which is stored apart from responses.
            conversation: Identifies the conversation.
            known: What is known about the server from its host.
            transport: The transport, if it is another one than usual: an answer in the background is received by any.
        """
        code_path = "stream" if streaming else "whole"
        server_key = f"{scope} {model} {code_path} {transport or self.transport}"
        if objects:
            server_key += " objects"
        reasoning_key = f"{scope} {model} {KEY_SUFFIX}"
        initial = ServerEvidence()
        encrypts: bool | None = None
        if known is not None:
            initial.proof = "table" if known.remembers else ""
            initial.max_depth = known.max_depth
        with self.lock:
            evidence: ServerEvidence = self._open(server_key, initial)
            identified = self._identified.get(scope)
            if identified is not None:
                evidence.identify(identified, "identity")
                encrypts = identified.encrypts
            if known is not None and known.encrypts is not None:
                encrypts = known.encrypts
            evidence.not_before = max(evidence.not_before, self._reissued.get(scope, 0.0))
            reasoning = self._open(reasoning_key, ReasoningEvidence())
        return MemoryCheck(
            registry=self,
            scope=scope,
            records={server_key: evidence, reasoning_key: reasoning},
            evidence=evidence,
            reasoning=reasoning,
            conversation=conversation,
            can_hold=self.holds_streams or not streaming,
            encrypts=encrypts,
        )

    def _open(self, key: str, initial: Any) -> Any:
        """Return the evidence of a key; without any, this initial evidence becomes it."""
        evidence = self._records.get(key)
        if evidence is None:
            self._saved.pop(key, None)
            evidence = initial
            self._records[key] = evidence
        self._records.move_to_end(key)
        return evidence

    async def attach(self, store: EvidenceStore, *checks: MemoryCheck) -> None:
        """Use a store for the evidence, unless one is configured, and load its evidence for some checks.

        An engine outlives the stores of its conversations: the newest one replaces the others, which
        may be closed.
        """
        if not self._is_configured and self.store is not store:
            self.store = store
            self._saved.clear()
        for check in checks:
            await self.load(check)

    async def load(self, check: MemoryCheck) -> bool:
        """Read the evidence of a check from the store, if there is one, at its first use; return whether it was read.

        An engine may outlive the store of a conversation. It then continues with the evidence in memory.
        """
        unread = self.list_unread(check) if self.store is not None else []
        try:
            for key in unread:
                if self.store is not None:  # another task may have found that it is closed
                    self.restore(check, key, await self.store.load_evidence(key))
        except KedgeError:
            if self._is_configured:
                raise
            self.store = None
        return bool(unread)

    async def save(self, check: MemoryCheck) -> None:
        """Write the evidence of a check to the store, if there is one and if it changed.

        An error is logged and not raised, because the response that the evidence is from must not be lost.
        """
        if self.store is None:
            return
        for key, form in self.take_changes(check):
            try:
                await self.store.save_evidence(key, form)
            except KedgeError as error:
                self._saved.pop(key, None)
                log.warning("evidence about a server was not stored: %s", error)

    def list_unread(self, check: MemoryCheck) -> list[str]:
        """Return the keys of the evidence of a check that was not read from a store."""
        return [key for key in check.records if key not in self._saved]

    def restore(self, check: MemoryCheck, key: str, form: Mapping[str, Any] | None) -> None:
        """Use the stored evidence of a key, unless that in memory is from a request."""
        with self.lock:
            self._saved[key] = form or {}
            if form and check.records[key].to_json().keys() <= _INITIAL_MEMBERS:
                check.records[key].restore(form)
            if check.evidence.proof == "identity" and check.scope not in self._identified:
                # What else it said then, such as whether it encrypts, may have changed.
                self._identified[check.scope] = KnownServer(remembers=True)

    def take_changes(self, check: MemoryCheck) -> list[tuple[str, dict[str, Any]]]:
        """Return the evidence of a check that is not in the store, to be stored."""
        with self.lock:
            forms = {key: record.to_json() for key, record in check.records.items()}
            changed = {key: form for key, form in forms.items() if self._saved.get(key, {}) != form}
            self._saved.update(changed)
            return list(changed.items())

    def identify(self, check: MemoryCheck, identity: str) -> None:
        """Record the name by which the server of a check identifies itself; empty if it does not."""
        server = KNOWN_IDENTITIES.get(identity)
        if server is None:
            return
        if check.encrypts is None:
            check.encrypts = server.encrypts
        if self._identified.get(check.scope) is server:
            return
        with self.lock:
            self._identified[check.scope] = server
            check.evidence.identify(server, "identity")

    def record_issued(self, check: MemoryCheck, response_id: str, *, known: bool) -> bool:
        """Remember a response id; return whether the server has issued it before."""
        if not response_id:
            return False
        with self.lock:
            is_reused = known or response_id in self._issued
            self._issued[response_id] = None
            if is_reused:
                # Which of two responses an older id stands for is not known, so none of them is continued.
                now = self.clock()
                self._reissued[check.scope] = now
                check.evidence.not_before = now
                check.evidence.record_loss(now, "reused_ids")
        return is_reused
