"""Reports of chained clients and proxies: one record per request on the wire, and totals."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from threading import Lock

from kedge._internal.display import format_size, pluralize
from kedge.engines.request_log import count_end, count_sent
from kedge.observe import count, get_logger
from kedge.store.proxied_requests import ChainedRequest
from kedge.turns.frozen_json import FrozenMap

log = get_logger("kedge.chaining")

RECENT = 200
"""The maximum number of requests that a report lists."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """Totals of a chained client, which are sums over its records.

    Attributes:
        requests: The number of `POST /responses` requests of the program; on the wire there were as many, and one more
            for each that was healed.
        chained: The number of requests that were sent on an anchor, and neither refused nor healed.
        refused: The number of requests on the wire that the server refused, healed or not.
        passed_through: The number of requests that were sent as written, by reason.
        healed: The number of requests that were sent again in full, by reason.
        lost: The number of answers that were passed on although the server had not used the stored context.
        sent_bytes: Bytes of all bodies on the wire.
        full_bytes: Bytes of the bodies that the program wrote.
        recent: The records of the newest requests on the wire, oldest first.
    """

    requests: int
    chained: int
    refused: int
    passed_through: Mapping[str, int]
    healed: Mapping[str, int]
    lost: int
    sent_bytes: int
    full_bytes: int
    recent: tuple[ChainedRequest, ...]

    @property
    def saved_bytes(self) -> int:
        """The number of bytes that were not uploaded."""
        return self.full_bytes - self.sent_bytes

    def __str__(self) -> str:
        sizes = f"{format_size(self.sent_bytes)} of {format_size(self.full_bytes)} were sent"
        lines = [f"{self.chained} of {pluralize(self.requests, 'request')} chained, {sizes}"]
        if self.passed_through:
            lines.append(f"as written: {_format_reasons(self.passed_through)}")
        if self.healed:
            lines.append(f"healed: {_format_reasons(self.healed)}")
        if self.refused:
            lines.append(f"refused by the server: {self.refused}")
        if self.lost:
            lines.append(f"answered without the stored context: {self.lost}")
        return "\n".join(lines)


def _format_reasons(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


class ReportBuilder:
    """The collected requests of a report; thread-safe."""

    def __init__(self, on_request: Callable[[ChainedRequest], None] | None = None) -> None:
        self.on_request = on_request
        self._recent = deque[ChainedRequest](maxlen=RECENT)
        self._totals = Counter(requests=0, chained=0, refused=0, lost=0, sent_bytes=0, full_bytes=0)
        self._passed = Counter[str]()
        self._healed = Counter[str]()
        self._lock = Lock()

    def add(self, request: ChainedRequest) -> None:
        """Add one finished request on the wire, log it and count it."""
        is_last = not request.is_resent  # of the requests on the wire for one of the program
        with self._lock:
            self._totals.update(
                requests=is_last,
                chained=is_last and bool(request.anchor) and not request.is_refused,
                refused=request.is_refused,
                lost=request.is_lost,
                sent_bytes=request.sent_bytes,
                full_bytes=is_last * request.full_bytes,
            )
            if request.reason:
                self._passed[request.reason] += 1
            if request.healed:
                self._healed[request.healed] += 1
            self._recent.append(request)
        if request.reason:
            count("responses_passed_through_total", reason=request.reason)
        count_sent(request, request.full_bytes)
        count_end(request)
        log.info(
            "request %s: sent %d of %d bytes",
            request.status or "failed",
            request.sent_bytes,
            request.full_bytes,
            **asdict(request),
        )
        if self.on_request is not None:
            self.on_request(request)

    def build(self) -> ChainReport:
        """Return the totals so far."""
        with self._lock:
            return ChainReport(
                **self._totals,
                passed_through=FrozenMap(self._passed),
                healed=FrozenMap(self._healed),
                recent=tuple(self._recent),
            )
