"""The schema of the store: created in an empty database, upgraded from an older one, or rejected."""

from kedge.database.responses import SERVER_PREFIX, create_response_tables, use_practice_tables
from kedge.database.schema import Schema, WrongSchema, read_statements
from kedge.database.transactions import Tx
from kedge.errors import CannotOpenStore

SCHEMA_VERSION = 26


def create_schema(tx: Tx) -> None:
    """Create the tables of the current version in an empty database."""
    for statement in read_statements("kedge.store", f"schema.{tx.dialect.name}.sql"):
        tx.run(statement)
    create_response_tables(tx, use_practice_tables)


SCHEMA = Schema(
    "kedge_schema",
    SCHEMA_VERSION,
    create_schema,
    way_out="export its conversations with the version that wrote it ('kedge export'), and import them into a new "
    "store ('kedge import')",
)


def read_schema_version(tx: Tx) -> int:
    """Return the version of the schema; 0 for a database without tables, except those of a server.

    Raises:
        CannotOpenStore: There are other tables.
    """
    version = SCHEMA.read_version(tx)
    names = [name for (name,) in tx.rows(tx.dialect.list_tables)]
    if not version and any(not name.startswith(SERVER_PREFIX) for name in names):
        raise CannotOpenStore(
            "this database has tables that are not of a Kedge store; use another database"
        )
    return version


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
    return SCHEMA.upgrade(tx, name)
