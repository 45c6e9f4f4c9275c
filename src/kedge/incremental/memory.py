"""Evidence about the memory of servers: whether they use the stored context of a response.

The rules and the accounting are those of `kedge.memory.evidence`. One thing differs from an engine: a
program's stream is never delayed, so an answer that was generated without the stored context cannot be
withdrawn. Therefore an unproven server gets full requests, until one of these proves that it uses its memory:

- Its token count for an answer that is not streamed. Such an answer is complete before any of it is passed
  on, so it is judged first; without a proof the original request is sent instead.
- A probe: `GET /responses/{id}` and its input items, sent before the first chained request, list exactly the
  items of the response's expected context. This is the proof for servers whose responses are streamed.
- Its token counts for requests that the program chains itself.

Each later answer is judged by its token count as well. A loss stops chaining for a while; a loss that
contradicts a probe means that probes are not used for this server any more.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kedge.engines.audit import Audit
from kedge.events import Outcome
from kedge.incremental.index import AnchorIndex
from kedge.memory.evidence import (
    Doubt,
    ServerEvidence,
    Trust,
    find_known_host,
    read_identity,
    validate_trust,
)
from kedge.memory.judge import ServerMemory
from kedge.memory.tokens import SentTokens, can_disprove, can_prove, measure_blocks
from kedge.planning import AnchorRecord, RequestPlan, TokenCounts
from kedge.turns import Block

T = TypeVar("T")

MAX_SCOPES = 1_000
"""The number of endpoints and accounts whose evidence is in memory; that of others is read from the index."""

Way = Literal["direct", "judged", "probed", "untrusted"]
"""How a request may rely on an anchor: directly, if its answer is judged first, after a probe, or not at all."""

Problem = Literal["", "forgot", "unproven"]
"""Why an answer is not relied on."""


class ServerMemories:
    """The evidence about every endpoint and account, read from and written to an index.

    Args:
        index: Where evidence is stored.
        trust: Which servers are chained on.
        clock: Returns Unix time.
    """

    def __init__(self, index: AnchorIndex, trust: Trust, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.trust: Trust = validate_trust(trust)
        self.lock = threading.RLock()
        self._store = _IndexEvidence(index)
        self._memories: OrderedDict[str, ServerMemory] = OrderedDict()

    def open(self, scope: str, url: str, model: str, *, streaming: bool) -> "MemoryCheck":
        """Return the check for one request."""
        with self.lock:
            memory = self._memories.get(scope)
            if memory is None:
                memory = self._memories[scope] = ServerMemory(
                    scope,
                    trust=self.trust,
                    transport="http",
                    clock=self.clock,
                    known=find_known_host(url),
                    store=self._store,
                )
            self._memories.move_to_end(scope)
            while len(self._memories) > MAX_SCOPES:
                self._memories.popitem(last=False)
            evidence = _complete(memory.load(model, streaming=streaming))
        return MemoryCheck(self, memory, evidence, streaming)


@dataclass(slots=True)
class MemoryCheck:
    """The decision whether one request may rely on its server's memory, and the judgment of the answer.

    Attributes:
        memories: The evidence about all servers.
        memory: The evidence about this endpoint and account.
        evidence: The evidence for the requested model, with or without streaming.
        streaming: Whether a stream is requested.
        way: How the request relies on its anchor.
    """

    memories: ServerMemories
    memory: ServerMemory
    evidence: ServerEvidence
    streaming: bool
    way: Way = "direct"
    _plan: RequestPlan | None = field(default=None, init=False)
    _members: Mapping[str, Any] = field(default_factory=dict[str, Any], init=False)
    _measured: dict[tuple[float, bool], SentTokens | None] = field(
        default_factory=dict[tuple[float, bool], SentTokens | None], init=False
    )

    @property
    def doubt(self) -> Doubt:
        """The reason why the server must not be chained on now; empty if it may be."""
        return self.evidence.open_doubt(self.memories.clock())

    @property
    def not_before(self) -> float:
        """Responses that were created earlier are not used."""
        return self.evidence.not_before

    def get_max_depth(self, configured: int | None) -> int | None:
        """Return the maximum length of a chain: as configured, as known, or as learned."""
        return self.memory.max_depth(self.evidence, configured)

    def choose_way(
        self, anchor: AnchorRecord, sent: Sequence[Block], members: Mapping[str, Any]
    ) -> Way:
        """Decide how a request may rely on an anchor.

        Args:
            anchor: The response that it is chained on.
            sent: The blocks that it sends.
            members: The members of its body.

        Returns:
            The decision, which is also stored as `way`.
        """
        plan = self.describe(anchor, sent, members)
        if self.memory.needs_verdict(plan, self.evidence):
            bounds = None if self.streaming else self._measure()
            overhead = self.evidence.get_overhead(bounds)
            if can_prove(anchor, bounds, overhead):
                self.way = "judged"
            elif self.memories.clock() >= self.evidence.next_probe_at:
                self.way = "probed"
            else:
                self.way = "untrusted"
        elif self.memory.needs_count(plan, self.evidence):
            bounds, exact = self._measure(), self.evidence.counts_exactly
            overhead = self.evidence.get_overhead(bounds)
            is_judged = can_disprove(anchor, bounds, overhead, exact=exact)
            self.way = "direct" if is_judged else "untrusted"
        return self.way

    def describe(
        self, anchor: AnchorRecord | None, sent: Sequence[Block], members: Mapping[str, Any]
    ) -> RequestPlan:
        """Set the request that is actually sent; the arguments are those of `choose_way`."""
        self.way, self._members = "direct", members
        self._measured.clear()
        self._plan = RequestPlan(
            mode="chained",
            scope=anchor.scope if anchor else "",
            anchor=anchor,
            source=tuple(sent),
            start=0,
            rejected=(),
            problems=(),
            full_blocks=0,
            full_bytes=0,
            delta_bytes=0,
            instructions=None,
        )
        return self._plan

    def _measure(self) -> SentTokens | None:
        if self._plan is None:
            return None
        # Exact bounds are not needed for a server that needs no proof, or while it gets none.
        crude = self.evidence.proof == "table" or bool(self.doubt)
        key = (self.evidence.share, crude)
        if key not in self._measured:
            self._measured[key] = measure_blocks(
                self._plan.delta, self._members, share=key[0], crude=crude
            )
        return self._measured[key]

    def identify(self, headers: Mapping[str, str]) -> None:
        """Read from response headers whether the server is a known one."""
        with self.memories.lock:
            self.memory.identify(read_identity(headers))

    def record_probe(self, found: Audit) -> bool:
        """Record the result of a probe, and return whether the request may be chained."""
        with self.memories.lock:
            self.evidence.record_probe(agrees=found.agrees, now=self.memories.clock())
            self.save()
        return found.agrees is True

    def record_rejection(self, reason: str, anchor: AnchorRecord, now: float) -> None:
        """Record that the server rejected an anchor: it is missing, or chaining is not supported.

        Args:
            reason: How the server rejected it; see `kedge.engines.heal_rules`.
            anchor: The record of the response.
            now: The time of the rejection.
        """
        with self.memories.lock:
            if reason == "unsupported":
                self.evidence.record_unsupported()
            elif reason == "gone":
                self.evidence.record_missing(now, anchor.created_at)
            self.save()

    def record_error(self) -> None:
        """Record that a chained request was answered with a server error."""
        with self.memories.lock:
            self.evidence.record_error(self.memories.clock())
            self.save()

    def record_forgotten(self) -> None:
        """Record that an answer was started without the stored context."""
        with self.memories.lock:
            if self._plan is not None:
                self.memory.record_loss("lost", self._plan, self.evidence)
            self.save()

    def find_problem(self, outcome: Outcome) -> Problem:
        """Judge the answer to a chained request.

        Args:
            outcome: The complete answer.

        Returns:
            `forgot` if the server did not use its memory, `unproven` if it did not show this although a
            proof is required, otherwise an empty string.
        """
        plan = self._plan
        if plan is None or plan.anchor is None:
            return ""
        with self.memories.lock:
            verdict = self.memory.judge(
                outcome, plan, self._measure(), self.evidence, counts_outweigh_audits=True
            )
            if verdict in ("lost", "partial"):
                self.memory.record_loss(verdict, plan, self.evidence)
                self.save()
                return "forgot"
            is_proved = self.way != "judged" or verdict == "remembered"
            if not is_proved and outcome.status in ("completed", "incomplete"):
                self.evidence.record_loss(self.memories.clock(), "no_verdict")
                self.save()
                return "unproven"
        return ""

    def count(self, outcome: Outcome) -> TokenCounts | None:
        """Return the server's token counts for an answer, from which the next one is judged."""
        if self._plan is None or outcome.usage is None:
            return None
        with self.memories.lock:
            return self.memory.count(outcome, self._plan, self._measure(), self.evidence)

    def record_reused_id(self, response_id: str) -> None:
        """Record that the server has issued a response id twice."""
        with self.memories.lock:
            self.memory.record_issued(response_id, None, self.evidence, known=True)

    def save(self) -> None:
        """Write the evidence to the index, if it has changed."""
        with self.memories.lock:
            _complete(self.memory.save(self.evidence))


class _IndexEvidence:
    """The evidence in an index, for `ServerMemory`."""

    def __init__(self, index: AnchorIndex) -> None:
        self._index = index

    async def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        return self._index.load_evidence(key)

    async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        self._index.save_evidence(key, form)


def _complete(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends, because an index returns or blocks."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("the index must not wait for an event loop")
