"""Locks of transactions against others that write at the same time; a single writer needs none."""

from kedge.database.transactions import Tx


def lock_tree(tx: Tx, tree: int) -> None:
    """Block changes of a tree by others until the end of the transaction.

    Its root is locked before its conversations and other nodes, in all transactions, which avoids deadlocks.
    """
    if tx.dialect.has_concurrent_writers:
        tx.rows("SELECT id FROM nodes WHERE id = ? FOR UPDATE", (tree,))


def lock_tree_shared(tx: Tx, tree: int) -> None:
    """Wait for a transaction that blocks changes of a tree, and block new ones."""
    if tx.dialect.has_concurrent_writers:
        tx.rows("SELECT id FROM nodes WHERE id = ? FOR KEY SHARE", (tree,))


def lock_names(tx: Tx) -> None:
    """Wait for other transactions with this lock, which create the tables or a row that may exist once."""
    if tx.dialect.has_concurrent_writers:
        tx.run("SELECT pg_advisory_xact_lock(5461729823)")


def lock_nodes(tx: Tx) -> None:
    """Block the insertion of nodes by others until the end of the transaction."""
    if tx.dialect.has_concurrent_writers:
        tx.run("LOCK TABLE nodes IN SHARE ROW EXCLUSIVE MODE")


def shorten_lock_wait(tx: Tx) -> None:
    """Let the rest of a transaction fail soon if it waits for a lock."""
    if tx.dialect.has_concurrent_writers:
        tx.run("SET LOCAL lock_timeout = 200")
