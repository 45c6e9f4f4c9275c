"""The selection and the results of analytics: frozen values that `asdict` converts to JSON."""

from collections import Counter
from dataclasses import dataclass, field

from kedge._internal.argument_types import check_fields
from kedge._internal.arguments import check_times


@dataclass(frozen=True, slots=True)
class Selection:
    """The responses to include; an empty member does not restrict them.

    Args:
        since: The start of the range, in seconds since 1970.
        until: The end of the range, exclusive.
        model: Only responses of this model.
        provider: Only responses of this provider.
        conversation: Only responses of the conversation with this id.

    Raises:
        InvalidSetting: ``since`` or ``until`` is not a finite time.
    """

    since: float | None = None
    until: float | None = None
    model: str = ""
    provider: str = ""
    conversation: str = ""

    def __post_init__(self) -> None:
        check_times(since=self.since, until=self.until)
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Count:
    """A name and how often it occurred."""

    name: str
    count: int


def compute_success_rate(succeeded: int, requests: int, resent: int) -> float | None:
    """Return the share of answered requests among those that were not sent again; ``None`` if there are none."""
    return compute_share(succeeded, requests - resent)


def compute_share(part: float, total: float) -> float | None:
    """Return a part as a share of a total; ``None`` if the total is zero."""
    return part / total if total else None


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by their outcome.

    ``succeeded`` requests were answered. ``failed`` ones were refused, failed, were cut off or are incomplete, and
    were not sent again; ``failures`` counts them by status. ``resent`` ones failed, or were answered without their
    context, and were sent again, ``healed`` or by a retry. A request that the user stopped, or that is not finished,
    is none of these. ``refused`` requests are all that a server rejected, sent again or not. Of the others,
    ``chained`` ones were sent on an anchor, ``full`` ones with the complete context. ``sends`` has how requests were
    sent: ``chained``, ``new chain``, ``stateless`` or ``sent in full``, or that they were ``refused``. ``fallbacks``
    are requests in full although there was an anchor, by reason. ``forgotten`` are answers that a server generated
    without the stored context. ``without_id`` are answers without an id, on which no request can be chained.
    """

    total: int = 0
    conversations: int = 0
    succeeded: int = 0
    failed: int = 0
    resent: int = 0
    refused: int = 0
    chained: int = 0
    full: int = 0
    statuses: tuple[Count, ...] = ()
    failures: tuple[Count, ...] = ()
    modes: tuple[Count, ...] = ()
    sends: tuple[Count, ...] = ()
    fallbacks: tuple[Count, ...] = ()
    healed: tuple[Count, ...] = ()
    forgotten: int = 0
    without_id: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    results_by_id: int = 0
    results_by_fallback: int = 0
    results_unmatched: int = 0

    @property
    def results(self) -> tuple[Count, ...]:
        """Tool results by how they were matched to their calls."""
        return (
            Count("by id", self.results_by_id),
            Count("by fallback", self.results_by_fallback),
            Count("unmatched", self.results_unmatched),
        )

    @property
    def success_rate(self) -> float | None:
        """The share of requests that were answered, without those that were sent again; ``None`` if there were none."""
        return compute_success_rate(self.succeeded, self.total, self.resent)

    @property
    def chained_share(self) -> float | None:
        """The share of requests that were sent on an anchor, without those that were refused."""
        return compute_share(self.chained, self.chained + self.full)

    @property
    def saved_share(self) -> float | None:
        """The share of bytes that chaining saved, of what full requests would have sent."""
        return compute_share(self.saved_bytes, self.sent_bytes + self.saved_bytes)


@dataclass(frozen=True, slots=True)
class Chains:
    """The lengths of chains: responses, each chained on the one before.

    A full request starts a new chain. ``lengths`` has pairs of a length and the number of such chains.
    """

    count: int = 0
    mean: float | None = None
    longest: int = 0
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def bins(self) -> tuple[Count, ...]:
        """The number of chains by ranges of lengths: 1, 2 to 3, 4 to 7 and so on; empty ranges are omitted."""
        sums = Counter[int]()
        for length, count in self.lengths:
            sums[length.bit_length()] += count
        return tuple(
            Count(f"{1 << bits - 1} to {(1 << bits) - 1}" if bits > 1 else "1", count)
            for bits, count in sorted(sums.items())
        )


@dataclass(frozen=True, slots=True)
class Branching:
    """Points of conversations with more than one continuation, and conversations that are forks."""

    points: int = 0
    branches: int = 0
    """The total number of continuations of those points."""
    widest: int = 0
    forks: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens as the servers counted them; cached ones are part of the input."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    @property
    def cached_share(self) -> float | None:
        """The share of the input that came from the provider's cache."""
        return compute_share(self.cached, self.input)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Predicted and actual cached tokens, and the dollars that prompt caching saved.

    ``predictions`` are requests with a prediction and a count; ``predicted`` and ``cached`` are their sums.
    ``written`` are tokens written to explicit caches. ``saved`` is in dollars, for all responses whose
    price is known, minus the cost of writing.
    """

    predictions: int = 0
    predicted: int = 0
    cached: int = 0
    written: int = 0
    saved: float = 0.0

    @property
    def accuracy(self) -> float | None:
        """The share of the predicted tokens that were cached; ``None`` if none were predicted."""
        return compute_share(self.cached, self.predicted)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost in dollars, as far as prices are known.

    ``unpriced`` responses have tokens but no price; their cost is not in ``dollars``.
    """

    dollars: float = 0.0
    priced: int = 0
    unpriced: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of answered requests.

    The median of an even number of values is the mean of the middle two; ``p95`` is the nearest rank. For a
    selection with complete days (UTC), each value is rounded to three significant digits first.
    """

    median: float | None = None
    p95: float | None = None
    first_token_median: float | None = None
    first_token_p95: float | None = None


@dataclass(frozen=True, slots=True)
class ModelStats:
    """The statistics of one model of one provider."""

    provider: str
    model: str
    requests: int
    succeeded: int
    failed: int
    resent: int
    latency: Latency
    tokens: Tokens
    cost: Cost

    @property
    def success_rate(self) -> float | None:
        """The share of requests that were answered, without those that were sent again."""
        return compute_success_rate(self.succeeded, self.requests, self.resent)


@dataclass(frozen=True, slots=True)
class ConversationStats:
    """The statistics of one conversation."""

    id: str
    title: str
    requests: int
    succeeded: int
    failed: int
    resent: int
    refused: int
    chained: int
    sent_bytes: int
    saved_bytes: int
    tokens: Tokens
    cost: Cost


@dataclass(frozen=True, slots=True)
class Analytics:
    """All statistics of a selection."""

    selection: Selection
    requests: Requests
    chains: Chains
    branching: Branching
    tokens: Tokens
    cost: Cost
    latency: Latency
    models: tuple[ModelStats, ...] = ()
    """Sorted by requests, most first."""
    cache: CacheUse = field(default_factory=CacheUse)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The statistics of the interval from ``start`` to ``end``."""

    start: float
    end: float
    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    resent: int = 0
    refused: int = 0
    chained: int = 0
    fallbacks: int = 0
    healed: int = 0
    sent_bytes: int = 0
    saved_bytes: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    cost: Cost = field(default_factory=Cost)
    latency: Latency = field(default_factory=Latency)
    cache: CacheUse = field(default_factory=CacheUse)
