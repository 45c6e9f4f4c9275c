"""The table in the form that Prometheus reads, judged by the parser of its own client."""

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import CollectorRegistry

from kedge.observe import METRICS, count, measure, reset
from kedge.observe.metrics import MAX_SERIES, OTHER
from kedge.observe.prometheus import TableCollector, render


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Start from nothing."""
    reset()


def scrape_values() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape finds: name and labels -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(render()[0].decode())
        for sample in family.samples
    }


def test_every_metric_is_declared_to_a_scraper() -> None:
    """With its kind and its words, before anything was counted."""
    families = {family.name: family for family in parse(render()[0].decode())}
    for metric in METRICS.values():
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help


def test_what_has_no_labels_is_zero_from_the_start() -> None:
    """So that a rate is known from the first scrape on."""
    seen = scrape_values()
    assert seen["responses_chained_requests_total", ()] == 0
    assert seen["responses_delta_blocks_count_bucket", (("le", "+Inf"),)] == 0


def test_counts_arrive_with_their_labels() -> None:
    """Counters, gauges and histograms with cumulative buckets."""
    count("responses_fallback_total", reason="changed")
    count("responses_fallback_total", 2, reason="expired")
    measure("responses_chained_mode_enabled", 1)
    for blocks in (1, 3, 4000):
        measure("responses_delta_blocks_count", blocks)
    seen = scrape_values()
    assert seen["responses_fallback_total", (("reason", "expired"),)] == 2
    assert seen["responses_chained_mode_enabled", ()] == 1
    buckets = {
        labels[0][1]: value
        for (name, labels), value in seen.items()
        if name == "responses_delta_blocks_count_bucket"
    }
    assert (buckets["0"], buckets["1"], buckets["2"]) == (0, 1, 1)
    assert (buckets["3"], buckets["1000"], buckets["+Inf"]) == (2, 2, 3)
    assert seen["responses_delta_blocks_count_count", ()] == 3
    assert seen["responses_delta_blocks_count_sum", ()] == 4004


def test_openmetrics_is_given_to_those_who_ask_for_it() -> None:
    """The content type says which it is, and each parses as what it says."""
    plain, plain_type = render()
    opened, opened_type = render("application/openmetrics-text;version=1.0.0")
    assert plain_type.startswith("text/plain")
    assert opened_type.startswith("application/openmetrics-text")
    assert list(parse(plain.decode()))
    assert list(parse_openmetrics(opened.decode()))


def test_labels_are_bounded_in_length_and_number() -> None:
    """A server's codes are words of its own: a sentence, or one code too many, becomes ``other``."""
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
    assert len(codes) <= MAX_SERIES + 1
    rejected = scrape_values()["responses_rejected_total", (("code", OTHER),)]
    assert rejected == 4 + 2 * MAX_SERIES - (len(codes) - 2)


def test_the_table_can_join_another_registry() -> None:
    """A program with metrics of its own registers ours beside them."""
    registry = CollectorRegistry()
    registry.register(TableCollector())
    assert registry.get_sample_value("responses_forgotten_total") == 0
