"""Checks of the Grafana dashboard against the metrics."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse

from kedge.observe import METRICS
from kedge.observe.prometheus import render

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "kedge.json"
METRIC_NAME = re.compile(r"\b([a-z][a-z0-9]*(?:_[a-z0-9]+)+)\s*(?=[{\[)])")
GROUP_BY = re.compile(r"by \(([^)]*)\)")


def panel_queries() -> list[str]:
    """Return every query of every panel."""
    dashboard: Any = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def exposed_names() -> set[str]:
    """Return the names of all exposed samples."""
    names: set[str] = set()
    for family in parse(render()[0].decode()):
        base = METRICS.get(f"{family.name}_total") or METRICS[family.name]
        ends = ("_bucket", "_count", "_sum") if base.kind == "histogram" else ("",)
        names |= {base.name + end for end in ends}
    return names


def test_every_queried_metric_exists() -> None:
    """Panels query and group by existing metrics and labels, and show every metric."""
    queried = {name for query in panel_queries() for name in METRIC_NAME.findall(query)}
    assert len(queried) > 20
    assert queried - exposed_names() == set()
    queries = " ".join(panel_queries())
    assert [name for name in METRICS if name not in queries] == []
    for query in panel_queries():
        labels = {
            label
            for name, metric in METRICS.items()
            if name in query
            for label in (*metric.labels, "le")
        }
        grouped = {each.strip() for group in GROUP_BY.findall(query) for each in group.split(",")}
        assert grouped <= labels, query
