"""Metrics: a table of names, counted in the process.

Each metric is declared once, with its labels, so that nothing is counted under a name that nobody
documents, and no label can hold an id or content. An exporter reads ``snapshot()``.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: what it counts and under which labels."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


_TABLE = (
    Metric("responses_chained_requests_total", "counter", "Requests sent on an anchor"),
    Metric("responses_stateless_requests_total", "counter", "Requests that sent everything"),
    Metric(
        "responses_fallback_total",
        "counter",
        "Requests that sent everything although there were candidates",
        ("reason",),
    ),
    Metric("responses_delta_blocks_count", "histogram", "Blocks sent with a request"),
    Metric("responses_anchor_detection_duration_ms", "histogram", "Milliseconds spent on a plan"),
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
    Metric("tool_call_ids_total", "counter", "Tool calls by how their id was found", ("outcome",)),
    Metric("tool_runs_total", "counter", "Tools run, by outcome", ("outcome",)),
    Metric("tool_duration_seconds", "histogram", "Seconds that a tool took"),
    Metric("compactions_total", "counter", "Compactions, by compactor", ("by", "outcome")),
    Metric("compaction_blocks_removed_total", "counter", "Blocks that compaction removed"),
    Metric("compaction_tokens_saved_total", "counter", "Tokens that compaction saved"),
    Metric("states_discarded_total", "counter", "Chat states that were not used", ("reason",)),
    Metric("tokens_total", "counter", "Tokens reported by servers", ("kind",)),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}

_lock = threading.Lock()
_values: dict[tuple[str, Labels], list[float]] = {}


def count(name: str, amount: float = 1, **labels: str) -> None:
    """Add to a counter."""
    _update(name, labels, amount)


def measure(name: str, value: float, **labels: str) -> None:
    """Note one value of a histogram, or the present value of a gauge."""
    _update(name, labels, value)


def snapshot() -> dict[str, dict[Labels, tuple[int, float]]]:
    """Every metric that has been touched: labels -> (how many times, their sum or present value)."""
    result: dict[str, dict[Labels, tuple[int, float]]] = {}
    with _lock:
        for (name, labels), (times, total) in _values.items():
            result.setdefault(name, {})[labels] = (int(times), total)
    return result


def reset() -> None:
    """Forget every count; for tests."""
    with _lock:
        _values.clear()


def _update(name: str, labels: Mapping[str, str], value: float) -> None:
    metric = METRICS[name]
    if tuple(labels) != metric.labels:
        raise KeyError(f"{name} takes the labels {metric.labels}, not {tuple(labels)}")
    key = (name, tuple(labels.items()))
    with _lock:
        entry = _values.setdefault(key, [0, 0.0])
        entry[0] += 1
        entry[1] = value if metric.kind == "gauge" else entry[1] + value
