"""Requests that were sent through a proxy: their original and their sent size, and the reason.

`Store` calls the functions of a transaction. Bodies are stored only with ``keep_bodies``. A `RequestRecorder` writes
requests in batches, in the background.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from anyio import Event, Lock, move_on_after

from kedge._internal.json_text import decode, encode_text, escape_surrogates
from kedge.errors import NotInStore, StoreError
from kedge.observe import get_logger
from kedge.planning.plan import send_label
from kedge.store.database.transactions import Tx
from kedge.store.records import MAX_INTEGER, is_row_number, validate_page

if TYPE_CHECKING:
    from kedge.store.store import Store

log = get_logger("kedge.chaining.proxy")


COUNTED_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
"""The tokens of a request that are recorded, by their names in `Usage`."""


@dataclass(frozen=True, slots=True)
class ChainedRequest:
    """The record of one `POST /responses` request on the wire: what was sent and why, and what came back.

    The report, the log record, the metrics and, for a proxy, the stored row have its values. A request of a program
    that was healed has two: of the request on the anchor, and of the body that the program wrote, with `healed`.

    Attributes:
        created_at: The time at which it finished, in Unix time.
        model: The requested model.
        status: The HTTP status of the response; 0 if there is none.
        anchor: The response that it continues; empty if it has the complete input.
        response_id: The id of the response; empty if there is none.
        sent_blocks: The number of blocks that were sent.
        full_blocks: The number of blocks that the program wrote.
        sent_bytes: The size of the body that was sent.
        full_bytes: The size of the body that the program wrote.
        reason: Why the request was sent as written; empty if it was rewritten.
        healed: Why it was sent in full after the request of the record before; empty if it is the first one.
        is_resent: Whether it was on an anchor that the server did not use, so that the body that the program wrote
            was sent next.
        is_lost: Whether the answer was passed on before its token count showed that the server had not
            used the stored context.
        is_refused: Whether the server refused the request, so that it continued nothing.
        error_code: The server's error code, or else the HTTP status; empty for an answer, and without a response.
        error: The message of the error, without the credentials of the request; empty for an answer.
        input_tokens: The tokens that the server counted; this and the next three are None if it did not.
        cached_tokens: The part of them that was in its prompt cache.
        output_tokens: The tokens of the answer.
        reasoning_tokens: The part of them that is reasoning.
        seconds: Its duration.
    """

    created_at: float
    model: str
    status: int
    anchor: str
    response_id: str
    sent_blocks: int
    full_blocks: int
    sent_bytes: int
    full_bytes: int
    reason: str = ""
    healed: str = ""
    is_resent: bool = False
    is_lost: bool = False
    is_refused: bool = False
    error_code: str = ""
    error: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ProxiedRequest(ChainedRequest):
    """A request that a proxy sent, with the members of `ChainedRequest` and four more.

    Attributes:
        upstream: The address of the server.
        request: The body that was sent, if bodies are stored.
        response: The body of the response, if bodies are stored.
        id: Its number in the store.
    """

    upstream: str = ""
    request: bytes | None = None
    response: bytes | None = None
    id: int = 0

    @property
    def plan(self) -> str:
        """How the request was sent, or that it was refused; see `send_label`."""
        reason = ""
        if not self.anchor:
            reason = self.healed or self.reason
        return send_label(reason, is_refused=self.is_refused)


@dataclass(frozen=True, slots=True)
class ProxyTotals:
    """Sums over the stored requests.

    Attributes:
        requests: The number of requests of clients.
        chained: The number of requests that were chained on a stored response, and neither refused nor healed.
        refused: The number of requests that the server refused, healed or not.
        healed: The number of requests that were sent again in full.
        lost: The number of answers without the stored context.
        sent_bytes: Bytes that were sent.
        full_bytes: Bytes of the clients' requests.
    """

    requests: int
    chained: int
    refused: int
    healed: int
    lost: int
    sent_bytes: int
    full_bytes: int


MAX_PROXIED = 10_000
"""How many requests are retained in each namespace."""
_COLUMNS = [each.name for each in fields(ProxiedRequest) if each.name != "id"]
_INSERT = (
    f"INSERT INTO proxied_requests ({', '.join(_COLUMNS)}, namespace) "
    f"VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"
)
_LISTED = _COLUMNS[:-2]
"""Without the bodies."""


def insert_proxied(tx: Tx, requests: Sequence[ProxiedRequest]) -> None:
    """Store requests that were sent through a proxy; bodies only with ``keep_bodies``."""
    rows: list[list[Any]] = []
    for request in requests:
        values = [_to_column(getattr(request, name), tx.body_bytes) for name in _COLUMNS]
        rows.append([*values, tx.namespace])
    tx.run_many(_INSERT, rows)
    tx.run(
        "DELETE FROM proxied_requests WHERE namespace = ? AND id <= (SELECT id FROM proxied_requests "
        "WHERE namespace = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
        (tx.namespace, tx.namespace, MAX_PROXIED),
    )


def _to_column(value: Any, body_bytes: int) -> Any:
    """Return a value as it is stored: without characters that a database cannot store, and a body not too long."""
    if isinstance(value, bytes):
        return value[:body_bytes] if body_bytes else None
    if isinstance(value, str):
        return escape_surrogates(value).replace("\0", "\\x00")
    if isinstance(value, bool):
        return int(value)
    return value


def list_proxied(
    tx: Tx, *, limit: int = 100, before: int = 0, body_bytes: int = 0
) -> list[ProxiedRequest]:
    """Return requests that were sent through a proxy, newest first, without their responses."""
    validate_page(limit)
    rows = tx.rows(
        f"SELECT id, {', '.join(_LISTED)}, CASE WHEN LENGTH(request) <= ? THEN request END "
        "FROM proxied_requests WHERE id < ? AND namespace = ? ORDER BY id DESC LIMIT ?",
        (body_bytes, min(before or MAX_INTEGER, MAX_INTEGER), tx.namespace, limit),
    )
    return [_to_request(("id", *_LISTED, "request"), row) for row in rows]


def get_proxied(tx: Tx, number: int) -> ProxiedRequest:
    """Return one request that was sent through a proxy, with its bodies if they were stored."""
    query = f"SELECT id, {', '.join(_COLUMNS)} FROM proxied_requests WHERE id = ? AND namespace = ?"
    if is_row_number(number):
        for row in tx.rows(query, (number, tx.namespace)):
            return _to_request(("id", *_COLUMNS), row)
    raise NotInStore(f"there is no proxied request {number}")


def export_recordings(tx: Tx, body_bytes: int) -> list[str]:
    """Return the requests whose bodies are complete as lines of JSON, oldest first; a body may have been cut."""
    rows = tx.rows(
        "SELECT id, upstream, status, request, response, anchor, response_id "
        "FROM proxied_requests WHERE namespace = ? AND request IS NOT NULL AND response IS NOT NULL "
        "ORDER BY id",
        (tx.namespace,),
    )
    groups: dict[str, str] = {}
    lines: list[str] = []
    for number, upstream, status, sent, received, previous, response_id in rows:
        group = groups.get(previous, str(number))
        if response_id:
            groups[response_id] = group
        if max(len(sent), len(received)) >= body_bytes:
            continue
        with suppress(ValueError, RecursionError):  # a body that was rejected may be anything
            line = {
                "name": f"{group}#{number}",
                "api": "responses",
                "host": urlsplit(str(upstream)).hostname,
                "status": status,
                "request": decode(bytes(sent)),
                "body": bytes(received).decode("utf-8", "replace"),
            }
            lines.append(f"{escape_surrogates(encode_text(line))}\n")
    return lines


def sum_proxied(tx: Tx) -> ProxyTotals:
    """Return the sums over the stored requests that were sent through a proxy."""
    rows = tx.rows(
        "SELECT SUM(1 - is_resent), "
        "SUM(CASE WHEN anchor <> '' AND is_refused = 0 THEN 1 - is_resent ELSE 0 END), SUM(is_refused), "
        "SUM(CASE WHEN healed <> '' THEN 1 ELSE 0 END), SUM(is_lost), SUM(sent_bytes), "
        "SUM(full_bytes * (1 - is_resent)) FROM proxied_requests WHERE namespace = ?",
        (tx.namespace,),
    )
    return ProxyTotals(*(int(value or 0) for value in rows[0]))


def _to_request(names: Sequence[str], row: Sequence[object]) -> ProxiedRequest:
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    values |= {name: bool(values[name]) for name in ("is_resent", "is_lost", "is_refused")}
    return ProxiedRequest(**values)


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

    def __init__(self, store: "Store", delay: float = WRITE_DELAY) -> None:
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
                store = self.store
                if namespace:
                    store = store.use_namespace(namespace)
                try:
                    await store.add_proxied(batch)
                except StoreError as error:
                    log.warning("%d requests could not be recorded: %s", len(batch), error)
