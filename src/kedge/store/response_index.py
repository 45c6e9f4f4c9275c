"""The index of responses by their content, and the evidence about the memory of servers.

These are functions of a transaction; `kedge.chaining.StoreIndex` and `Store` call them. Scopes and
keys are stored with the namespace of the transaction, except for the default namespace.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kedge._internal.json_text import decode
from kedge.evidence.object_claims import Claim, UnusedObject
from kedge.planning.anchor_index import qualify_scope
from kedge.store.database.transactions import Tx

FOREIGN_SECONDS = 90 * 24 * 3_600.0
"""Seconds for which the claim of a conversation object that others made is retained after its last request."""
CLAIM_SECONDS = 24 * 3_600.0
"""Seconds after its last request until an object may be in use although no stored line of history continues it."""
MAX_UNUSED_OBJECTS = 10_000
"""The number of unused objects that are retained until they are deleted at their servers."""
_INSERT_ENTRY = (
    "INSERT INTO response_index (scope, response_id, digest, entry, created_at) "
    "VALUES (?, ?, ?, ?, ?) ON CONFLICT (scope, response_id)"
)


def claim_object(tx: Tx, scope: str, object_id: str, last: str, *, owner: str) -> Claim:
    """Claim a conversation object of a server for a request; see `kedge.evidence.object_claims`."""
    name = _qualify(tx, f"{scope} {object_id}")
    now = tx.clock()
    # One statement decides, so that exactly one of several concurrent callers gets the claim.
    claimed = tx.run(
        "UPDATE objects SET last = '', owner = ?, updated_at = ? "
        "WHERE name = ? AND last = ? AND last <> ''",
        (owner, now, name, last),
    )
    if claimed:
        return "owned"
    added = tx.run(
        "INSERT INTO objects (name, last, owner, made, updated_at) VALUES (?, '', ?, ?, ?) "
        "ON CONFLICT (name) DO NOTHING",
        (name, owner, int(not last), now),
    )
    if added:
        return "unknown"
    return "taken"


def release_object(tx: Tx, scope: str, object_id: str, last: str, *, owner: str) -> None:
    """Record the last response in a conversation object that ``owner`` has claimed."""
    name = _qualify(tx, f"{scope} {object_id}")
    tx.run("UPDATE objects SET last = ? WHERE name = ? AND owner = ?", (last, name, owner))


def disown_objects(tx: Tx, memories: Iterable[str | None]) -> None:
    """Let the objects of deleted nodes count as unused now, except for objects in use."""
    ends = _read_ends(memories)
    if not ends:
        return
    rows = tx.rows("SELECT name, last FROM objects WHERE last <> ''")
    disowned = [(name, last) for name, last in rows if (_read_name(name).id, last) in ends]
    tx.run_many("UPDATE objects SET owner = '' WHERE name = ? AND last = ?", disowned)


def list_unused_objects(tx: Tx) -> list[UnusedObject]:
    """Return the conversation objects that Kedge made and that no stored line of history continues.

    An object whose last request is less than a day old may be in use, unless its conversation was deleted.
    """
    return [
        unused
        for unused in _select_unused(tx)
        if unused.name == _qualify(tx, f"{unused.scope} {unused.id}")
    ]


def _select_unused(tx: Tx) -> list[UnusedObject]:
    """Return the unused objects of all namespaces, the oldest first."""
    rows = tx.rows(
        "SELECT name, last FROM objects WHERE made = 1 AND (owner = '' OR updated_at < ?) "
        "ORDER BY updated_at, name",
        (tx.clock() - CLAIM_SECONDS,),
    )
    if not rows:
        return []
    states = tx.rows("SELECT memory FROM nodes WHERE memory LIKE ?", ('%"conversation_id"%',))
    used = _read_ends(memory for (memory,) in states)
    objects = [(_read_name(name), last) for name, last in rows]
    return [each for each, last in objects if (each.id, last) not in used]


def take_unused_objects(tx: Tx, scope: str, limit: int) -> list[UnusedObject]:
    """Return unused objects of a server to delete there; from now on they cannot be claimed."""
    taken = [unused for unused in list_unused_objects(tx) if unused.scope == scope][:limit]
    tx.run_many(
        "UPDATE objects SET last = '', owner = '' WHERE name = ?",
        [(unused.name,) for unused in taken],
    )
    return taken


def delete_object(tx: Tx, unused: UnusedObject) -> None:
    """Delete the claim of an unused object that its server has deleted."""
    tx.run("DELETE FROM objects WHERE name = ? AND last = '' AND owner = ''", (unused.name,))


def delete_old_objects(tx: Tx) -> None:
    """Delete the claims of objects that others made and no request used for long, and of too many unused ones."""
    oldest = tx.clock() - FOREIGN_SECONDS
    tx.run("DELETE FROM objects WHERE made = 0 AND updated_at < ?", (oldest,))
    surplus = _select_unused(tx)[:-MAX_UNUSED_OBJECTS]
    tx.run_many("DELETE FROM objects WHERE name = ?", [(unused.name,) for unused in surplus])


def _read_ends(memories: Iterable[str | None]) -> set[tuple[str, str]]:
    """Return the object and its last response in each state of a node that has an object."""
    forms = [decode(memory) for memory in memories if memory]
    return {
        (form["conversation_id"], form.get("previous_response_id"))
        for form in forms
        if "conversation_id" in form
    }


def _read_name(name: str) -> UnusedObject:
    scope, _, object_id = name.rpartition("\n")[2].rpartition(" ")
    return UnusedObject(name, scope, object_id)


def _qualify(tx: Tx, name: str) -> str:
    """Return a scope or key with the namespace of the transaction."""
    return qualify_scope(tx.namespace, name)


def find_entries(tx: Tx, scope: str, digests: Sequence[str]) -> list[str]:
    """Return the entries of a scope whose content has one of these digests."""
    query = "SELECT entry FROM response_index WHERE digest IN ({}) AND scope = ?"
    return [entry for (entry,) in tx.rows_among(query, digests, _qualify(tx, scope))]


def select_entry(tx: Tx, scope: str, response_id: str) -> str | None:
    """Return the entry of a response, if there is one."""
    rows = tx.rows(
        "SELECT entry FROM response_index WHERE scope = ? AND response_id = ?",
        (_qualify(tx, scope), response_id),
    )
    for (entry,) in rows:
        return entry
    return None


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
    ((key,),) = tx.rows("SELECT value FROM scope_keys WHERE name = 'scope'")
    return bytes(key)


def select_evidence(tx: Tx, key: str) -> dict[str, Any] | None:
    """Return the evidence about the memory of a server; see `kedge.evidence.server_evidence`."""
    rows = tx.rows("SELECT form FROM evidence WHERE name = ?", (_qualify(tx, key),))
    for (form,) in rows:
        return decode(form)
    return None


def select_all_evidence(tx: Tx, limit: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the most recently changed evidence with its keys."""
    rows = tx.rows("SELECT name, form FROM evidence ORDER BY updated_at DESC")
    prefix = _qualify(tx, "")
    own = [(name.removeprefix(prefix), form) for name, form in rows if name.startswith(prefix)]
    return [(name, decode(form)) for name, form in own if "\n" not in name][:limit]


def put_evidence(tx: Tx, key: str, form: Mapping[str, Any]) -> None:
    """Store the evidence about the memory of a server, replacing the previous one."""
    tx.run(
        "INSERT INTO evidence (name, form, updated_at) VALUES (?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET form = excluded.form, updated_at = excluded.updated_at",
        (_qualify(tx, key), json.dumps(dict(form)), tx.clock()),
    )
