"""Loggers of the standard library with a TRACE level and ids as fields of each record.

TRACE: every step of finding an anchor and tagging blocks. DEBUG: decisions and sizes of requests. INFO: the
mode of a request and its end. WARNING: fallbacks and missing ids. ERROR: rejected requests and failures.
Records carry ids (conversation, turn, response, call, request) as fields and never contain content or keys.

Ids that apply to a section of code are *bound*: every record logged inside ``with bind_fields(call_id=…)`` has
them, in every layer and task. ``record.kedge`` is the mapping of a record's fields.
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

TRACE = 5
"""The log level below DEBUG: every step of finding an anchor."""
logging.addLevelName(TRACE, "TRACE")
logging.getLogger("kedge").addHandler(logging.NullHandler())  # a library is silent by default

BOUND_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("kedge_log_fields", default={})  # noqa: B039 - read only
"""The fields bound at present. Use ``bind_fields``, unless they are set for single steps of a stream."""


@contextmanager
def bind_fields(**ids: str) -> Generator[None]:
    """Add fields to every record logged inside the ``with`` block.

    Args:
        **ids: Field names and values, such as ``conversation_id="conv_1"``; empty values are ignored.
    """
    before = BOUND_FIELDS.get()
    BOUND_FIELDS.set({**before, **{name: value for name, value in ids.items() if value}})
    try:
        yield
    finally:
        BOUND_FIELDS.set(before)  # not by token: an abandoned generator may end in another context


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields of the record.

    Made by ``get_logger``: ``log.info("completed", response_id="resp_1")``.
    """

    def log(self, level: int, msg: object, *args: object, **fields: Any) -> None:
        """Log a message.

        Args:
            level: A level of ``logging``, or ``TRACE``.
            msg: The message, with ``%`` placeholders for ``args``.
            *args: Values for the placeholders.
            **fields: Fields of the record, such as ``response_id``; ``exc_info`` as in ``logging``.
        """
        if not self.logger.isEnabledFor(level):
            return
        exc_info = fields.pop("exc_info", None)
        given = {name: value for name, value in fields.items() if value not in (None, "")}
        extra = {"kedge": {**BOUND_FIELDS.get(), **given}}
        self.logger.log(level, msg, *args, exc_info=exc_info, extra=extra, stacklevel=3)

    def trace(self, msg: object, *args: object, **fields: Any) -> None:
        """Log a message at level TRACE; the arguments are those of ``log``."""
        self.log(TRACE, msg, *args, **fields)


def get_logger(name: str) -> Logger:
    """Return the logger of this name, which accepts fields as keyword arguments."""
    return Logger(logging.getLogger(name), {})


def get_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the fields of a record; a record of a plain logger has the fields bound at present."""
    return getattr(record, "kedge", None) or BOUND_FIELDS.get()


class ContextFilter(logging.Filter):
    """A filter for your own handler: sets ``record.kedge`` to the fields of every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Set ``record.kedge`` and accept the record."""
        record.kedge = get_fields(record)
        return True
