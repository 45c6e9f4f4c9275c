"""Export of the metrics to Prometheus, as a collector of ``prometheus_client``.

The library provides the text formats; the values are in ``kedge.observe.metrics``, so that counting does not
import it. Metrics without labels are exported from the start, as zero.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from kedge.observe import metrics
from kedge.observe.metrics import METRICS, Labels, Sample


class TableCollector(Collector):
    """A collector of Kedge's metrics: register it in the ``CollectorRegistry`` of your program."""

    def collect(self) -> Iterator[Metric]:
        """Yield the current value of every declared metric."""
        current = metrics.samples()
        for metric in METRICS.values():
            series = current.get(metric.name) or _zero_samples(metric)
            yield _build_family(metric, series)


def render(accept: str = "") -> tuple[bytes, str]:
    """Render all metrics for a scraper.

    Args:
        accept: The scraper's ``Accept`` header, which selects the text format.

    Returns:
        The response body and its content type.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TableCollector())
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _zero_samples(metric: metrics.Metric) -> dict[Labels, Sample]:
    """Return zero for a metric without labels; a gauge without a value is not exported."""
    if metric.labels or metric.kind == "gauge":
        return {}
    return {(): Sample(bucket_counts=(0,) * (len(metric.buckets) + 1))}


def _build_family(metric: metrics.Metric, series: dict[Labels, Sample]) -> Metric:
    family: Any = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
    for labels, sample in series.items():
        values = [value for _, value in labels]
        if metric.kind == "histogram":
            family.add_metric(values, _cumulative_buckets(metric, sample), sample.value)
        else:
            family.add_metric(values, sample.value)
    return family


_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _cumulative_buckets(metric: metrics.Metric, sample: Sample) -> list[tuple[str, float]]:
    """Return cumulative buckets, as required by Prometheus."""
    bounds = [*(format(bound, "g") for bound in metric.buckets), "+Inf"]
    return list(zip(bounds, accumulate(sample.bucket_counts), strict=True))
