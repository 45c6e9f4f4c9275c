"""Migrations: numbered SQL files, each with its reason, applied once and in order.

An older database is upgraded when it is opened, in one transaction. A newer one is rejected, because
this version of Kedge could damage it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kedge.errors import BrokenInstallation, CannotOpenStore
from kedge.store import nodes, responses
from kedge.store.database import Dialect, Tx, lock_names
from kedge.store.response_sums import add_all

_FILE = re.compile(r"(?P<number>\d{4})_(?P<name>\w+)(?:\.(?P<dialect>\w+))?\.sql")

_AFTERWARDS: dict[int, Callable[[Tx], None]] = {
    4: nodes.fill_checksums,
    13: add_all,
    16: responses.fill_checksums,
}
"""Functions for changes that SQL cannot compute, by the number of their migration."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from an older schema to a newer one."""

    number: int
    name: str
    script: str

    def statements(self, dialect: Dialect) -> list[str]:
        """Return the statements for a database."""
        script = re.sub(r"^--.*$", "", self.script, flags=re.MULTILINE)
        for word, meaning in dialect.types.items():
            script = script.replace(f"{{{word}}}", meaning)
        return [each.strip() for each in script.split(";") if each.strip()]


@cache
def load_migrations(dialect: str) -> tuple[Migration, ...]:
    """Return every migration for a database, in order."""
    found: list[Migration] = []
    for file in (files("kedge.store") / "migrations").iterdir():
        match = _FILE.fullmatch(file.name)
        if match and match["dialect"] in (None, dialect):
            found.append(Migration(int(match["number"]), match["name"], file.read_text("utf-8")))
    found.sort(key=lambda each: each.number)
    if [each.number for each in found] != list(range(1, len(found) + 1)):
        raise BrokenInstallation("migrations of kedge.store are missing; reinstall Kedge")
    return tuple(found)


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


def is_current(tx: Tx) -> bool:
    """Return whether the schema is the newest one; then opening a database does not write to it."""
    return read_schema_version(tx) == len(load_migrations(tx.dialect.name))


def migrate(tx: Tx, target: int | None = None) -> int:
    """Upgrade the schema, and return the number of migrations applied."""
    tx.allow_long_statements()
    lock_names(tx)
    version = read_schema_version(tx)
    known = load_migrations(tx.dialect.name)
    if version > len(known):
        raise CannotOpenStore(
            f"this store was written by a newer Kedge (its schema is {version}, this version supports "
            f"{len(known)}); upgrade Kedge, or open another store"
        )
    if version == 0:
        tx.run("CREATE TABLE kedge_schema (version INTEGER NOT NULL)")
        tx.run("INSERT INTO kedge_schema (version) VALUES (0)")
    steps = known[version:target]
    for migration in steps:
        for statement in migration.statements(tx.dialect):
            tx.run(statement)
        if migration.number in _AFTERWARDS:
            _AFTERWARDS[migration.number](tx)
        tx.run("UPDATE kedge_schema SET version = ?", (migration.number,))
    return len(steps)
