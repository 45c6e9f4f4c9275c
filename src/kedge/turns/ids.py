"""Local ids of blocks, Turns and rows of the store.

A local id consists of a nanosecond timestamp that increases with every id of a process, and 40 random bits that
identify the process. It is never sent to a provider.
"""

import os
import threading
import time

_lock = threading.Lock()
_last_tick = 0
_process_bits = int.from_bytes(os.urandom(5))
_SPREAD = 0x9E3779B97F4A7C15
"""An odd constant: products of consecutive ticks with it differ in all digits."""


def new_id(prefix: str) -> str:
    """Generate an id such as ``blk_18a3f0c2b4d5e6f71a2b3c4d5e``.

    Ids start with the time, so they are ordered. They end with random bits of the process, mixed with the
    time: the last digits of two ids differ also within a process, because lists show only these.

    Args:
        prefix: The part before the underscore.

    Returns:
        The id.
    """
    global _last_tick  # noqa: PLW0603 - one clock for the process
    with _lock:
        tick = time.time_ns()
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    mixed = (_process_bits + (tick * _SPREAD >> 24)) & 0xFF_FFFF_FFFF
    return f"{prefix}_{tick:016x}{mixed:010x}"


def _reset_after_fork() -> None:
    """Set new random bits and an unlocked lock in a forked process."""
    global _lock, _process_bits  # noqa: PLW0603 - they belong to the process
    _lock = threading.Lock()
    _process_bits = int.from_bytes(os.urandom(5))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
