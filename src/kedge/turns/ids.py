"""Generate local ids that are unique and sorted by time.

An id consists of a nanosecond timestamp that increases with every id of a process, and 40 random bits that
identify the process. It is never sent to a provider.
"""

import os
import secrets
import threading
import time

_lock = threading.Lock()
_last_tick = 0
_process_suffix = secrets.token_hex(5)


def new_id(prefix: str) -> str:
    """Generate an id such as ``blk_18a3f0c2b4d5e6f71a2b3c4d5e``.

    Args:
        prefix: What comes before the underscore.

    Returns:
        The id.
    """
    global _last_tick  # noqa: PLW0603 - one clock for the process
    with _lock:
        tick = time.time_ns()
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    return f"{prefix}_{tick:016x}{_process_suffix}"


def _reset_after_fork() -> None:
    """Set other random bits and a free lock in a forked process."""
    global _lock, _process_suffix  # noqa: PLW0603 - they belong to the process
    _lock = threading.Lock()
    _process_suffix = secrets.token_hex(5)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
