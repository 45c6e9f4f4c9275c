"""The evidence about the memory of one server, or of many, in memory and in a store."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from kedge.errors import KedgeError
from kedge.memory.evidence import (
    KNOWN_IDENTITIES,
    EvidenceKey,
    EvidenceStore,
    KnownServer,
    Proof,
    ServerEvidence,
    Trust,
    find_known_host,
    validate_trust,
)
from kedge.memory.judge import MemoryCheck
from kedge.observe import get_logger
from kedge.planning import AnchorRecord, TokenCounts

T = TypeVar("T")

MAX_REMEMBERED_RESPONSES = 4_096
MAX_SCOPES = 1_000
"""The number of endpoints and accounts whose evidence is in memory; that of others is read from the index."""

log = get_logger("kedge.memory")


class ServerMemory:
    """The evidence about one endpoint and account, by model, streaming and transport."""

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
        self.clock = clock
        self.lock = threading.RLock()
        self._store = store
        self._is_configured = store is not None
        self._saved: dict[EvidenceKey, ServerEvidence | None] = {}
        self._scope = scope
        self._transport = transport
        self._known = known
        self._proof: Proof = "table"
        self._evidence: dict[EvidenceKey, ServerEvidence] = {}
        self._counts: OrderedDict[str, TokenCounts | None] = OrderedDict()
        self._not_before = 0.0

    def check(
        self,
        model: str,
        *,
        streaming: bool,
        objects: bool = False,
        conversation: str = "",
        can_hold: bool = True,
        believes_probes: bool = False,
    ) -> MemoryCheck:
        """Return the check of one request; the arguments are those of ``EvidenceKey`` and ``MemoryCheck``."""
        evidence = self.get(model, streaming=streaming, objects=objects)
        return MemoryCheck(self, evidence, conversation, can_hold, believes_probes)

    @property
    def store(self) -> EvidenceStore | None:
        """Where the evidence is stored, if anywhere."""
        return self._store

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

    async def load(self, model: str, *, streaming: bool, objects: bool = False) -> ServerEvidence:
        """Return the evidence for a request, read from the store at its first use."""
        key = self._key(model, streaming, objects)
        if self._store is not None and key not in self._saved:
            form = await self._store.load_evidence(str(key))
            saved = self._saved[key] = None if form is None else ServerEvidence.from_json(form)
            if saved is not None and key not in self._evidence:
                self._evidence[key] = saved.copy()
                if saved.proof == "identity":
                    self.identify("kedge")
        return self.get(model, streaming=streaming, objects=objects)

    def get(self, model: str, *, streaming: bool, objects: bool = False) -> ServerEvidence:
        """Return the evidence for a request that is in memory."""
        key = self._key(model, streaming, objects)
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
        with self.lock:
            if self._known is None:
                self._known = known
                self._proof = "identity"
            for evidence in self._evidence.values():
                self._apply(evidence)

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
        with self.lock:
            reused = known or response_id in self._counts
            self._counts[response_id] = counted
            self._counts.move_to_end(response_id)
            while len(self._counts) > MAX_REMEMBERED_RESPONSES:
                self._counts.popitem(last=False)
            if reused:
                self._not_before = now = self.clock()
                evidence.record_reused_id(now)
                for each in self._evidence.values():
                    each.not_before = now
        return reused

    def add_counts(self, anchor: AnchorRecord) -> AnchorRecord:
        """Return the record with its token counts, which not every store saves."""
        if anchor.counted is None and (counted := self._counts.get(anchor.response_id)):
            return replace(anchor, counted=counted)
        return anchor

    def _key(self, model: str, streaming: bool, objects: bool) -> EvidenceKey:
        return EvidenceKey(self._scope, model, streaming, self._transport, objects)

    def _apply(self, evidence: ServerEvidence) -> None:
        if self._known is not None:
            proof = self._proof if self._known.remembers else ""
            evidence.identify(proof, self._known.max_depth)


class EvidenceIndex(Protocol):
    """Where chained clients store evidence; it returns or blocks, and never waits for an event loop."""

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence of a key, or None."""
        ...

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Save the evidence of a key, replacing the previous one."""
        ...


class ServerMemories:
    """The evidence about every endpoint and account, read from and written to an index.

    Args:
        index: Where evidence is stored.
        trust: Which servers are chained on.
        clock: Returns Unix time.
    """

    def __init__(self, index: EvidenceIndex, trust: Trust, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.trust: Trust = validate_trust(trust)
        self._lock = threading.Lock()
        self._store = _IndexEvidence(index)
        self._memories: OrderedDict[str, ServerMemory] = OrderedDict()

    def open(
        self, scope: str, url: str, model: str, *, streaming: bool, conversation: str
    ) -> MemoryCheck:
        """Return the check of one request.

        A program's stream cannot be held back. Its server is believed if it lists what it stored and reports no
        counts, because there is no option with which the program could request audits.
        """
        with self._lock:
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
        with memory.lock:
            complete(memory.load(model, streaming=streaming))
        return memory.check(
            model,
            streaming=streaming,
            conversation=conversation,
            can_hold=not streaming,
            believes_probes=True,
        )


class _IndexEvidence:
    """The evidence in an index, for `ServerMemory`."""

    def __init__(self, index: EvidenceIndex) -> None:
        self._index = index

    async def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        return self._index.load_evidence(key)

    async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        self._index.save_evidence(key, form)


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends, because an index returns or blocks."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("the index must not wait for an event loop")
