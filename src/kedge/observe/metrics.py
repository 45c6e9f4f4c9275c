"""Metrics: a table of names, counted in the process.

Each metric is declared once, with its labels, so that nothing is counted under a name that nobody
documents, and no label can hold an id or content. Some label values are words of a server (its error
codes), so values are bounded too: what is no short plain word, and what comes after the first
``MOST_SERIES`` of a metric, is counted as ``other``. An exporter reads ``samples()``.
"""

import re
import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Labels = tuple[tuple[str, str], ...]

MAX_SERIES = 64
"""How many sets of label values a metric may have before the rest becomes ``other``."""
OTHER = "other"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9_.+/{}-]{1,48}")

_MILLISECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)
_SHORT_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 500, 1000)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: what it counts and under which labels; a histogram also has its buckets."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(slots=True)
class Sample:
    """What has been seen of a metric under one set of labels.

    ``value`` is the sum, or the present value of a gauge; ``filled`` counts what fell into each
    bucket alone, and at the end what was above them all.
    """

    count: int = 0
    value: float = 0.0
    bucket_counts: tuple[int, ...] = ()


_TABLE = (
    Metric("responses_chained_requests_total", "counter", "Requests sent on an anchor"),
    Metric("responses_stateless_requests_total", "counter", "Requests that sent everything"),
    Metric(
        "responses_fallback_total",
        "counter",
        "Requests that sent everything although there were candidates",
        ("reason",),
    ),
    Metric(
        "responses_delta_blocks_count",
        "histogram",
        "Blocks sent with a request",
        buckets=_COUNTS,
    ),
    Metric(
        "responses_anchor_detection_duration_ms",
        "histogram",
        "Milliseconds spent on a plan",
        buckets=_MILLISECONDS,
    ),
    Metric(
        "responses_chain_depth",
        "histogram",
        "Responses in the chain that a request is sent on",
        buckets=_COUNTS,
    ),
    Metric(
        "responses_chained_mode_enabled", "gauge", "1 while chaining is on, 0 when switched off"
    ),
    Metric("responses_healed_total", "counter", "Requests sent again after a refusal", ("reason",)),
    Metric(
        "responses_rejected_total",
        "counter",
        "Requests that a server refused or failed at",
        ("code",),
    ),
    Metric("responses_forgotten_total", "counter", "Answers given without the memory asked for"),
    Metric("responses_mode_changed_total", "counter", "Requests in another mode", ("reason",)),
    Metric(
        "responses_without_id_total", "counter", "Responses that came without an id of their own"
    ),
    Metric("responses_bytes_sent_total", "counter", "Bytes of request bodies"),
    Metric("responses_bytes_full_total", "counter", "About the bytes that full sends would take"),
    Metric(
        "responses_first_output_seconds",
        "histogram",
        "Seconds from a plan to the first that a person sees of the answer",
        buckets=_SECONDS,
    ),
    Metric(
        "responses_duration_seconds",
        "histogram",
        "Seconds from a plan to the end of its answer",
        buckets=_SECONDS,
    ),
    Metric("tool_call_ids_total", "counter", "Tool calls by how their id was found", ("outcome",)),
    Metric("tool_runs_total", "counter", "Tools run, by outcome", ("outcome",)),
    Metric("tool_duration_seconds", "histogram", "Seconds that a tool took", buckets=_SECONDS),
    Metric("compactions_total", "counter", "Compactions, by compactor", ("by", "outcome")),
    Metric("compaction_blocks_removed_total", "counter", "Blocks that compaction removed"),
    Metric("compaction_tokens_saved_total", "counter", "Tokens that compaction saved"),
    Metric("states_discarded_total", "counter", "Chat states that were not used", ("reason",)),
    Metric("tokens_total", "counter", "Tokens reported by servers", ("kind",)),
    Metric(
        "store_duration_seconds",
        "histogram",
        "Seconds that an operation of the store took",
        ("operation",),
        _SHORT_SECONDS,
    ),
    Metric(
        "server_requests_total",
        "counter",
        "Requests to this server, by route and status",
        ("route", "status"),
    ),
    Metric(
        "server_responses_total",
        "counter",
        "Responses that this server wrote, by the memory they were asked to build on",
        ("memory", "status"),
    ),
    Metric(
        "server_request_duration_seconds",
        "histogram",
        "Seconds that this server took to answer a request",
        ("route",),
        _SECONDS,
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}

_lock = threading.Lock()
_registry: dict[str, dict[Labels, list[float]]] = {}


def count(name: str, amount: float = 1, **labels: str) -> None:
    """Add to a counter."""
    _update(name, labels, amount)


def measure(name: str, value: float, **labels: str) -> None:
    """Note one value of a histogram, or the present value of a gauge."""
    _update(name, labels, value)


def snapshot() -> dict[str, dict[Labels, tuple[int, float]]]:
    """Every metric that has been touched: labels -> (how many times, their sum or present value)."""
    with _lock:
        return {
            name: {labels: (int(entry[0]), entry[1]) for labels, entry in series.items()}
            for name, series in _registry.items()
        }


def samples() -> dict[str, dict[Labels, Sample]]:
    """Every metric that has been touched, with the buckets of its histograms."""
    with _lock:
        return {
            name: {
                labels: Sample(int(entry[0]), entry[1], tuple(map(int, entry[2:])))
                for labels, entry in series.items()
            }
            for name, series in _registry.items()
        }


def reset() -> None:
    """Forget every count; for tests."""
    with _lock:
        _registry.clear()


def _update(name: str, labels: Mapping[str, str], value: float) -> None:
    metric = METRICS[name]
    if tuple(labels) != metric.labels:
        raise KeyError(f"{name} takes the labels {metric.labels}, not {tuple(labels)}")
    key = tuple(labels.items())
    with _lock:
        series = _registry.setdefault(name, {})
        entry = series.get(key)
        if entry is None:
            key = _limit_labels(key, len(series))
            room = len(metric.buckets) + 1 if metric.buckets else 0
            entry = series.setdefault(key, [0, 0.0, *([0] * room)])
        entry[0] += 1
        entry[1] = value if metric.kind == "gauge" else entry[1] + value
        if metric.buckets:
            entry[2 + bisect_left(metric.buckets, value)] += 1


def _limit_labels(labels: Labels, series: int) -> Labels:
    """The labels as they may be kept: few, and plain words."""
    if series >= MAX_SERIES:
        return tuple((name, OTHER) for name, _ in labels)
    return tuple((name, text if _LABEL_VALUE.fullmatch(text) else OTHER) for name, text in labels)
