"""Log formats: text lines for people, or one JSON object per line.

``log_to_stderr`` is meant for programs (the command line, your own service). It shows only the loggers of
Kedge, because SDK loggers write complete requests at debug level.

Messages and fields may contain foreign text: the path of a request, a tool name or a ``call_id`` chosen by
a model. Both formatters escape every character that is not printable, so that no value can start a new
line, overwrite an earlier one or send control sequences to a terminal.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
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
_PLAIN_VALUE = re.compile(r'[^\s\[\]="]+')


class TextFormatter(logging.Formatter):
    """Format a record as ``2026-01-31T12:00:00.000Z WARNING kedge.engines: message [response_id=resp_1]``.

    The lines of a traceback follow, indented by four spaces: only the first line of a record starts with
    a time.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one escaped line, followed by its traceback if it has one."""
        line = f"{_format_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        lines = [line + _format_fields(get_fields(record))]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        if record.stack_info:
            lines += self.formatStack(record.stack_info).split("\n")
        return "\n    ".join(map(_escape, lines))


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object per line, in ASCII.

    Members: ``time``, ``level``, ``logger``, ``message``, the record's fields, and ``exception`` if there
    is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON; values of other types are written as strings."""
        members: dict[str, Any] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **get_fields(record),
        }
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which tests and shells may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _escape(line: str) -> str:
    r"""Replace characters that are not printable by their escape sequences (``\n``, ``\x1b``)."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _format_fields(fields: Mapping[str, Any]) -> str:
    """Return `` [name=value …]``, values with spaces or brackets quoted, or nothing without fields."""
    values = {name: str(value) for name, value in fields.items()}
    pairs = [
        f"{name}={value if _PLAIN_VALUE.fullmatch(value) else json.dumps(value, ensure_ascii=False)}"
        for name, value in values.items()
    ]
    return f" [{' '.join(pairs)}]" if pairs else ""


def _format_time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_to_stderr(
    level: str = "warning", form: str = "text", stream: TextIO | None = None
) -> logging.Handler:
    """Write Kedge's log records to the standard error, replacing an earlier handler of this function.

    Args:
        level: The lowest level shown: ``trace``, ``debug``, ``info``, ``warning`` or ``error``.
        form: ``text`` or ``json``.
        stream: Where to write instead of the standard error.

    Returns:
        The handler, already added to the logger ``kedge``.

    Raises:
        InvalidSetting: The level or the format is unknown.
    """
    if level not in LOG_LEVELS:
        raise InvalidSetting(f"unknown log level {level!r}; use one of {', '.join(LOG_LEVELS)}")
    if form not in LOG_FORMATS:
        raise InvalidSetting(f"unknown log format {form!r}; use one of {', '.join(LOG_FORMATS)}")
    root = logging.getLogger("kedge")
    for handler in [each for each in root.handlers if hasattr(each, _HANDLER_MARK)]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    setattr(handler, _HANDLER_MARK, True)
    root.addHandler(handler)
    root.setLevel(LOG_LEVELS[level])
    return handler
