"""Declaration and counting of metrics, and their exposition format, checked with parsers of Prometheus."""

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import CollectorRegistry

from kedge.observe import METRICS, count, measure, reset, snapshot
from kedge.observe.metrics import MAX_SERIES, OTHER
from kedge.observe.prometheus import TableCollector, render


@pytest.fixture(autouse=True)
def reset_metrics() -> None:
    """Reset all metrics."""
    reset()


def test_counters_add_up_by_label() -> None:
    """Counters add up by label, histograms sum, gauges store the last value; other names and ids are rejected."""
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", reason="expired")
    count("responses_fallback_total", 0, reason="lost")
    assert snapshot()["responses_fallback_total"] == {
        (("reason", "changed"),): (2, 2.0),
        (("reason", "expired"),): (1, 1.0),
    }
    measure("responses_delta_blocks_count", 3)
    measure("responses_delta_blocks_count", 4)
    measure("responses_chained_mode_enabled", 1)
    measure("responses_chained_mode_enabled", 0)
    assert snapshot()["responses_delta_blocks_count"] == {(): (2, 7.0)}
    assert snapshot()["responses_chained_mode_enabled"][()][1] == 0
    with pytest.raises(KeyError):
        count("no_such_metric")
    with pytest.raises(KeyError, match="has the labels"):
        count("responses_fallback_total", conversation_id="conv_1")
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert not labels & {"id", "conversation", "conversation_id", "response_id", "text", "turn"}


def test_every_metric_is_documented_with_its_labels() -> None:
    """Each metric has a row with its labels on the observability page."""
    page = Path(__file__).parents[2] / "docs" / "observability.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    for metric in METRICS.values():
        (row,) = [line for line in rows if f"`{metric.name}`" in line]
        assert all(f"`{label}`" in row for label in metric.labels), metric.name


def scrape_values() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of a scrape by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(render()[0].decode())
        for sample in family.samples
    }


def test_every_metric_is_exposed() -> None:
    """Every metric is exposed, from zero, with its type and help text, also as OpenMetrics and in another registry."""
    families = {family.name: family for family in parse(render()[0].decode())}
    for metric in METRICS.values():
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
    samples = scrape_values()
    assert samples["responses_chained_requests_total", ()] == 0
    assert samples["responses_delta_blocks_count_bucket", (("le", "+Inf"),)] == 0
    opened, content_type = render("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert list(parse_openmetrics(opened.decode()))
    assert render()[1].startswith("text/plain")
    registry = CollectorRegistry()
    registry.register(TableCollector())
    assert registry.get_sample_value("responses_forgotten_total") == 0


def test_counts_are_exposed_with_their_labels() -> None:
    """Counters, gauges and histograms with cumulative buckets are exposed."""
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", 2, reason="expired")
    measure("responses_chained_mode_enabled", 1)
    for blocks in (1, 3, 4000):
        measure("responses_delta_blocks_count", blocks)
    samples = scrape_values()
    assert samples["responses_fallback_total", (("reason", "expired"),)] == 2
    assert samples["responses_chained_mode_enabled", ()] == 1
    buckets = {
        labels[0][1]: value
        for (name, labels), value in samples.items()
        if name == "responses_delta_blocks_count_bucket"
    }
    assert (buckets["0"], buckets["1"], buckets["2"]) == (0, 1, 1)
    assert (buckets["3"], buckets["1000"], buckets["+Inf"]) == (2, 2, 3)
    assert samples["responses_delta_blocks_count_count", ()] == 3
    assert samples["responses_delta_blocks_count_sum", ()] == 4004


def test_labels_are_bounded_in_length_and_number() -> None:
    """A label value that is long, unusual or beyond the maximum number of series becomes ``other``."""
    for code in ("rate_limit", "Please call Ada on 555-1234", "x" * 49, 'a"b\n', ""):
        count("responses_rejected_total", code=code)
    for number in range(2 * MAX_SERIES):
        count("responses_rejected_total", code=f"e{number}")
    text = render()[0].decode()
    assert "Ada" not in text
    codes = {
        labels[0][1] for (name, labels) in scrape_values() if name == "responses_rejected_total"
    }
    assert "rate_limit" in codes
    assert OTHER in codes
    assert len(codes) == MAX_SERIES
    rejected = scrape_values()["responses_rejected_total", (("code", OTHER),)]
    assert rejected == 4 + 2 * MAX_SERIES - (len(codes) - 2)
