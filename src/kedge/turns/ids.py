"""Local ids: unique, and sorted by the time they were made.

An id is a nanosecond clock that never stands still nor goes back within a process, and 40 random
bits that tell this process from others. It says nothing about the provider and is never sent to one.
"""

import os
import secrets
import threading
import time

_lock = threading.Lock()
_last_tick = 0
_process_suffix = secrets.token_hex(5)


def new_id(prefix: str) -> str:
    """Make an id such as ``blk_18a3f0c2b4d5e6f71a2b3c4d5e``."""
    global _last_tick  # noqa: PLW0603 - one clock for the process
    with _lock:
        tick = time.time_ns()
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    return f"{prefix}_{tick:016x}{_process_suffix}"


def _reset_after_fork() -> None:
    """After a fork: other random bits, and a lock that nobody holds."""
    global _lock, _process_suffix  # noqa: PLW0603 - they belong to the process
    _lock = threading.Lock()
    _process_suffix = secrets.token_hex(5)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
