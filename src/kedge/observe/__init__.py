"""Metrics and logging for all layers.

``kedge.observe.prometheus`` exports the metrics to Prometheus; ``kedge.middleware.trace`` creates spans.
"""

from kedge.observe.logs import (
    TRACE,
    ContextFilter,
    JsonFormatter,
    Logger,
    TextFormatter,
    bind_fields,
    get_logger,
    log_to_stderr,
)
from kedge.observe.metrics import METRICS, count, measure, reset, samples, snapshot

__all__ = [
    "METRICS",
    "TRACE",
    "ContextFilter",
    "JsonFormatter",
    "Logger",
    "TextFormatter",
    "bind_fields",
    "count",
    "get_logger",
    "log_to_stderr",
    "measure",
    "reset",
    "samples",
    "snapshot",
]
