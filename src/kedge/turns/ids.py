"""Local ids: unique, and sorted by the time they were made.

An id is a nanosecond clock that never stands still nor goes back within a process, and 40 random
bits against other processes. It says nothing about the provider and is never sent to one.
"""

import secrets
import threading
import time

_lock = threading.Lock()
_last = 0


def new_id(prefix: str) -> str:
    """Make an id such as ``blk_18a3f0c2b4d5e6f71a2b3c4d5e``."""
    global _last  # noqa: PLW0603 - one clock for the process
    with _lock:
        _last = max(time.time_ns(), _last + 1)
        tick = _last
    return f"{prefix}_{tick:016x}{secrets.token_hex(5)}"
