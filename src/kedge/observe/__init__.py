"""Counting and logging: what every layer says about its work.

``kedge.observe.prometheus`` gives the counts to Prometheus, ``kedge.middleware.trace`` makes spans.
"""

from kedge.observe.formats import JsonFormatter, TextFormatter, log_to_stderr
from kedge.observe.logs import TRACE, Ids, Logger, bound, get_logger
from kedge.observe.metrics import METRICS, Metric, count, measure, reset, samples, snapshot

__all__ = [
    "METRICS",
    "TRACE",
    "Ids",
    "JsonFormatter",
    "Logger",
    "Metric",
    "TextFormatter",
    "bound",
    "count",
    "get_logger",
    "log_to_stderr",
    "measure",
    "reset",
    "samples",
    "snapshot",
]
