"""The schema of the store: created in an empty database, upgraded from an older one, or rejected."""

from kedge.database.schema import Schema, WrongSchema, read_statements
from kedge.database.transactions import Tx
from kedge.errors import CannotOpenStore
from kedge.store.locks import lock_names

SCHEMA_VERSION = 25


def create_schema(tx: Tx) -> None:
    """Create the tables of the current version in an empty database."""
    tx.run("CREATE TABLE kedge_schema (version INTEGER NOT NULL)")
    tx.run("INSERT INTO kedge_schema (version) VALUES (0)")
    for statement in read_statements("kedge.store", tx.dialect.name):
        tx.run(statement)


SCHEMA = Schema(
    SCHEMA_VERSION,
    create_schema,
    way_out="export its conversations with the version that wrote it ('kedge export'), and import them into a new "
    "store ('kedge import')",
)


def read_schema_version(tx: Tx) -> int:
    """Return the version of the schema; 0 for an empty database."""
    names = {name for (name,) in tx.rows(tx.dialect.list_tables)}
    if "kedge_schema" not in names:
        if names:
            raise CannotOpenStore(
                "this database has tables that are not of a Kedge store; use another database"
            )
        return 0
    return int(tx.rows("SELECT version FROM kedge_schema")[0][0])


def needs_upgrade(tx: Tx, name: str) -> bool:
    """Return whether the schema is not the current one; otherwise opening a database does not write to it.

    Raises:
        CannotOpenStore: The schema cannot be upgraded.
    """
    try:
        return bool(SCHEMA.list_steps(read_schema_version(tx), name))
    except WrongSchema as error:
        raise CannotOpenStore(str(error)) from None


def migrate(tx: Tx, name: str) -> int:
    """Create or upgrade the schema in one transaction, and return the number of steps."""
    tx.allow_long_statements()
    lock_names(tx)
    count = SCHEMA.upgrade(tx, read_schema_version(tx), name)
    tx.run("UPDATE kedge_schema SET version = ?", (SCHEMA.version,))
    return count
