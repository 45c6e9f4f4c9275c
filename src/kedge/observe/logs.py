"""Loggers of the standard library with a TRACE level and ids as fields of each record.

TRACE: every step of finding an anchor and tagging blocks. DEBUG: decisions and sizes of requests. INFO: the
mode of a request and its end. WARNING: fallbacks and missing ids. ERROR: rejected requests and failures.
Records have ids (conversation, turn, response, call, request) as fields and never contain content or keys.

Ids that apply to a section of code are *bound*: every record logged inside ``with bind_fields(call_id=…)`` has
them, in every layer and task. ``record.kedge`` is the mapping of a record's fields.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from kedge._internal.arguments import check_type
from kedge._internal.display import escape_text
from kedge.errors import InvalidSetting

TRACE = 5
"""The log level below DEBUG: every step of finding an anchor."""
logging.addLevelName(TRACE, "TRACE")
logging.getLogger("kedge").addHandler(logging.NullHandler())  # a library is silent by default

BOUND_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("kedge_log_fields", default={})  # noqa: B039 - read only
"""The fields that are currently bound. Use ``bind_fields``, except to set them for single steps of a stream."""


class bind_fields:  # noqa: N801 - called as a function; a generator would cost three times as much
    """Add fields to every record logged inside the ``with`` block.

    Args:
        **ids: Field names and values, such as ``conversation_id="conv_1"``; empty values are ignored.
    """

    __slots__ = ("_before", "_ids")

    def __init__(self, **ids: str) -> None:
        self._ids = ids
        self._before: Mapping[str, str] = {}

    def __enter__(self) -> None:
        self._before = BOUND_FIELDS.get()
        added = {name: value for name, value in self._ids.items() if value}
        BOUND_FIELDS.set({**self._before, **added})

    def __exit__(self, *exc: object) -> None:
        # Without a token, because an abandoned generator may end in another context.
        BOUND_FIELDS.set(self._before)


_OPTIONS = frozenset({"exc_info", "stacklevel"})
"""The keyword arguments with the meaning that they have in ``logging``."""


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields of the record.

    Use ``get_logger`` to create one: ``log.info("completed", response_id="resp_1")``.
    """

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> Any:
        """Return a message that is written, with its keyword arguments as the fields of its record."""
        options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        values = {name: value for name, value in kwargs.items() if value not in (None, "")}
        return msg, {**options, "extra": {"kedge": {**BOUND_FIELDS.get(), **values}}}

    def trace(self, msg: object, *args: object, **fields: Any) -> None:
        """Log a message at level TRACE."""
        self.log(TRACE, msg, *args, stacklevel=2, **fields)


def get_logger(name: str) -> Logger:
    """Return the logger of this name, which accepts fields as keyword arguments."""
    check_type("name", str, name)
    return Logger(logging.getLogger(name), {})


def get_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the fields of a record; a record of a plain logger has the currently bound fields."""
    return getattr(record, "kedge", None) or BOUND_FIELDS.get()


class ContextFilter(logging.Filter):
    """A filter for custom handlers that sets ``record.kedge`` to the fields of every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Set ``record.kedge`` and accept the record."""
        record.kedge = get_fields(record)
        return True


LOG_LEVELS = {
    name: logging.getLevelNamesMapping()[name.upper()]
    for name in ("trace", "debug", "info", "warning", "error")
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
        message = record.getMessage()
        fields = {
            name: value
            for name, value in get_fields(record).items()
            if name != "request_id"
            or str(value) not in message  # the access log has it in the message
        }
        line = f"{_format_time(record)} {record.levelname} {record.name}: {message}"
        lines = [line + _format_fields(fields)]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        if record.stack_info:
            lines += self.formatStack(record.stack_info).split("\n")
        return "\n    ".join(map(escape_text, lines))


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


def _format_fields(fields: Mapping[str, Any]) -> str:
    """Return `` [name=value …]``, values with spaces or brackets quoted, or nothing without fields."""
    if not fields:
        return ""
    pairs = [f"{name}={_quote(str(value))}" for name, value in fields.items()]
    return f" [{' '.join(pairs)}]"


def _quote(value: str) -> str:
    """Return a value as it is written to the log: in quotes unless it is plain."""
    if _PLAIN_VALUE.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


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
        stream: The stream to write to instead of the standard error.

    Returns:
        The handler, already added to the logger ``kedge``.

    Raises:
        InvalidSetting: The level or the format is unknown.
    """
    check_type("level and form", str, level, form)
    if level not in LOG_LEVELS:
        raise InvalidSetting(f"unknown log level {level!r}; use one of {', '.join(LOG_LEVELS)}")
    if form not in LOG_FORMATS:
        raise InvalidSetting(f"unknown log format {form!r}; use one of {', '.join(LOG_FORMATS)}")
    root = logging.getLogger("kedge")
    for earlier in list(root.handlers):
        if hasattr(earlier, _HANDLER_MARK):
            root.removeHandler(earlier)
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    setattr(handler, _HANDLER_MARK, True)
    root.addHandler(handler)
    root.setLevel(LOG_LEVELS[level])
    return handler
