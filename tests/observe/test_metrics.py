"""Metrics are declared once, with their labels, and counted in the process."""

import threading
from pathlib import Path

import pytest

from kedge.observe import METRICS, count, measure, reset, snapshot


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Start from nothing."""
    reset()


def test_counters_add_up_by_label() -> None:
    """Each set of labels has a count of its own."""
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", reason="expired")
    assert snapshot()["responses_fallback_total"] == {
        (("reason", "changed"),): (2, 2.0),
        (("reason", "expired"),): (1, 1.0),
    }


def test_histograms_sum_and_gauges_hold() -> None:
    """A histogram keeps times and sum, a gauge its present value."""
    measure("responses_delta_blocks_count", 3)
    measure("responses_delta_blocks_count", 4)
    measure("responses_chained_mode_enabled", 1)
    measure("responses_chained_mode_enabled", 0)
    assert snapshot()["responses_delta_blocks_count"] == {(): (2, 7.0)}
    assert snapshot()["responses_chained_mode_enabled"][()][1] == 0


def test_nothing_is_counted_that_is_not_declared() -> None:
    """An unknown name or label is a mistake of ours, and is said so."""
    with pytest.raises(KeyError):
        count("no_such_metric")
    with pytest.raises(KeyError, match="has the labels"):
        count("responses_fallback_total", conversation_id="conv_1")


def test_no_label_can_hold_an_id_or_content() -> None:
    """The labels that exist are few words each."""
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert not labels & {"id", "conversation", "conversation_id", "response_id", "text", "turn"}


def test_threads_lose_no_count() -> None:
    """Counting is safe from several threads."""

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
    """On the page about observability."""
    page = Path(__file__).parents[2] / "docs" / "observability.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    for metric in METRICS.values():
        (row,) = [line for line in rows if f"`{metric.name}`" in line]
        assert all(f"`{label}`" in row for label in metric.labels), metric.name
