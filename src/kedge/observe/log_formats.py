"""How log records are written: as lines for people, or as JSON, one object a line.

``log_to_stderr`` is for programs (the command line, a service of yours): it shows Kedge's own loggers and
nobody else's, because those of SDKs write whole requests when they are asked for details.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from kedge.errors import InvalidSetting
from kedge.observe.logs import TRACE, get_fields

LOG_LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
LOG_FORMATS = ("text", "json")
_HANDLER_MARK = "_kedge_stderr"


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z WARNING kedge.engines: words [response_id=resp_1]``."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the stdlib's name
        """One line: when, how grave, who, what, and the ids."""
        ids = " ".join(f"{name}={value}" for name, value in get_fields(record).items())
        line = f"{_format_time(record)} {record.levelname} {record.name}: {record.message}"
        return f"{line} [{ids}]" if ids else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``, the ids, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; what JSON does not know is written as text."""
        told: dict[str, Any] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **get_fields(record),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is the standard error at the time, as tests and shells may exchange it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _format_time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_to_stderr(
    level: str = "warning", form: str = "text", stream: TextIO | None = None
) -> logging.Handler:
    """Write Kedge's records from this level on to the standard error; again to change that."""
    if level not in LOG_LEVELS:
        raise InvalidSetting(f"there is no log level {level!r}; there are {', '.join(LOG_LEVELS)}")
    if form not in LOG_FORMATS:
        raise InvalidSetting(f"there is no log format {form!r}; there are {', '.join(LOG_FORMATS)}")
    root = logging.getLogger("kedge")
    for handler in [each for each in root.handlers if hasattr(each, _HANDLER_MARK)]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    setattr(handler, _HANDLER_MARK, True)
    root.addHandler(handler)
    root.setLevel(LOG_LEVELS[level])
    return handler
