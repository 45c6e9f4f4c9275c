"""Store: conversations, their blocks and their responses, on SQLite or PostgreSQL."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

from kedge.errors import StoreBusy, StoreError, StoreReadOnly, StoreUnreachable
from kedge.events import Usage
from kedge.planning import AnchorRecord
from kedge.store import conversations, delete, idempotency, import_export, responses, search, verify
from kedge.store.conversation_tree import Telemetry, TreeStore
from kedge.store.database import Tx
from kedge.store.records import (
    Claim,
    ConversationRow,
    Damage,
    Hit,
    ResponseRow,
    StoredExchange,
    validate_text,
)

CHUNK_SIZE = 500
"""How many digests are looked up at once."""


class Store(TreeStore):
    """Where conversations live.

    ``keep_bodies`` keeps requests and replies as they went over the wire, each up to ``body_bytes``.
    """

    # Responses

    async def responses(
        self,
        conversation: ConversationRow | None = None,
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> list[ResponseRow]:
        """Responses, in the order in which they came; of one conversation, or of all."""
        conditions, values = ["1 = 1"], list[Any]()
        if conversation:
            conditions.append("r.conversation = ?")
            values.append(conversation.number)
        if since is not None:
            conditions.append("r.created_at >= ?")
            values.append(since)
        if until is not None:
            conditions.append("r.created_at < ?")
            values.append(until)
        where = f"WHERE {' AND '.join(conditions)}"
        return await self.database.read(lambda tx: responses.select_responses(tx, where, values))

    async def usage(self, conversation: ConversationRow, node: int) -> Usage | None:
        """The tokens of the response that made a node, if the server counted them."""
        query = (
            "SELECT r.input_tokens, r.cached_tokens, r.output_tokens, r.reasoning_tokens "
            "FROM responses r JOIN nodes n ON n.id = r.node WHERE r.node = ? AND n.tree = ?"
        )
        rows = await self.database.read(lambda tx: tx.rows(query, (node, conversation.tree)))
        if not rows or rows[0][0] is None:
            return None
        sent, cached, output, reasoning = rows[0]
        return Usage(sent, cached, output, reasoning, sent + output)

    async def candidates(self, scope: str, digests: Sequence[str]) -> list[AnchorRecord]:
        """The finished responses of a scope that remember exactly what one of these digests covers.

        Give the digests of the longest prefixes first: the search ends with the first that are found.
        """
        for start in range(0, len(digests), CHUNK_SIZE):
            chunk = [responses.pack_digest(each) for each in digests[start : start + CHUNK_SIZE]]
            found = await self.database.read(
                lambda tx, chunk=chunk: self._select_anchors(tx, scope, chunk)
            )
            if found:
                return found
        return []

    async def mark_lost(self, record: AnchorRecord, reason: str) -> bool:
        """Write down, once, that the provider no longer has this response; whether that is news."""
        scope, digest = await self._intern_scope(record.scope), responses.pack_digest(record.digest)
        lost = (
            "UPDATE responses SET status = 'lost', lost_reason = ? WHERE digest = ? AND scope = ? "
            "AND provider_response_id = ? AND status = 'completed'"
        )
        values = (reason, digest, scope, record.response_id)
        return await self.database.write(lambda tx: tx.run(lost, values)) > 0

    # Idempotency

    async def claim(
        self, conversation: ConversationRow, key: str, *, about: bytes, owner: str, lease: float
    ) -> Claim:
        """Ask for the turn with this key: see ``Claim``. ``about`` is a hash of what is asked."""
        key = validate_text(key, "key")
        return await self.database.write(
            lambda tx: idempotency.acquire_claim(
                tx,
                conversation.number,
                key,
                request_hash=about,
                owner=owner,
                now=self.clock(),
                lease=lease,
            )
        )

    async def renew(
        self, conversation: ConversationRow, key: str, *, owner: str, lease: float
    ) -> bool:
        """Keep a claim for ``lease`` more seconds (0 lets it go); whether it was still ours."""
        until = self.clock() + lease if lease else 0.0
        return await self.database.write(
            lambda tx: idempotency.renew_claim(
                tx, conversation.number, key, owner=owner, until=until
            )
        )

    async def settle(self, conversation: ConversationRow, key: str, answer: int) -> None:
        """Write down that this node is the answer to the turn with this key."""
        await self.database.write(
            lambda tx: idempotency.record_answer(tx, conversation.number, key, answer)
        )

    # Finding, carrying, deleting

    async def search(self, words: str, *, limit: int = 20) -> list[Hit]:
        """The blocks that hold all of these words, the newest first."""
        after = await self.database.read(search.get_index_position)
        with suppress(StoreReadOnly):  # then what is indexed can be found
            while after is not None:
                after = await self.database.write(
                    lambda tx, after=after: search.index_batch(tx, after)
                )
        return await self.database.read(lambda tx: search.find_blocks(tx, words, limit))

    async def export(self, conversation: ConversationRow) -> str:
        """A conversation as lines of JSON: its tree, its anchors, everything."""
        lines = await self.database.read(
            lambda tx: import_export.export_lines(
                tx, conversations.select_conversation(tx, conversation.id)
            )
        )
        return "".join(f"{line}\n" for line in lines)

    async def import_(self, lines: str | Iterable[str]) -> list[ConversationRow]:
        """Make the conversations that such lines tell of, all or none."""
        # Not splitlines: JSON may hold characters that it takes for the end of a line.
        given = lines.split("\n") if isinstance(lines, str) else list(lines)

        def work(tx: Tx) -> list[ConversationRow]:
            made = import_export.import_lines(tx, given)
            return [conversations.select_conversation(tx, name) for name in made]

        return await self.database.write(work)

    async def delete(self, name: str) -> None:
        """Delete a conversation for good: its rows, and the blocks that no other one uses."""
        await self.database.write(lambda tx: delete.delete_conversation(tx, name))
        await self.database.reclaim()

    async def gc(self) -> int:
        """Give back the space of what was deleted; how many blocks were left over.

        Only what was deleted goes: branches that lost a race, were undone or regenerated are history.
        """
        swept = await self.database.write(delete.delete_orphans)
        await self.database.reclaim(vacuum=True)
        return swept

    async def verify(self) -> list[Damage]:
        """Derive every hash and every digest again; every place where the store is damaged."""
        damage = await self._run_check(verify.check_database)
        ((newest,),) = await self.database.read(lambda tx: tx.rows("SELECT MAX(id) FROM blocks"))
        for after in range(0, newest or 0, verify.BATCH_SIZE):
            damage += await self._run_check(verify.check_blocks, after)
        damage += await self._run_check(verify.check_links)
        for tree in await self.database.read(verify.list_trees):
            damage += await self._run_check(verify.check_tree, tree)
        return damage

    async def _run_check(self, check: Callable[..., list[Damage]], *values: int) -> list[Damage]:
        """What a check finds; if what it reads cannot even be read, that."""
        try:
            return await self.database.read(lambda tx: check(tx, *values))
        except (StoreBusy, StoreUnreachable):
            raise
        except StoreError as error:
            return [Damage(" ".join((check.__name__, *map(str, values))), str(error))]

    # The rest

    async def note(self, conversation: ConversationRow, node: int, accounts: Telemetry) -> None:
        """Write down what happened at a node."""
        named = [(each, await self._intern_scope(each.scope)) for each in accounts.incidents]
        await self.database.write(
            lambda tx: self._insert_telemetry(tx, accounts, named, conversation.number, node)
        )

    async def exchanges(self, conversation: ConversationRow) -> list[StoredExchange]:
        """The requests and replies that were kept, in order; see ``keep_bodies``."""
        query = (
            "SELECT e.request, e.reply, e.status, e.created_at, e.node FROM exchanges e "
            "WHERE e.conversation = ? ORDER BY e.id"
        )
        rows = await self.database.read(lambda tx: tx.rows(query, (conversation.number,)))
        return [
            StoredExchange(bytes(request), bytes(reply), status, at, node, conversation.id)
            for request, reply, status, at, node in rows
        ]

    async def aclose(self) -> None:
        """Let go of threads and connections."""
        await self.database.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _select_anchors(
        self, tx: Tx, scope: str, digests: Sequence[bytes | None]
    ) -> list[AnchorRecord]:
        marks = ", ".join("?" * len(digests))
        rows = tx.rows(
            f"SELECT {responses.ANCHOR_COLUMNS} FROM responses r JOIN scopes s ON s.number = r.scope "
            f"WHERE r.digest IN ({marks}) AND s.name = ? AND r.status = 'completed'",
            (*digests, scope),
        )
        return [responses.anchor_from_row(row, {row[1]: scope}) for row in rows]
