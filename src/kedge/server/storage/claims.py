"""Claims of several servers on one database: leases for unfinished responses, and events of streams.

Every server has a row with the time at which its lease expires, by the clock of the database, and renews
it. Its responses in progress and locked conversations have its name. So one statement renews all claims
of a server, and when it crashes they all expire at the same time. Another server then fails its responses,
whose clients lost their connection, and continues its background responses.

A server that was only slow may still be generating. This is harmless: only its owner can finish a
response, and a conversation is only moved from the node at which it was read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kedge.database.postgres import NOW
from kedge.server.object_forms import (
    QUEUED_FIELDS,
    RESTARTED_MESSAGE,
    build_failed_fields,
)
from kedge.server.sse import FRAME_END
from kedge.text.json_text import encode

if TYPE_CHECKING:
    from collections.abc import Collection

    from kedge.server.storage.postgres import PostgresServerDatabase

MAX_ATTEMPTS = 5
"""The maximum number of servers that try to generate a background response, which may make them crash."""

_UNFINISHED = "status IN ('in_progress', 'queued')"
_IS_LOST = (
    f"{_UNFINISHED} AND NOT EXISTS (SELECT 1 FROM kedge_server_replicas r "
    f"WHERE r.id = kedge_server_nodes.owner AND r.alive_until > {NOW})"
)
_RENEW = f"""
INSERT INTO kedge_server_replicas (id, alive_until) VALUES (?, {NOW} + ?)
ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until RETURNING {NOW}
"""
_CLAIM = f"""
UPDATE kedge_server_nodes SET owner = ?, status = 'queued', became = ?, attempts = attempts + 1
WHERE id IN (
    SELECT id FROM kedge_server_nodes WHERE {_IS_LOST} AND background AND attempts < {MAX_ATTEMPTS} AND expires_at > ?
    ORDER BY id LIMIT ? FOR UPDATE SKIP LOCKED
) RETURNING id, key, parent, conversation, namespace, input, request, asked
"""
_FAIL = f"""
UPDATE kedge_server_nodes SET status = 'failed', became = ? WHERE id IN (
    SELECT id FROM kedge_server_nodes WHERE {_IS_LOST}
    AND NOT (background AND attempts < {MAX_ATTEMPTS} AND expires_at > ?) FOR UPDATE SKIP LOCKED
)
"""
_ADD_EVENTS = f"""
INSERT INTO kedge_server_events (node, first, last, created_at, frames)
SELECT ?, ?, ?, {NOW}, ? WHERE EXISTS (SELECT 1 FROM kedge_server_nodes WHERE id = ? AND owner = ? AND {_UNFINISHED})
"""
_READ_EVENTS = """
SELECT n.status, e.first, e.frames FROM kedge_server_nodes n
LEFT JOIN kedge_server_events e ON e.node = n.id AND e.last >= ? WHERE n.id = ? ORDER BY e.first
"""
_DELETE_EVENTS = f"""
DELETE FROM kedge_server_events e WHERE created_at < {NOW} - ?
AND NOT EXISTS (SELECT 1 FROM kedge_server_nodes WHERE id = e.node AND {_UNFINISHED})
"""


@dataclass(frozen=True, slots=True)
class ClaimedResponse:
    """A background response that another server did not finish, with the data to generate it."""

    node: int
    key: str
    parent: int | None
    conversation: str | None
    namespace: str
    input: bytes
    body: bytes
    request_json: bytes


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """The status of a response, and the frames of its events from a number on."""

    status: str
    frames: tuple[bytes, ...]


class ReplicaClaims:
    """The claims of one server, and the handling of claims that other servers have lost.

    Args:
        database: The database.
        owner: The name of this server.
        lease_seconds: Seconds after which its claims expire unless they are renewed.
    """

    def __init__(
        self, database: "PostgresServerDatabase", owner: str, lease_seconds: float
    ) -> None:
        self._database = database
        self._execute = database.execute
        self._owner = owner
        self.lease_seconds = lease_seconds

    def renew(self) -> None:
        """Renew all claims of this server, and set its clock to that of the database."""
        row = self._execute(_RENEW, (self._owner, self.lease_seconds)).fetchone()
        if row is not None:
            self._database.set_clock(row[0])
        self._database.resubmit()

    def give_up(self) -> None:
        """Release all claims, so that another server continues at once."""
        self._execute("DELETE FROM kedge_server_replicas WHERE id = ?", (self._owner,))

    def is_lost(self, node: int) -> bool:
        """Return whether a response is unfinished and its server is gone."""
        found = self._execute(
            f"SELECT 1 FROM kedge_server_nodes WHERE id = ? AND {_IS_LOST}", (node,)
        )
        return found.fetchone() is not None

    def claim(self, limit: int) -> list[ClaimedResponse]:
        """Claim background responses of servers that are gone, with the locks of their conversations."""

        def claim() -> list[ClaimedResponse]:
            values = (self._owner, _QUEUED_JSON, self._database.clock(), limit)
            claimed = [ClaimedResponse(*row) for row in self._execute(_CLAIM, values).fetchall()]
            for each in claimed:
                if each.conversation is not None:
                    self._execute(
                        "UPDATE kedge_server_conversations SET locked_by = ? WHERE id = ?",
                        (self._owner, each.conversation),
                    )
            return claimed

        return self._database.transact(claim) if limit > 0 else []

    def fail_lost(self) -> None:
        """Fail the responses of servers that are gone, except those that can be continued."""
        fields = build_failed_fields("failed", RESTARTED_MESSAGE)
        self._execute(_FAIL, (encode(fields), self._database.clock()))

    def delete_old(self, event_seconds: float) -> None:
        """Delete the events of responses that ended long ago, and the rows of servers that are gone."""
        self._execute(_DELETE_EVENTS, (event_seconds,))
        self._execute(
            f"DELETE FROM kedge_server_replicas WHERE alive_until < {NOW} - ?",
            (10 * self.lease_seconds,),
        )

    def find_lost(self, nodes: "Collection[int]") -> set[int]:
        """Return the responses that this server no longer owns or that another server cancelled."""
        rows = self._execute(
            f"SELECT id FROM kedge_server_nodes WHERE id = ANY(?) AND owner = ? AND {_UNFINISHED}",
            (list(nodes), self._owner),
        ).fetchall()
        return set(nodes) - {node for (node,) in rows}

    def add_events(self, node: int, first: int, frames: list[bytes]) -> None:
        """Store the frames of consecutive events of a response that this server generates."""
        last = first + len(frames) - 1
        self._execute(_ADD_EVENTS, (node, first, last, b"".join(frames), node, self._owner))

    def count_events(self, node: int) -> int:
        """Return the number of the event after the last one that is stored."""
        row = self._execute(
            "SELECT coalesce(max(last) + 1, 0) FROM kedge_server_events WHERE node = ?", (node,)
        ).fetchone()
        return row[0] if row else 0

    def read_events(self, node: int, start: int) -> StoredEvents | None:
        """Return the frames of a response from the event ``start`` on, or None if it was deleted."""
        rows = self._execute(_READ_EVENTS, (start, node)).fetchall()
        if not rows or rows[0][0] is None:
            return None
        frames: list[bytes] = []
        for _, first, chunk in rows:
            if chunk is not None:
                split = [frame + FRAME_END for frame in chunk.split(FRAME_END)[:-1]]
                frames += split[max(start - first, 0) :]
        return StoredEvents(rows[0][0], tuple(frames))


_QUEUED_JSON = encode(QUEUED_FIELDS)
