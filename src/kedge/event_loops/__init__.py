"""Event loops: call async code from sync code, and manage resources that belong to one event loop."""

from kedge.event_loops.per_loop import (
    AsyncResource,
    PerLoop,
    SharedLock,
    SharedResource,
    run_to_end,
)
from kedge.event_loops.sync_calls import (
    BackgroundLoop,
    SyncCall,
    SyncFacade,
    delegate,
    run_in_thread,
    run_sync,
    wrap_method,
    wrap_navigation,
)

__all__ = [
    "AsyncResource",
    "BackgroundLoop",
    "PerLoop",
    "SharedLock",
    "SharedResource",
    "SyncCall",
    "SyncFacade",
    "delegate",
    "run_in_thread",
    "run_sync",
    "run_to_end",
    "wrap_method",
    "wrap_navigation",
]
