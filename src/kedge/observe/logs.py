"""Logging: the stdlib's, with one level more and ids as fields.

TRACE every step of finding an anchor and tagging blocks; DEBUG what was decided and how much is sent;
INFO the mode of a request and its end; WARNING fallbacks and missing ids; ERROR refusals and failures.
Records carry ids (conversation, turn, response, call, request) as fields and never hold content or keys.

Ids that hold for a while are *bound*: whatever is logged below ``with bound(call_id=…)`` has them, in
whatever layer and task it happens. ``record.kedge`` is the mapping of a record's fields.
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

TRACE = 5
logging.addLevelName(TRACE, "TRACE")
logging.getLogger("kedge").addHandler(logging.NullHandler())  # a library is silent unless asked

BOUND_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("kedge_log_fields", default={})  # noqa: B039 - read only
"""The ids that every record has at present. Use ``bound``, unless you set it for single steps."""


@contextmanager
def bind_fields(**ids: str) -> Generator[None]:
    """Give these ids to every record until the block ends; empty ones are left out."""
    before = BOUND_FIELDS.get()
    BOUND_FIELDS.set({**before, **{name: value for name, value in ids.items() if value}})
    try:
        yield
    finally:
        BOUND_FIELDS.set(before)  # not by token: an abandoned generator may end in another context


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields of the record."""

    def log(self, level: int, msg: object, *args: object, **fields: Any) -> None:
        """Log a message; ``fields`` such as ``response_id`` go along as attributes."""
        if not self.logger.isEnabledFor(level):
            return
        exc_info = fields.pop("exc_info", None)
        given = {name: value for name, value in fields.items() if value not in (None, "")}
        extra = {"kedge": {**BOUND_FIELDS.get(), **given}}
        self.logger.log(level, msg, *args, exc_info=exc_info, extra=extra, stacklevel=3)

    def trace(self, msg: object, *args: object, **fields: Any) -> None:
        """Log at TRACE."""
        self.log(TRACE, msg, *args, **fields)


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(logging.getLogger(name), {})


def get_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """The ids of a record; one of a plain logger has those that are bound while it is handled."""
    return getattr(record, "kedge", None) or BOUND_FIELDS.get()


class ContextFilter(logging.Filter):
    """For a handler of your own: gives every record its ids as ``record.kedge``."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, with its ids."""
        record.kedge = get_fields(record)
        return True
