"""Counting and logging: what every layer says about its work."""

from kedge.observe.logs import TRACE, Logger, get_logger
from kedge.observe.metrics import METRICS, Metric, count, measure, reset, snapshot

__all__ = [
    "METRICS",
    "TRACE",
    "Logger",
    "Metric",
    "count",
    "get_logger",
    "measure",
    "reset",
    "snapshot",
]
