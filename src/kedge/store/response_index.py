"""The index of responses by their content, and the evidence about the memory of servers.

These are functions of a transaction; `kedge.incremental.StoreIndex` and `Store` call them. Scopes and
keys are stored with the namespace of the transaction, except for the default namespace.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.memory.object_claims import Claim
from kedge.store.database import Tx, marks, split_chunks
from kedge.text.json_text import decode

OBJECT_SECONDS = 90 * 24 * 3_600.0
"""Seconds for which the claim of a conversation object is retained after its last request."""
UNUSED_SECONDS = 3_600.0
"""Seconds after its last request from which an object that no line of history continues counts as unused."""
_INSERT_ENTRY = (
    "INSERT INTO response_index (scope, response_id, digest, entry, created_at) "
    "VALUES (?, ?, ?, ?, ?) ON CONFLICT (scope, response_id)"
)


def claim_object(
    tx: Tx, scope: str, object_id: str, last: str, *, owner: str, resumes: bool, now: float
) -> Claim:
    """Claim a conversation object that ends with a response; see `kedge.memory.object_claims`."""
    name = _qualify(tx, f"{scope} {object_id}")
    # One statement decides, so that exactly one of several concurrent callers gets the claim.
    claimed = tx.run(
        "UPDATE objects SET last = '', owner = ?, updated_at = ? WHERE name = ? "
        "AND ((last = ? AND last <> '') OR (last = '' AND owner = ?))",
        (owner, now, name, last, owner if resumes else ""),
    )
    if claimed:
        return "owned"
    added = tx.run(
        "INSERT INTO objects (name, last, owner, made, updated_at) VALUES (?, '', ?, ?, ?) "
        "ON CONFLICT (name) DO NOTHING",
        (name, owner, int(not last), now),
    )
    return "unknown" if added else "taken"


def list_unused_objects(tx: Tx, now: float) -> list[tuple[str, str]]:
    """Return the scope and id of each object that Kedge created and that no stored line of history continues.

    An object whose last request is recent is not listed, because its answer may not be stored yet.
    """
    rows = tx.rows(
        "SELECT name, last FROM objects WHERE made = 1 AND updated_at < ? ORDER BY updated_at",
        (now - UNUSED_SECONDS,),
    )
    states = tx.rows("SELECT memory FROM nodes WHERE memory LIKE ?", ('%"conversation_id"%',))
    forms = [decode(memory) for (memory,) in states]
    used = {(form["conversation_id"], form["previous_response_id"]) for form in forms}
    start = len(_qualify(tx, ""))
    names = [(name[start:], last) for name, last in rows if name == _qualify(tx, name[start:])]
    found = [(*name.rsplit(" ", 1), last) for name, last in names if "\n" not in name]
    return [(scope, object_id) for scope, object_id, last in found if (object_id, last) not in used]


def delete_old_objects(tx: Tx, now: float) -> None:
    """Delete the claims of objects that no request has used for a long time; the next one holds its answer back."""
    tx.run("DELETE FROM objects WHERE updated_at < ?", (now - OBJECT_SECONDS,))


def release_object(tx: Tx, scope: str, object_id: str, last: str, *, owner: str) -> None:
    """Record the last response in a conversation object that the owner has claimed."""
    name = _qualify(tx, f"{scope} {object_id}")
    tx.run("UPDATE objects SET last = ? WHERE name = ? AND owner = ?", (last, name, owner))


def _qualify(tx: Tx, name: str) -> str:
    """Return a scope or key with its namespace, which contains no line break."""
    return f"{tx.namespace}\n{name}" if tx.namespace else name


def find_entries(tx: Tx, scope: str, digests: Sequence[str]) -> list[str]:
    """Return the entries of a scope whose content has one of these digests."""
    found: list[str] = []
    for chunk in split_chunks(digests):
        rows = tx.rows(
            f"SELECT entry FROM response_index WHERE scope = ? AND digest IN ({marks(chunk)})",
            (_qualify(tx, scope), *chunk),
        )
        found += [entry for (entry,) in rows]
    return found


def select_entry(tx: Tx, scope: str, response_id: str) -> str | None:
    """Return the entry of a response, if there is one."""
    rows = tx.rows(
        "SELECT entry FROM response_index WHERE scope = ? AND response_id = ?",
        (_qualify(tx, scope), response_id),
    )
    return rows[0][0] if rows else None


def put_entry(
    tx: Tx, scope: str, response_id: str, digest: str, entry: str, created_at: float
) -> str | None:
    """Store the entry of a response, and return the one it replaces."""
    values = (_qualify(tx, scope), response_id, digest, entry, created_at)
    if tx.run(f"{_INSERT_ENTRY} DO NOTHING", values):
        return None
    older = select_entry(tx, scope, response_id)
    tx.run(
        f"{_INSERT_ENTRY} DO UPDATE SET "
        "digest = excluded.digest, entry = excluded.entry, created_at = excluded.created_at",
        values,
    )
    return older


def delete_entries(tx: Tx, scope: str, response_ids: Sequence[str]) -> None:
    """Delete the entries of responses."""
    tx.run_many(
        "DELETE FROM response_index WHERE scope = ? AND response_id = ?",
        [(_qualify(tx, scope), response_id) for response_id in response_ids],
    )


def prune_entries(tx: Tx, retained: int) -> None:
    """Delete all but the newest entries."""
    tx.run(
        "DELETE FROM response_index WHERE created_at <= (SELECT created_at FROM response_index "
        "ORDER BY created_at DESC LIMIT 1 OFFSET ?)",
        (retained,),
    )


def get_scope_key(tx: Tx) -> bytes:
    """Return the key with which credentials are hashed; it is created at its first use."""
    tx.run(
        "INSERT INTO scope_keys (name, value) VALUES ('scope', ?) ON CONFLICT (name) DO NOTHING",
        (secrets.token_bytes(32),),
    )
    return bytes(tx.rows("SELECT value FROM scope_keys WHERE name = 'scope'")[0][0])


def select_evidence(tx: Tx, key: str) -> dict[str, Any] | None:
    """Return the evidence about the memory of a server; see `kedge.memory.evidence`."""
    rows = tx.rows("SELECT form FROM evidence WHERE name = ?", (_qualify(tx, key),))
    return decode(rows[0][0]) if rows else None


def select_all_evidence(tx: Tx, limit: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the most recently changed evidence with its keys."""
    rows = tx.rows("SELECT name, form FROM evidence ORDER BY updated_at DESC")
    start = len(_qualify(tx, ""))
    found = [(name[start:], form) for name, form in rows if name == _qualify(tx, name[start:])]
    evidence = [(name, decode(form)) for name, form in found if "\n" not in name]
    return evidence[:limit]


def put_evidence(tx: Tx, key: str, form: Mapping[str, Any], now: float) -> None:
    """Store the evidence about the memory of a server, replacing the previous one."""
    tx.run(
        "INSERT INTO evidence (name, form, updated_at) VALUES (?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET form = excluded.form, updated_at = excluded.updated_at",
        (_qualify(tx, key), json.dumps(dict(form)), now),
    )
