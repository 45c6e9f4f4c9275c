"""Logging: the stdlib's, with one level more and ids as fields.

TRACE every step of finding an anchor and tagging blocks; DEBUG what was decided and how much is sent;
INFO the mode of a request and its end; WARNING fallbacks and missing ids; ERROR refusals and failures.
Records carry ids (turn, response, call) as ``extra`` fields and never hold content or keys.
"""

import logging
from typing import Any

TRACE = 5
logging.addLevelName(TRACE, "TRACE")
logging.getLogger("kedge").addHandler(logging.NullHandler())  # a library is silent unless asked


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields of the record."""

    def log(self, level: int, msg: object, *args: object, **fields: Any) -> None:
        """Log a message; ``fields`` such as ``response_id`` go along as attributes."""
        if not self.logger.isEnabledFor(level):
            return
        exc_info = fields.pop("exc_info", None)
        extra = {name: value for name, value in fields.items() if value not in (None, "")}
        self.logger.log(level, msg, *args, exc_info=exc_info, extra={"kedge": extra}, stacklevel=3)

    def trace(self, msg: object, *args: object, **fields: Any) -> None:
        """Log at TRACE."""
        self.log(TRACE, msg, *args, **fields)


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(logging.getLogger(name), {})
