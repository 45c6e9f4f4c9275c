"""Stored responses: begun, settled, found, deleted, expired.

A response is written down as ``in_progress`` before its model runs and settled in one transaction
afterwards, so a crash leaves either a finished response or one that the next start marks failed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kedge.server.errors import SERVER_FAILED
from kedge.server.ids import key_of_response
from kedge.server.nodes import Nodes
from kedge.server.sqlite import Database
from kedge.server.wire import decode, encode

Clock = Callable[[], float]

PURGE_BATCH = 500


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored response: its node, its status and its resource without the output."""

    node: int
    status: str
    head: bytes


class Responses:
    """The responses of the database; one past its retention is as good as deleted."""

    def __init__(self, database: Database, nodes: Nodes, clock: Clock, retention: float) -> None:
        self._database = database
        self._run = database.run
        self._nodes = nodes
        self._clock = clock
        self._retention = retention

    def find(self, id: str) -> Stored | None:
        """Find a response by its id, unless it has expired."""
        key = key_of_response(id)
        if key is None:
            return None
        row = self._run(
            "SELECT r.node, r.status, r.head FROM nodes n JOIN responses r ON r.node = n.id "
            "WHERE n.key = ? AND r.expires_at > ?",
            (key, self._clock()),
        ).fetchone()
        return row and Stored(*row)

    def begin(
        self,
        key: str,
        parent: int | None,
        head: bytes,
        input: bytes,
        *,
        barrier: bool,
        conversation: str | None,
    ) -> int:
        """Write a response down as in progress, before its model runs."""
        with self._database.transaction():
            node = self._nodes.add(key, parent, input, barrier=barrier)
            self._run(
                "INSERT INTO responses (node, status, expires_at, conversation, head) "
                "VALUES (?, 'in_progress', ?, ?, ?)",
                (node, self._clock() + self._retention, conversation, head),
            )
        return node

    def settle(
        self,
        node: int,
        status: str,
        head: bytes,
        output: bytes,
        *,
        barrier: bool,
        tokens: int,
        conversation: str | None,
    ) -> bool:
        """Finish a response: its output, and its items' place in the conversation, at once.

        Says whether there was anything to finish: it may have been deleted in the meantime.
        """
        with self._database.transaction():
            found = self._run(
                "UPDATE responses SET status = ?, head = ? WHERE node = ?", (status, head, node)
            )
            if not found.rowcount:
                return False
            self._nodes.complete(node, output, barrier=barrier, tokens=tokens)
            if conversation is not None:
                self._run("UPDATE conversations SET node = ? WHERE id = ?", (node, conversation))
        return True

    def fail(self, node: int, status: str, head: bytes) -> None:
        """Settle a response that came to nothing."""
        self._run("UPDATE responses SET status = ?, head = ? WHERE node = ?", (status, head, node))

    def delete(self, id: str) -> bool:
        """Delete a response; its items stay for as long as a child or a conversation has them."""
        stored = self.find(id)
        if stored is None:
            return False
        self._remove([stored.node])
        self._database.scrub()
        return True

    def forget(self) -> None:
        """Delete every response at once."""
        self._remove([node for (node,) in self._run("SELECT node FROM responses").fetchall()])
        self._database.scrub()

    def purge(self) -> int:
        """Delete one batch of expired responses; say how many there were."""
        expired = self._run(
            "SELECT node FROM responses WHERE expires_at <= ? LIMIT ?", (self._clock(), PURGE_BATCH)
        ).fetchall()
        self._remove([node for (node,) in expired])
        if expired:
            self._database.scrub()
        return len(expired)

    def fail_unfinished(self) -> int:
        """Mark as failed what an earlier process left in progress."""
        rows = self._run("SELECT node, head FROM responses WHERE status = 'in_progress'").fetchall()
        with self._database.transaction():
            for node, head in rows:
                self.fail(node, "failed", failed_head(head))
        return len(rows)

    def _remove(self, nodes: list[int]) -> None:
        with self._database.transaction():
            for node in nodes:
                (conversation,) = self._run(
                    "DELETE FROM responses WHERE node = ? RETURNING conversation", (node,)
                ).fetchone()
                self._nodes.release(node, cut=conversation is None)


def failed_head(head: bytes, status: str = "failed") -> bytes:
    """Rewrite the resource of a response that did not finish."""
    resource = decode(head)
    resource["status"] = status
    if status == "failed":
        resource["error"] = {"code": "server_error", "message": SERVER_FAILED().message}
    return encode(resource)
