"""The embedded server: one for the process, started when it is first needed, on real HTTP."""

import atexit
import threading

from kedge.server.settings import Settings
from kedge.server.thread import ServerThread

_lock = threading.Lock()
_server: ServerThread | None = None


def embedded_server() -> ServerThread:
    """The server of this process; it keeps what it is told for as long as the process lives."""
    global _server  # noqa: PLW0603 - one for the process
    with _lock:
        if _server is None:
            _server = ServerThread(Settings())
            _server.start()
            atexit.register(_server.stop)
    return _server
