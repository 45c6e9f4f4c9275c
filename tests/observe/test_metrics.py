"""Declaration and counting of metrics within the process."""

import threading
from pathlib import Path

import pytest

from kedge.observe import METRICS, count, measure, reset, snapshot


@pytest.fixture(autouse=True)
def reset_metrics() -> None:
    """Reset all metrics."""
    reset()


def test_counters_add_up_by_label() -> None:
    """Each set of labels has its own count."""
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", reason="expired")
    assert snapshot()["responses_fallback_total"] == {
        (("reason", "changed"),): (2, 2.0),
        (("reason", "expired"),): (1, 1.0),
    }


def test_histograms_sum_and_gauges_store_the_last_value() -> None:
    """A histogram stores the number and sum of its values, a gauge the last value."""
    measure("responses_delta_blocks_count", 3)
    measure("responses_delta_blocks_count", 4)
    measure("responses_chained_mode_enabled", 1)
    measure("responses_chained_mode_enabled", 0)
    assert snapshot()["responses_delta_blocks_count"] == {(): (2, 7.0)}
    assert snapshot()["responses_chained_mode_enabled"][()][1] == 0


def test_undeclared_metric_is_rejected() -> None:
    """An unknown metric name or label raises `KeyError`."""
    with pytest.raises(KeyError):
        count("no_such_metric")
    with pytest.raises(KeyError, match="has the labels"):
        count("responses_fallback_total", conversation_id="conv_1")


def test_no_label_contains_an_id_or_content() -> None:
    """No metric has a label for ids or message content."""
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert not labels & {"id", "conversation", "conversation_id", "response_id", "text", "turn"}


def test_counting_is_thread_safe() -> None:
    """Counts from several threads are all included."""

    def many() -> None:
        for _ in range(500):
            count("responses_chained_requests_total")

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert snapshot()["responses_chained_requests_total"] == {(): (2000, 2000.0)}


def test_every_metric_is_documented_with_its_labels() -> None:
    """Each metric has a row with its labels on the observability page."""
    page = Path(__file__).parents[2] / "docs" / "observability.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    for metric in METRICS.values():
        (row,) = [line for line in rows if f"`{metric.name}`" in line]
        assert all(f"`{label}`" in row for label in metric.labels), metric.name
