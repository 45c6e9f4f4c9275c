"""The evidence about the memory of one server, or of many, in memory and in a store."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kedge.bounded_dict import BoundedDict
from kedge.errors import KedgeError
from kedge.memory.evidence import (
    KNOWN_IDENTITIES,
    EvidenceStore,
    KnownServer,
    Proof,
    ServerEvidence,
    Trust,
    find_known_host,
    validate_trust,
)
from kedge.memory.judge import MemoryCheck
from kedge.memory.reasoning_evidence import KEY_SUFFIX, ReasoningEvidence
from kedge.observe import get_logger

MAX_REMEMBERED_RESPONSES = 4_096
MAX_SCOPES = 1_000
"""The number of endpoints and accounts whose evidence is in memory; that of others is read from the index."""

log = get_logger("kedge.memory")


class ServerMemory(msgspec.Struct, eq=False, kw_only=True):
    """The evidence about one endpoint and account, by model, streaming and transport.

    Attributes:
        scope: The provider, endpoint and account.
        transport: The transport; servers implement each separately.
        trust: Whether the server is chained on.
        clock: Returns Unix time.
        known: What is known about the server without a request.
        store: Where the evidence is stored, if anywhere.
        holds_streams: Whether streams can be held back until they are judged.
        believes_probes: Whether a probe proves the memory of a server that reports no token counts.
    """

    scope: str
    trust: Trust
    clock: Callable[[], float]
    transport: str = "http"
    known: KnownServer | None = None
    store: EvidenceStore | None = None
    holds_streams: bool = True
    believes_probes: bool = False
    lock: threading.RLock = msgspec.field(default_factory=threading.RLock)
    _is_configured: bool = False
    _proof: Proof = "table"
    _evidence: dict[str, ServerEvidence] = {}
    _reasoning: dict[str, ReasoningEvidence] = {}
    _saved: dict[str, Mapping[str, Any]] = {}
    _issued: BoundedDict[str, None] = msgspec.field(
        default_factory=lambda: BoundedDict(MAX_REMEMBERED_RESPONSES)
    )
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        validate_trust(self.trust)
        self._is_configured = self.store is not None

    def check(
        self, model: str, *, streaming: bool, objects: bool = False, conversation: str = ""
    ) -> MemoryCheck:
        """Return the check of one request, with the evidence that is in memory.

        Args:
            model: The model; gateways route by model.
            streaming: Whether the answer is streamed, which is other code in most servers.
            objects: Whether the request continues a conversation object, which is stored apart from responses.
            conversation: Identifies the conversation.
        """
        kind = f"{'stream' if streaming else 'whole'} {self.transport}"
        key = f"{self.scope} {model} {kind}{' objects' if objects else ''}"
        evidence = self._evidence.setdefault(key, self._make_evidence())
        name = f"{self.scope} {model} {KEY_SUFFIX}"
        reasoning = self._reasoning.setdefault(name, ReasoningEvidence())
        records, can_hold = {key: evidence, name: reasoning}, self.holds_streams or not streaming
        return MemoryCheck(self, records, evidence, reasoning, conversation, can_hold)

    def _make_evidence(self) -> ServerEvidence:
        evidence = ServerEvidence(not_before=self._not_before)
        if self.known is not None:
            evidence.identify(self.known, self._proof)
        return evidence

    async def attach(self, store: EvidenceStore, model: str) -> None:
        """Use a store for the evidence, unless one is configured, and load its evidence about a model.

        An engine outlives the stores of its conversations: the newest one replaces the others, which
        may be closed.
        """
        if not self._is_configured and self.store is not store:
            self.store = store
            self._saved.clear()
        for streaming in (True, False):
            await self.load(self.check(model, streaming=streaming))

    async def load(self, check: MemoryCheck) -> None:
        """Read the evidence of a check from the store, if there is one, at its first use."""
        for key in self.list_unread(check):
            if self.store is not None:
                self.restore(check, key, await self.store.load_evidence(key))

    def list_unread(self, check: MemoryCheck) -> list[str]:
        """Return the keys of the evidence of a check that was not read from a store."""
        return [key for key in check.records if key not in self._saved]

    def restore(self, check: MemoryCheck, key: str, form: Mapping[str, Any] | None) -> None:
        """Use the stored evidence of a key, unless that in memory is from a request."""
        self._saved[key] = form or {}
        if form and check.records[key] in (self._make_evidence(), ReasoningEvidence()):
            check.records[key].restore(form)
            if check.evidence.proof == "identity":
                self.identify("kedge")

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
                del self._saved[key]
                log.warning("evidence about a server was not stored: %s", error)

    def take_changes(self, check: MemoryCheck) -> list[tuple[str, dict[str, Any]]]:
        """Return the evidence of a check that is not in the store, to be stored."""
        forms = {key: record.to_json() for key, record in check.records.items()}
        changes = [(key, form) for key, form in forms.items() if self._saved.get(key, {}) != form]
        self._saved.update(changes)
        return changes

    def identify(self, identity: str) -> None:
        """Apply the known properties of a server with this identity to all evidence."""
        known = KNOWN_IDENTITIES.get(identity)
        if known is None:
            return
        with self.lock:
            if self.known is None:
                self.known, self._proof = known, "identity"
            for evidence in self._evidence.values():
                evidence.identify(self.known, self._proof)

    def record_issued(self, response_id: str, evidence: ServerEvidence, *, known: bool) -> bool:
        """Remember a response id; return whether the server has issued it before."""
        if not response_id:
            return False
        with self.lock:
            reused = known or response_id in self._issued
            self._issued[response_id] = None
            if reused:  # responses that are older cannot be distinguished
                self._not_before = now = self.clock()
                evidence.record_loss(now, "reused_ids")
                for each in self._evidence.values():
                    each.not_before = now
        return reused


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
        self._index = index
        self._lock = threading.Lock()
        self._memories = BoundedDict[str, ServerMemory](MAX_SCOPES)

    def open(
        self, scope: str, url: str, model: str, *, streaming: bool, conversation: str
    ) -> MemoryCheck:
        """Return the check of one request.

        A program's stream cannot be held back. Its server is believed if it lists what it stored and reports no
        counts, because there is no option with which the program could request audits.
        """
        with self._lock:
            memory = self._memories[scope] = self._memories.get(scope) or ServerMemory(
                scope=scope,
                trust=self.trust,
                clock=self.clock,
                known=find_known_host(url),
                holds_streams=False,
                believes_probes=True,
            )
        with memory.lock:
            check = memory.check(model, streaming=streaming, conversation=conversation)
            for key in memory.list_unread(check):
                memory.restore(check, key, self._index.load_evidence(key))
        return check

    def save(self, check: MemoryCheck) -> None:
        """Write the evidence of a check to the index, if it changed."""
        with check.memory.lock:
            for key, form in check.memory.take_changes(check):
                self._index.save_evidence(key, form)
