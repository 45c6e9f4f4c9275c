"""Metrics: a table of declared names, counted in the process.

Each metric is declared once with its labels, so that no undocumented name is counted and no label contains an
id or content. Some label values come from a server (error codes), so they are limited: a value that is not a
short plain identifier, and every series after the first ``MAX_SERIES`` of a metric, is counted as ``other``.
An exporter reads ``samples()``.

``prometheus_client`` is not used as the registry, because its import takes about 100 ms and it does not limit labels.
"""

import re
import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal

import msgspec

Labels = tuple[tuple[str, str], ...]
Value = tuple[str, float, Labels]
"""The name of a metric, a value, and its labels in the declared order."""

MAX_SERIES = 64
"""The maximum number of label combinations of a metric; further ones are counted as ``other``."""
OTHER = "other"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9_.+/{}-]{1,48}")

_PLAN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_SHORT_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 500, 1000)


class Metric(msgspec.Struct, frozen=True):
    """The declaration of a metric: name, help text, label names, and buckets of a histogram."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "histogram", "gauge"]:
        """A metric with buckets is a histogram; of the others, those whose names end with ``_total`` are counters."""
        if self.buckets:
            return "histogram"
        if self.name.endswith("_total"):
            return "counter"
        return "gauge"


class Sample(msgspec.Struct):
    """The state of a metric for one set of label values.

    ``value`` is the sum, or the current value of a gauge. ``bucket_counts`` are the observations in each bucket
    alone (not cumulative); the last one counts those above all bounds.
    """

    count: int = 0
    value: float = 0.0
    bucket_counts: tuple[int, ...] = ()


_TABLE = (
    Metric("responses_chained_requests_total", "Requests on an anchor that were not refused"),
    Metric(
        "responses_stateless_requests_total", "Requests that sent everything and were not refused"
    ),
    Metric(
        "responses_refused_requests_total", "Requests that a server refused, on an anchor or not"
    ),
    Metric(
        "responses_fallback_total",
        "Requests that sent everything although there were candidates",
        ("reason",),
    ),
    Metric("responses_delta_blocks_count", "Blocks sent with a request", buckets=_COUNTS),
    Metric(
        "responses_anchor_detection_duration_seconds",
        "Seconds spent on planning a request",
        buckets=_PLAN_SECONDS,
    ),
    Metric(
        "responses_chain_depth", "Responses in the chain that a request is sent on", buckets=_COUNTS
    ),
    Metric("responses_chained_mode_enabled", "1 while chaining is on, 0 when switched off"),
    Metric("responses_healed_total", "Requests resent after a rejection", ("reason",)),
    Metric(
        "responses_rejected_total", "Requests that a server rejected or failed to answer", ("code",)
    ),
    Metric("responses_forgotten_total", "Answers generated without the requested context"),
    Metric(
        "responses_mode_changed_total", "Requests sent in another mode than requested", ("reason",)
    ),
    Metric(
        "responses_passed_through_total",
        "Requests of chained clients and proxies that were sent as written",
        ("reason",),
    ),
    Metric("responses_without_id_total", "Responses without an id"),
    Metric("responses_bytes_sent_total", "Bytes of request bodies"),
    Metric("responses_bytes_full_total", "Estimated bytes of request bodies without chaining"),
    Metric(
        "responses_first_output_seconds",
        "Seconds from a plan to the first visible output",
        buckets=_SECONDS,
    ),
    Metric(
        "responses_duration_seconds",
        "Seconds from a plan to the end of the answer",
        buckets=_SECONDS,
    ),
    Metric("tool_call_ids_total", "Tool calls, by how their id was determined", ("outcome",)),
    Metric(
        "tool_call_names_inferred_total",
        "Tool calls without a name, which was inferred from their arguments",
    ),
    Metric(
        "tool_results_total",
        "Tool results sent, by how they were matched to their calls",
        ("outcome",),
    ),
    Metric("tool_runs_total", "Tool runs, by outcome", ("outcome",)),
    Metric("tool_duration_seconds", "Seconds that a tool ran", buckets=_SECONDS),
    Metric("outputs_total", "Typed answers, by outcome", ("outcome",)),
    Metric("compactions_total", "Compactions, by compactor", ("by", "outcome")),
    Metric("compaction_blocks_removed_total", "Blocks that compaction removed"),
    Metric("compaction_tokens_saved_total", "Tokens that compaction saved"),
    Metric("states_discarded_total", "Chat states that were discarded", ("reason",)),
    Metric(
        "prompt_cache_hints_total",
        "Requests that changed something which prevents prompt caching",
        ("hint",),
    ),
    Metric("tokens_total", "Tokens reported by servers", ("kind",)),
    Metric(
        "store_duration_seconds", "Seconds of a store operation", ("operation",), _SHORT_SECONDS
    ),
    Metric(
        "server_requests_total", "Requests to this server, by route and status", ("route", "status")
    ),
    Metric(
        "server_responses_total",
        "Responses generated by this server, by the kind of context they continue",
        ("memory", "status"),
    ),
    Metric(
        "server_request_duration_seconds",
        "Seconds to answer a request to this server",
        ("route",),
        _SECONDS,
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}
"""Every metric by name."""
_GAUGES = frozenset(metric.name for metric in _TABLE if metric.kind == "gauge")
_COUNTERS = frozenset(metric.name for metric in _TABLE if metric.kind == "counter")

_lock = threading.Lock()
_registry: dict[str, dict[Labels, list[float]]] = {}


def count(name: str, amount: float = 1, **labels: str) -> None:
    """Add to a counter.

    Args:
        name: A counter of ``METRICS``.
        amount: The amount to add; 0 changes nothing.
        **labels: All label values of the metric, in the declared order.

    Raises:
        KeyError: The metric is not declared, or has other labels.
    """
    measure(name, amount, **labels)


def measure(name: str, value: float, **labels: str) -> None:
    """Record a value of a histogram, or set a gauge.

    Args:
        name: A histogram or gauge of ``METRICS``.
        value: The observed or current value.
        **labels: All label values of the metric, in the declared order.

    Raises:
        KeyError: The metric is not declared, or has other labels.
    """
    measure_all((name, value, tuple(labels.items())))


def measure_all(*values: Value) -> None:
    """Record several values, which takes less time than recording each of them.

    Args:
        *values: The arguments of ``count`` or ``measure`` for each value. A counter that grows by 0 is not changed, and
            gets no series.

    Raises:
        KeyError: A metric that is changed is not declared, or has other labels.
    """
    with _lock:
        for name, value, labels in values:
            if not value and name in _COUNTERS:
                continue
            try:
                entry = _registry[name][labels]
            except KeyError:
                entry = _add_series(METRICS[name], _registry.setdefault(name, {}), labels)
            entry[0] += 1
            if name in _GAUGES:
                entry[1] = value
            else:
                entry[1] += value
            if len(entry) > 2:
                entry[2 + bisect_left(METRICS[name].buckets, value)] += 1


def snapshot() -> dict[str, dict[Labels, tuple[int, float]]]:
    """Return the current values of all metrics recorded so far.

    Returns:
        For each metric and each set of labels, the number of recordings and their sum (or a gauge's value).
    """
    return {
        name: {labels: (sample.count, sample.value) for labels, sample in series.items()}
        for name, series in samples().items()
    }


def samples() -> dict[str, dict[Labels, Sample]]:
    """Return the current samples of all metrics recorded so far, with the buckets of histograms."""
    with _lock:
        return {
            name: {
                labels: Sample(int(entry[0]), entry[1], tuple(map(int, entry[2:])))
                for labels, entry in series.items()
            }
            for name, series in _registry.items()
        }


def reset() -> None:
    """Clear all metrics; for tests."""
    with _lock:
        _registry.clear()


def _add_series(metric: Metric, series: dict[Labels, list[float]], labels: Labels) -> list[float]:
    names = tuple(name for name, _ in labels)
    if names != metric.labels:
        raise KeyError(f"{metric.name} has the labels {metric.labels}, not {names}")
    bucket_count = len(metric.buckets) + 1 if metric.buckets else 0
    key = _limit_labels(labels, len(series))
    return series.setdefault(key, [0, 0.0, *([0] * bucket_count)])


def _limit_labels(labels: Labels, series: int) -> Labels:
    """Replace label values that are too many or not plain identifiers by ``other``."""
    if series >= MAX_SERIES:
        return tuple((name, OTHER) for name, _ in labels)
    return tuple((name, text if _LABEL_VALUE.fullmatch(text) else OTHER) for name, text in labels)
