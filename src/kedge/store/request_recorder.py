"""Write the requests of other programs to a store in batches, in the background."""

from collections import deque

from anyio import Event, Lock, move_on_after

from kedge.errors import StoreError
from kedge.observe import get_logger
from kedge.store.proxied_requests import ProxiedRequest
from kedge.store.store import Store

log = get_logger("kedge.proxy")

MAX_WAITING = 1_000
"""The maximum number of requests that wait to be recorded."""
WRITE_DELAY = 2.0
"""The maximum number of seconds before a request is written; a page that lists requests does not wait."""


class RequestRecorder:
    """Records finished requests in the namespaces of their users.

    Args:
        store: The store, without a namespace.
        delay: Seconds for which requests wait for others, so that several are written at once.
    """

    def __init__(self, store: Store, delay: float = WRITE_DELAY) -> None:
        self.store = store
        self._delay = delay
        self._waiting: deque[tuple[str, ProxiedRequest]] = deque(maxlen=MAX_WAITING)
        self._wake = Event()
        self._stopping = Event()
        self._lock = Lock()

    def add(self, request: ProxiedRequest, namespace: str = "") -> None:
        """Record a request soon; the oldest ones are dropped if the store is too slow."""
        self._waiting.append((namespace, request))
        self._wake.set()

    def stop(self) -> None:
        """Write the waiting requests, then stop."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Write requests until `stop` is called."""
        while not self._stopping.is_set() or self._waiting:
            await self._wake.wait()
            self._wake = Event()
            with move_on_after(self._delay):
                await self._stopping.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write the waiting requests now."""
        async with self._lock:
            batches: dict[str, list[ProxiedRequest]] = {}
            while self._waiting:
                namespace, request = self._waiting.popleft()
                batches.setdefault(namespace, []).append(request)
            for namespace, batch in batches.items():
                store = self.store.use_namespace(namespace) if namespace else self.store
                try:
                    await store.add_proxied(batch)
                except StoreError as error:
                    log.warning("%d requests could not be recorded: %s", len(batch), error)
