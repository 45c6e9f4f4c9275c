"""The evidence about the memory of servers, in memory and in a store."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from kedge.errors import InvalidSetting, KedgeError
from kedge.memory.evidence import (
    KNOWN_IDENTITIES,
    TRUST_LEVELS,
    EvidenceStore,
    KnownServer,
    ServerEvidence,
    Trust,
)
from kedge.memory.judge import MemoryCheck
from kedge.memory.reasoning_evidence import KEY_SUFFIX, ReasoningEvidence
from kedge.observe import get_logger
from kedge.security.bounded_dict import BoundedDict

MAX_ENTRIES = 4_096
"""The number of records in memory, and of responses, endpoints and accounts that are remembered."""
_INITIAL_MEMBERS = frozenset({"proof", "max_depth", "not_before"})
"""The members of evidence that do not need a request of this process."""
_make_cache = partial(BoundedDict[str, Any], MAX_ENTRIES)

log = get_logger("kedge.memory")


class ServerMemory(msgspec.Struct, eq=False, kw_only=True):
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
        if self.trust not in TRUST_LEVELS:
            names = ", ".join(TRUST_LEVELS)
            raise InvalidSetting(f"trust must be one of {names}, not {self.trust!r}")
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
    ) -> MemoryCheck:
        """Return the check of one request, with the evidence that is in memory.

        Args:
            scope: The provider, endpoint and account.
            model: The model; gateways route by model.
            streaming: Whether the answer is streamed, which is other code in most servers.
            objects: Whether the request continues a conversation object, which is stored apart from responses.
            conversation: Identifies the conversation.
            known: What is known about the server from its host.
        """
        kind = f"{'stream' if streaming else 'whole'} {self.transport}"
        key = f"{scope} {model} {kind}{' objects' if objects else ''}"
        name = f"{scope} {model} {KEY_SUFFIX}"
        host = known or KnownServer()
        fresh = ServerEvidence(proof="table" if host.remembers else "", max_depth=host.max_depth)
        with self.lock:
            evidence: ServerEvidence = self._open(key, fresh)
            if identified := self._identified.get(scope):
                evidence.identify(identified, "identity")
            evidence.not_before = max(evidence.not_before, self._reissued.get(scope, 0.0))
            reasoning = self._open(name, ReasoningEvidence())
        records, can_hold = {key: evidence, name: reasoning}, self.holds_streams or not streaming
        return MemoryCheck(self, scope, records, evidence, reasoning, conversation, can_hold)

    def _open(self, key: str, fresh: Any) -> Any:
        if key not in self._records:
            self._saved.pop(key, None)
        self._records[key] = self._records.get(key, fresh)
        return self._records[key]

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

    async def load(self, check: MemoryCheck) -> None:
        """Read the evidence of a check from the store, if there is one, at its first use.

        An engine may outlive the store of a conversation. It then continues with the evidence in memory.
        """
        try:
            for key in self.list_unread(check):
                if self.store is not None:
                    self.restore(check, key, await self.store.load_evidence(key))
        except KedgeError:
            if self._is_configured:
                raise
            self.store = None

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
            if check.evidence.proof == "identity":
                self.identify(check, "kedge")

    def take_changes(self, check: MemoryCheck) -> list[tuple[str, dict[str, Any]]]:
        """Return the evidence of a check that is not in the store, to be stored."""
        with self.lock:
            forms = {key: record.to_json() for key, record in check.records.items()}
            changed = {key: form for key, form in forms.items() if self._saved.get(key, {}) != form}
            self._saved.update(changed)
            return list(changed.items())

    def identify(self, check: MemoryCheck, identity: str) -> None:
        """Record the name by which the server of a check identifies itself; empty if it does not."""
        if known := KNOWN_IDENTITIES.get(identity):
            with self.lock:
                self._identified[check.scope] = known
                check.evidence.identify(known, "identity")

    def record_issued(self, check: MemoryCheck, response_id: str, *, known: bool) -> bool:
        """Remember a response id; return whether the server has issued it before."""
        if not response_id:
            return False
        with self.lock:
            reused = known or response_id in self._issued
            self._issued[response_id] = None
            if reused:  # responses that are older cannot be distinguished
                check.evidence.not_before = self._reissued[check.scope] = now = self.clock()
                check.evidence.record_loss(now, "reused_ids")
        return reused
