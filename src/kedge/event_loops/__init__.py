"""Event loops: call async code from sync code, and manage resources that belong to one event loop."""

from kedge.event_loops.per_loop import AsyncResource, PerLoop, SharedLock
from kedge.event_loops.sync_calls import BackgroundLoop, SyncCall, run_in_thread, run_sync

__all__ = [
    "AsyncResource",
    "BackgroundLoop",
    "PerLoop",
    "SharedLock",
    "SyncCall",
    "run_in_thread",
    "run_sync",
]
