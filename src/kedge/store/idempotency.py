"""The `claims` table: a turn with an idempotency key runs once, across callers and processes.

The first caller acquires a claim with a lease, and renews the lease while the turn runs. Other callers
wait for the answer meanwhile. If the owner crashes, its lease expires, and the next caller continues
from the stored question. Leases use the database's clock, because the clocks of several machines may
differ by more than a lease.
"""

from kedge.database.transactions import Tx
from kedge.errors import KeyReused
from kedge.store.records import Claim


def acquire_claim(
    tx: Tx, number: int, key: str, *, request_hash: bytes, owner: str, lease: float
) -> Claim:
    """Claim the turn with this key, unless another caller runs it or it is done."""
    tx.run(
        "INSERT INTO claims (conversation, key, about, owner, lease_until) VALUES (?, ?, ?, '', 0) "
        "ON CONFLICT (conversation, key) DO NOTHING",
        (number, key, request_hash),
    )
    # One statement decides, so that exactly one of several concurrent callers becomes the owner.
    now = tx.dialect.now
    acquired = tx.run(
        f"UPDATE claims SET owner = ?, lease_until = {now} + ? WHERE conversation = ? AND key = ? "
        f"AND answer IS NULL AND lease_until <= {now} AND about = ?",
        (owner, lease, number, key, request_hash),
    )
    stored_hash, question, answer, until = tx.rows(
        "SELECT about, asked, answer, lease_until FROM claims WHERE conversation = ? AND key = ?",
        (number, key),
    )[0]
    if bytes(stored_hash) != request_hash:
        raise KeyReused(
            f"the key {key!r} belongs to another message of this conversation; use a new key"
        )
    return Claim(key, bool(acquired), question or 0, answer or 0, until)


def renew_claim(tx: Tx, number: int, key: str, *, owner: str, lease: float) -> bool:
    """Extend the lease of a claim, or end it if ``lease`` is 0; return whether ``owner`` still had it."""
    until = f"{tx.dialect.now} + ?" if lease else "?"
    update = (
        f"UPDATE claims SET lease_until = {until} WHERE conversation = ? AND key = ? AND owner = ?"
    )
    return bool(tx.run(update, (lease, number, key, owner)))


def record_question(tx: Tx, number: int, key: str, question: int) -> None:
    """Record the node of the question."""
    tx.run(
        "UPDATE claims SET asked = ? WHERE conversation = ? AND key = ?", (question, number, key)
    )


def record_answer(tx: Tx, number: int, key: str, answer: int) -> None:
    """Record the node of the answer, which completes the turn."""
    tx.run(
        "UPDATE claims SET answer = ?, lease_until = 0 WHERE conversation = ? AND key = ? "
        "AND answer IS NULL",
        (answer, number, key),
    )
