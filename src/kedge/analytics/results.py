"""What is asked of a store, and what it tells: frozen values, which ``asdict`` makes ready for JSON."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Selection:
    """Which responses count. Times are seconds since 1970; ``until`` is not part of the range.

    An empty member does not restrict anything.
    """

    since: float | None = None
    until: float | None = None
    model: str = ""
    provider: str = ""
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """How often something happened."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Requests:
    """What was sent, and what became of it.

    ``chained`` requests went out on an anchor, ``full`` ones with everything. A ``fallback`` is a full
    request although there had been an anchor, by its reason; the first of a conversation is none.
    ``rejections`` are requests that a server refused, whether that was ``healed`` or not. ``forgotten``
    are answers that a server gave without the memory that was asked for. ``without_id`` are answers
    that came without an id, on which nothing can be chained.
    """

    total: int = 0
    conversations: int = 0
    succeeded: int = 0
    chained: int = 0
    full: int = 0
    statuses: tuple[Count, ...] = ()
    modes: tuple[Count, ...] = ()
    fallbacks: tuple[Count, ...] = ()
    healed: tuple[Count, ...] = ()
    rejections: int = 0
    forgotten: int = 0
    without_id: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0

    @property
    def success_rate(self) -> float | None:
        """The share of requests that were answered; ``None`` if there were none."""
        return self.succeeded / self.total if self.total else None

    @property
    def chained_share(self) -> float | None:
        """The share of requests that went out on an anchor."""
        return self.chained / self.total if self.total else None

    @property
    def saved_share(self) -> float | None:
        """The share of bytes that did not have to be sent, of what full requests would have taken."""
        whole = self.sent_bytes + self.saved_bytes
        return self.saved_bytes / whole if whole else None


@dataclass(frozen=True, slots=True)
class Chains:
    """How long chains are: responses, each on the one before, up to one that nothing was chained on.

    A full request begins a new chain. ``lengths`` tells how many chains have which length.
    """

    count: int = 0
    mean: float | None = None
    longest: int = 0
    lengths: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Branching:
    """Where conversations parted: points with more than one continuation, and forks by name."""

    points: int = 0
    branches: int = 0
    """How many continuations those points have in all."""
    widest: int = 0
    forks: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens, as the servers counted them. Cached ones are part of the input."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    @property
    def cached_share(self) -> float | None:
        """The share of the input that came from the provider's cache."""
        return self.cached / self.input if self.input else None


@dataclass(frozen=True, slots=True)
class Cost:
    """What was paid, in dollars, as far as prices are known.

    ``unpriced`` responses have tokens and no price: what they cost is not in ``dollars``.
    """

    dollars: float = 0.0
    priced: int = 0
    unpriced: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of answered requests.

    The median of an even number of values is the mean of the middle two; ``p95`` is the nearest rank.
    """

    median: float | None = None
    p95: float | None = None
    first_token_median: float | None = None
    first_token_p95: float | None = None


@dataclass(frozen=True, slots=True)
class ModelStats:
    """One model of one provider."""

    provider: str
    model: str
    requests: int
    succeeded: int
    latency: Latency
    tokens: Tokens
    cost: Cost

    @property
    def success_rate(self) -> float | None:
        """The share of requests that were answered."""
        return self.succeeded / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class Analytics:
    """Everything at once."""

    selection: Selection
    requests: Requests
    chains: Chains
    branching: Branching
    tokens: Tokens
    cost: Cost
    latency: Latency
    models: tuple[ModelStats, ...] = ()
    """Those with the most requests first."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What happened between ``start`` and ``end``."""

    start: float
    end: float
    requests: int = 0
    succeeded: int = 0
    chained: int = 0
    fallbacks: int = 0
    healed: int = 0
    sent_bytes: int = 0
    saved_bytes: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    cost: Cost = field(default_factory=Cost)
    latency: Latency = field(default_factory=Latency)
