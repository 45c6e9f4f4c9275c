"""The `claims` table: a message with an idempotency key is answered once, across callers and processes.

The first caller acquires a claim with a lease, and renews the lease during the run. Other callers
wait for the answer meanwhile. If the owner crashes, its lease expires, and the next caller continues
from the stored question. Leases use the database's clock, because the clocks of several machines may
differ by more than a lease.
"""

from kedge.errors import KeyReused
from kedge.store.database.transactions import Tx
from kedge.store.nodes import get_node
from kedge.store.records import Claim, ConversationRow, validate_name


def acquire_claim(
    tx: Tx,
    conversation: ConversationRow,
    key: str,
    *,
    request_hash: bytes,
    owner: str,
    lease: float,
) -> Claim:
    """Claim the message with an idempotency key, unless another caller answers it or it is done."""
    number = conversation.number
    key = validate_name(key, "key")
    tx.run(
        "INSERT INTO claims (conversation, key, request_hash, owner, lease_until) "
        "VALUES (?, ?, ?, '', 0) ON CONFLICT (conversation, key) DO NOTHING",
        (number, key, request_hash),
    )
    # One statement decides, so that exactly one of several concurrent callers becomes the owner.
    now = tx.dialect.now
    acquired = tx.run(
        f"UPDATE claims SET owner = ?, lease_until = {now} + ? WHERE conversation = ? AND key = ? "
        f"AND answer IS NULL AND lease_until <= {now} AND request_hash = ?",
        (owner, lease, number, key, request_hash),
    )
    rows = tx.rows(
        "SELECT request_hash, question, answer, lease_until FROM claims "
        "WHERE conversation = ? AND key = ?",
        (number, key),
    )
    if not rows:  # its owner has released it meanwhile, without a question
        return acquire_claim(
            tx, conversation, key, request_hash=request_hash, owner=owner, lease=lease
        )
    stored_hash, question, answer, until = rows[0]
    if bytes(stored_hash) != request_hash:
        raise KeyReused(
            f"the key {key!r} belongs to another message of this conversation; use a new key"
        )
    return Claim(key, bool(acquired), question or 0, answer or 0, until)


def find_claim(tx: Tx, conversation: ConversationRow, key: str) -> Claim | None:
    """Return the claim on the message with an idempotency key, if the key was used; the caller does not own it."""
    rows = tx.rows(
        "SELECT question, answer, lease_until FROM claims WHERE conversation = ? AND key = ?",
        (conversation.number, validate_name(key, "key")),
    )
    if not rows:
        return None
    question, answer, until = rows[0]
    return Claim(key, is_owner=False, question=question or 0, answer=answer or 0, lease_until=until)


def renew_claim(
    tx: Tx, conversation: ConversationRow, key: str, *, owner: str, lease: float
) -> bool:
    """Extend the claim of ``owner`` by ``lease`` seconds from now, or release it with 0.

    A released claim without a stored question is deleted: nothing was sent, and its key may be used for another
    message.
    """
    claimed = (conversation.number, key, owner)
    if not lease:
        unasked = (
            "DELETE FROM claims WHERE conversation = ? AND key = ? AND owner = ? "
            "AND question IS NULL AND answer IS NULL"
        )
        if tx.run(unasked, claimed):
            return True
        until = "?"  # 0
    else:
        until = f"{tx.dialect.now} + ?"
    update = (
        f"UPDATE claims SET lease_until = {until} WHERE conversation = ? AND key = ? AND owner = ?"
    )
    return bool(tx.run(update, (lease, *claimed)))


def record_question(tx: Tx, number: int, key: str, question: int) -> None:
    """Record the node of the question."""
    tx.run(
        "UPDATE claims SET question = ? WHERE conversation = ? AND key = ?", (question, number, key)
    )


def record_answer(tx: Tx, conversation: ConversationRow, key: str, answer: int) -> None:
    """Record which node is the answer to the message with this key, which completes it."""
    get_node(tx, conversation, answer)
    tx.run(
        "UPDATE claims SET answer = ?, lease_until = 0 WHERE conversation = ? AND key = ? "
        "AND answer IS NULL",
        (answer, conversation.number, key),
    )
