"""How much of its past a request's model gets to see: all of it, unless a fault says otherwise.

This is the one place where the server asks about faults. Everything else that a fault changes, it
changes on the wire.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from kedge.server.contexts import Context

_parts: ContextVar[int | None] = ContextVar("parts of the past that are recalled", default=None)


def recalled(context: Context) -> Context:
    """Cut from a context what the server is made to forget."""
    parts = _parts.get()
    return context if parts is None else context.last_parts(parts)


@contextmanager
def recalling(parts: int | None) -> Generator[None]:
    """Recall only the last parts of any past within this block; None recalls everything."""
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)
