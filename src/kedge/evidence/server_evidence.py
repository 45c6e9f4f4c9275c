"""Evidence of what a server remembers, and the decision to rely on it.

A server is proven by the table of known servers or by its token counts. Until then an answer that relies on its
memory is held back for a verdict, and a request whose answer cannot give one is sent in full. A silent loss makes a
server unproven again. It is tried again after a delay that doubles, and its answers are held back beyond the next
proof, because a server may remember on one connection, or at one time, and forget on another.

An echo of ``previous_response_id`` alone proves nothing: some gateways repeat any id that they receive. Nor does a list
of the stored items (a probe): storing is not using, and counts outweigh it. It only makes plausible that the server
counts tokens in an ordinary way, so that a lower count is a proof.

Evidence is stored per scope, model (gateways route by model), streaming or not (the two are different code
in most servers), transport, and for conversation objects apart from responses. Everything here is pure: no I/O, and
the time is an argument.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

import msgspec

from kedge.events import Outcome, Usage
from kedge.evidence.tokens import ORDINARY_EXCESS, UNBOUNDED, UNKNOWN_SHARE, SentTokens
from kedge.planning import TokenCounts

IDENTITY_HEADER = "kedge-server"
"""The header by which the local server of Kedge identifies itself."""


class KnownServer(msgspec.Struct, frozen=True):
    """Properties of a server that are known without a request."""

    remembers: bool = False
    """Whether its memory needs no further proof."""
    max_depth: int | None = None
    """The number of responses of a chain that it passes to the model."""
    encrypts: bool | None = None
    """Whether it returns encrypted reasoning; None if that is not known."""


KNOWN_HOSTS: Mapping[str, KnownServer] = {
    "api.openai.com": KnownServer(remembers=True),
    "api.x.ai": KnownServer(remembers=True),
    ".openai.azure.com": KnownServer(remembers=True),
    ".cognitiveservices.azure.com": KnownServer(remembers=True),
    ".services.ai.azure.com": KnownServer(remembers=True),
}
"""Hosted services; a name that starts with a dot matches its subdomains."""
KNOWN_IDENTITIES: Mapping[str, KnownServer] = {
    "kedge": KnownServer(remembers=True, encrypts=True),
    "kedge; encryption=none": KnownServer(remembers=True, encrypts=False),
    "smg": KnownServer(max_depth=100),
}
"""Servers that identify themselves in a response header."""


def find_known_host(base_url: str) -> KnownServer | None:
    """Return what is known about the server at an address."""
    host = urlsplit(base_url).hostname or ""
    for name, server in KNOWN_HOSTS.items():
        if host == name or (name.startswith(".") and host.endswith(name)):
            return server
    return None


def read_identity(headers: Mapping[str, str]) -> str:
    """Return the name by which a server identifies itself in its headers; empty if it does not."""
    name = headers.get(IDENTITY_HEADER) or headers.get("server") or ""
    return name.partition("/")[0].strip().lower()


Trust = Literal["earned", "always", "never"]
TRUST_LEVELS: tuple[Trust, ...] = get_args(Trust)
"""Chain only on servers that have shown that they remember, on any server, or on none."""


Proof = Literal["", "table", "identity", "count", "audit"]
Doubt = Literal["", "forgot", "never_stores", "reused_ids", "no_verdict", "fails", "unsupported"]
DOUBTS_OF_CHAINING: frozenset[Doubt] = frozenset({"reused_ids", "fails", "unsupported"})
"""Doubts that chaining works at all, which also concern servers that are always trusted."""

BASE_COOLDOWN = 60.0
MAX_COOLDOWN = 3_600.0
"""Seconds for which a server is not chained on after a loss: the first delay, and the maximum."""
CONTRADICTION_SECONDS = 24 * 3_600.0
"""Seconds for which an audit does not count as a proof after token counts contradicted one."""
HOLD_SECONDS = 3_600.0
MAX_HOLD_SECONDS = 24 * 3_600.0
"""Seconds for which every answer is held back after a silent loss: the first time, and the maximum."""
_MAX_DOUBLINGS = 16
"""More than any maximum needs; it only prevents an overflow."""
MAX_OVERHEADS = 64
MIN_MATCHED_TOKENS = 32
"""Tokens in requests with agreeing counts after which a server is assumed to count as we do."""
MAX_MISSES = 2
"""Consecutive rejections of stored responses after which a proven server is treated as not storing."""
MIN_SHORTFALLS = 2
"""Consecutive counts of a known provider that lack a part of the context before it is treated as forgetting."""
MAX_ERRORS = 2
"""Consecutive server errors for chained requests after which full ones are tried."""


def _delay(count: int, seconds: float = BASE_COOLDOWN, maximum: float = MAX_COOLDOWN) -> float:
    """Return a delay that doubles with each event after the first one.

    A trial costs the same whether or not the server has recovered: one answer that is generated twice, or one rejected
    request. The cause is usually a restart, which is over in a minute, or the configuration, which does not change
    for days. With a delay that doubles, the first is tried soon, and the second costs one trial an hour.
    """
    doublings = min(count, _MAX_DOUBLINGS)
    return min(seconds * 2.0**doublings, maximum)


def limit_depth(*limits: int | None) -> int | None:
    """Return the lowest limit of the length of a chain; None if there is none."""
    return min(filter(None, limits), default=None)


class Evidence(msgspec.Struct, omit_defaults=True):
    """Evidence that can be stored."""

    def to_json(self) -> dict[str, Any]:
        """Return the evidence as plain JSON values."""
        return msgspec.to_builtins(self, str_keys=True)

    def restore(self, form: Mapping[str, Any]) -> None:
        """Set the evidence to the output of ``to_json``; invalid evidence is ignored."""
        with suppress(msgspec.ValidationError):
            saved = msgspec.convert(form, type(self), strict=False)
            for name in self.__struct_fields__:
                setattr(self, name, getattr(saved, name))


class ServerEvidence(Evidence):
    """The evidence about the memory of one server, for one model and kind of request."""

    proof: Proof = ""
    doubt: Doubt = ""
    """Why the server is not chained on until ``retry_at``."""
    retry_at: float = 0.0
    failures: int = 0
    misses: int = 0
    """The number of consecutive stored responses that the server rejected as unknown."""
    missed_at: float = 0.0
    """The time of the last of them; responses that were created before may have been lost with it."""
    missed_in: str = ""
    """The conversation whose responses are missing; empty if several have lost responses."""
    shortfalls: int = 0
    """The number of consecutive counts of a known provider that lack a part of the context."""
    errors: int = 0
    """The number of consecutive chained requests that the server answered with a server error."""
    max_depth: int | None = None
    """The longest chain that the server passes to the model in full, set when it passed less."""
    hold_depth: int = 0
    """The depth of chain at which context was lost: up to it, each depth must be verified again."""
    verified_depth: int = 0
    """The longest chain that the server provably read since then, while ``hold_depth`` is not 0."""
    losses: int = 0
    """The number of silent losses, each within ``MAX_HOLD_SECONDS`` of the previous one."""
    hold_until: float = 0.0
    """The time until which answers are held back at any depth, even if the server is proven again."""
    not_before: float = 0.0
    """The time before which responses are not relied on, because the server has issued their ids again."""
    reports: bool = False
    """Whether the server has reported token counts before."""
    audits: bool = False
    """Whether the server has listed stored items before."""
    stores: bool = False
    """Whether a probe found what the server should have stored; storing is not using."""
    next_probe_at: float = 0.0
    """The time until which no probe is made: one failed, or token counts contradicted it."""
    failed_probes: int = 0
    echoes: bool = False
    """Whether the server has named the previous response in an answer before."""
    names_conversations: bool = False
    """Whether the server has named the conversation object at the start of an answer before."""
    matched: int = 0
    mismatched: bool = False
    overheads: dict[int, int] = {}
    """Upper bounds of the tokens that the server counts beside the items, by settings."""

    def must_hold(self, depth: int, now: float) -> bool:
        """Return whether an answer on a chain of this depth must be judged before it is shown."""
        is_unverified = self.hold_depth > 0 and depth > self.verified_depth
        return not self.proof or now < self.hold_until or is_unverified

    def bound(self, sent: SentTokens) -> SentTokens:
        """Return the tokens of a request with the bounds of the server's count of them."""
        share = UNKNOWN_SHARE
        is_exact = self.matched >= MIN_MATCHED_TOKENS and not self.mismatched
        if is_exact:
            share = 1.0
        excess = inf
        if self.stores:
            excess = ORDINARY_EXCESS
        return sent._replace(
            share=share,
            excess=excess,
            overhead=self.overheads.get(sent.settings),
            is_exact=is_exact,
            adds_cached=self.proof not in ("table", "identity"),
        )

    def find_doubt(self, now: float, conversation: str = "") -> Doubt:
        """Return why the server must not be chained on now; empty if it may be tried.

        Args:
            now: The current Unix time.
            conversation: Identifies the conversation; missing responses of one do not concern the others.
        """
        if self.doubt == "unsupported":
            # The server said that it does not support chaining, so waiting does not help.
            return "unsupported"
        if now >= self.retry_at:
            return ""
        if self.doubt == "never_stores" and self.missed_in not in ("", conversation):
            return ""
        return self.doubt

    def identify(self, known: KnownServer, proof: Proof) -> None:
        """Record that the server is a known one, unless later evidence contradicts that."""
        if known.remembers and not self.proof and not self.doubt:
            self.proof = proof
        self.max_depth = limit_depth(self.max_depth, known.max_depth)

    def record_agreement(self, usage: Usage, base: TokenCounts, sent: SentTokens) -> None:
        """Update, from a count that is consistent with memory, whether the server counts as we do."""
        is_known = sent.tokens and sent.size < UNBOUNDED and base.settings == sent.settings
        if not is_known or base.reasoning or base.own_reasoning:
            return
        growth = usage.input_tokens - base.input - base.output
        if abs(growth - sent.estimate) <= sent.tolerance:
            self.matched = min(self.matched + sent.estimate, MIN_MATCHED_TOKENS)
        else:
            self.mismatched = True

    def record_success(self, proof: Proof) -> None:
        """Record a proof; a proof by count or audit removes every doubt."""
        self.proof = self.proof or proof
        self.doubt = ""
        self.retry_at = 0.0
        self.failures = self.misses = self.errors = 0

    def record_remembered(self, depth: int) -> None:
        """Record a count that proves that a chain of this depth was read."""
        self.record_success("count")
        self.shortfalls = 0
        if not self.hold_depth:
            # Evidence that changes with every response would be saved with every response.
            return
        self.verified_depth = max(self.verified_depth, depth)
        if self.verified_depth >= self.hold_depth:
            self.hold_depth = 0

    def record_shortfall(self) -> bool:
        """Record a count of a known provider that lacks a part of the context; return whether it is believed.

        Providers count what they add to an answer in other ways than we do. A false accusation costs more than
        a late one, so a single shortfall is no evidence.
        """
        self.shortfalls = min(self.shortfalls + 1, MIN_SHORTFALLS)
        return self.shortfalls >= MIN_SHORTFALLS

    def record_silent_loss(self, now: float, depth: int, *, partial: bool) -> None:
        """Record that the server answered without the context of a chain, or without a part of it."""
        self.hold_depth = max(self.hold_depth, depth)
        self.verified_depth = 0
        self.shortfalls = 0

        # A server that forgets again and again has a cause that a single proof does not remove, such as one process of
        # several that lost its memory. So the hold lasts beyond the next proof, and doubles with each loss that follows
        # soon after the last one.
        is_repeated = now < self.hold_until + MAX_HOLD_SECONDS
        self.losses = self.losses + 1 if is_repeated else 1
        self.hold_until = now + _delay(self.losses - 1, HOLD_SECONDS, MAX_HOLD_SECONDS)

        if self.stores:
            # The server listed what it had stored, and did not use it. For a day, a list is no reason to chain.
            self.stores = False
            self.next_probe_at = now + CONTRADICTION_SECONDS

        if partial and depth > 1:
            # It read the newest part of the chain. Shorter chains may work, so there is no delay.
            self.proof = ""
            self.max_depth = limit_depth(self.max_depth, depth - 1)
        else:
            self.record_loss(now)

    def record_chained(self) -> None:
        """Record an answer to a chained request without evidence of a loss."""
        self.misses = self.errors = 0
        if self.doubt == "fails":
            self.doubt = ""

    def record_full_send(self, usage: Usage, sent: SentTokens) -> None:
        """Update the overhead of the server's count from a request that sent everything."""
        overhead = max(usage.input_tokens + usage.cached_tokens - sent.lower, 0)
        self.overheads[sent.settings] = min(self.overheads.pop(sent.settings, overhead), overhead)
        while len(self.overheads) > MAX_OVERHEADS:
            del self.overheads[next(iter(self.overheads))]

    def record_loss(self, now: float, doubt: Doubt = "forgot") -> None:
        """Record a loss: the server is unproven, and is not chained on for a while."""
        self.proof = ""
        self.doubt = doubt
        self.retry_at = now + _delay(self.failures)
        self.failures += 1

    def record_missing(self, now: float, created_at: float, conversation: str = "") -> None:
        """Record that the server rejected a stored response as unknown.

        A proven server may have lost its memory once, with the responses of all conversations. If it loses a later
        response as well, it is treated as not storing, for this conversation, and for all of them if another one
        has lost responses too. So is a server that never showed that it remembers.

        Args:
            now: The current Unix time.
            created_at: The Unix time at which the response was created.
            conversation: Identifies the conversation.
        """
        if self.proof and created_at < self.missed_at:
            # It was lost at the same time as the response before, which is one event.
            return
        is_same_conversation = not self.misses or self.missed_in == conversation
        self.missed_in = ""
        if self.proof and is_same_conversation:
            self.missed_in = conversation
        self.missed_at = now
        self.misses += 1
        if self.proof and self.misses < MAX_MISSES:
            return

        proof = self.proof
        self.record_loss(now, "never_stores")
        if self.missed_in or proof == "table":
            # The other conversations of this server, or a server that is known to remember, need no new proof.
            self.proof = proof

    def record_error(self, now: float) -> None:
        """Record that the server answered a chained request with a server error.

        Some gateways fail this way whenever a request has a ``previous_response_id``. After the second
        error in a row full requests are sent for a while; what proves that the server remembers stays valid.
        """
        self.errors += 1
        if self.errors < MAX_ERRORS or self.find_doubt(now):
            return
        self.doubt = "fails"
        self.retry_at = now + _delay(self.errors - MAX_ERRORS)

    def record_probe(self, *, agrees: bool | None, now: float, proves: bool = False) -> None:
        """Record whether the server listed what it should have stored; None if it listed nothing.

        Args:
            agrees: Whether it did.
            now: The current Unix time.
            proves: Whether this proves the memory of a server, which it does if that reports no token counts.
        """
        self.stores = bool(agrees)
        self.audits = self.audits or agrees is not None
        if not agrees:
            # A probe delays the request before which it is made, and most servers that fail one have no such route.
            self.next_probe_at = now + _delay(self.failed_probes)
            self.failed_probes += 1
            return
        self.failed_probes = 0
        if proves:
            self.record_success("audit")


class EvidenceStore(Protocol):
    """A persistent store of evidence."""

    async def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the evidence of a key, or None."""
        ...

    async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Save the evidence of a key, replacing the previous one."""
        ...


INCLUDE_REJECTION_STATUSES = (400, 422, 500)
"""The HTTP statuses with which servers reject an unknown value of ``include``."""

KEY_SUFFIX = "encrypted-reasoning"
"""The end of the keys of this evidence in a store."""


class ReasoningEvidence(Evidence):
    """What the answers of one model have shown.

    Attributes:
        accepted: Whether a request for encrypted reasoning was answered; None before the first one. False if the server
            says that it does not encrypt.
        stores: Whether responses are stored; not if an answer had ``store: false`` and the request did not.
    """

    accepted: bool | None = None
    stores: bool = True

    def should_request(self, *, encrypts: bool | None, heal: bool) -> bool:
        """Return whether to request encrypted reasoning.

        It is requested with the first answer, too: its reasoning would be lost with the stored response otherwise.

        Args:
            encrypts: Whether the server encrypts reasoning, as it says itself; None if it does not say.
            heal: Whether a rejected request may be repeated without.
        """
        if encrypts is not None:
            return encrypts
        if self.accepted is not None:
            return self.accepted
        return heal

    def record(
        self,
        outcome: Outcome,
        *,
        requested: bool,
        rejected: bool,
        stored: bool,
        encrypts: bool | None = None,
    ) -> None:
        """Record an answer.

        Args:
            outcome: The answer.
            requested: Whether encrypted reasoning was requested.
            rejected: Whether the request was repeated without, after the server had rejected it.
            stored: Whether the server was to store the response.
            encrypts: Whether the server encrypts reasoning, as it says itself; None if it does not say.
        """
        if outcome.status not in ("completed", "incomplete"):
            return
        if encrypts is False:
            self.accepted = False
        elif requested or rejected:
            self.accepted = requested
        self.stores &= not (stored and outcome.stored is False)
