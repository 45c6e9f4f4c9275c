"""Idempotency keys: the same turn asked twice is run once, whoever asks, from whatever process.

Who asks first takes a claim, with a lease that is renewed while the turn runs. Who asks meanwhile
waits for the answer. If the claimer dies, its lease runs out, and the next to ask goes on from where
it stood.
"""

from kedge.errors import KeyReused
from kedge.store.database import Tx
from kedge.store.records import Claim


def acquire_claim(
    tx: Tx, number: int, key: str, *, request_hash: bytes, owner: str, now: float, lease: float
) -> Claim:
    """Ask for a turn by its key: to be run, being run, or done."""
    tx.run(
        "INSERT INTO claims (conversation, key, about, owner, lease_until) VALUES (?, ?, ?, '', 0) "
        "ON CONFLICT (conversation, key) DO NOTHING",
        (number, key, request_hash),
    )
    # One statement decides, so that of many who ask at the same time one gets it.
    taken = tx.run(
        "UPDATE claims SET owner = ?, lease_until = ? WHERE conversation = ? AND key = ? "
        "AND answer IS NULL AND lease_until <= ? AND about = ?",
        (owner, now + lease, number, key, now, request_hash),
    )
    said, asked, answer, until = tx.rows(
        "SELECT about, asked, answer, lease_until FROM claims WHERE conversation = ? AND key = ?",
        (number, key),
    )[0]
    if bytes(said) != request_hash:
        raise KeyReused(
            f"the key {key!r} belongs to another message of this conversation; use a new key"
        )
    return Claim(key, bool(taken), asked or 0, answer or 0, until)


def renew_claim(tx: Tx, number: int, key: str, *, owner: str, until: float) -> bool:
    """Keep a claim; whether it was still ours."""
    kept = "UPDATE claims SET lease_until = ? WHERE conversation = ? AND key = ? AND owner = ?"
    return bool(tx.run(kept, (until, number, key, owner)))


def record_question(tx: Tx, number: int, key: str, question: int) -> None:
    """Write down which node holds the question."""
    tx.run(
        "UPDATE claims SET asked = ? WHERE conversation = ? AND key = ?", (question, number, key)
    )


def record_answer(tx: Tx, number: int, key: str, answer: int) -> None:
    """Write down which node holds the answer: the turn is done."""
    tx.run(
        "UPDATE claims SET answer = ?, lease_until = 0 WHERE conversation = ? AND key = ? "
        "AND answer IS NULL",
        (answer, number, key),
    )
