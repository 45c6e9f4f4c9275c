"""Migrations: numbered files of SQL, each of which says why, applied once and in order.

An older database is brought up to date when it is opened, in one transaction. A newer one is refused:
what this Kedge does not know it could damage.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kedge.errors import BrokenInstallation, CannotOpenStore
from kedge.store.database import Dialect, Tx
from kedge.store.nodes import fill_checksums

_FILE = re.compile(r"(?P<number>\d{4})_(?P<name>\w+)(?:\.(?P<dialect>\w+))?\.sql")

_AFTERWARDS: dict[int, Callable[[Tx], None]] = {4: fill_checksums}
"""What SQL cannot compute, by the number of the migration that needs it."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from an older schema to a newer one."""

    number: int
    name: str
    script: str

    def statements(self, dialect: Dialect) -> list[str]:
        """The statements, in the words of this database."""
        script = re.sub(r"^--.*$", "", self.script, flags=re.MULTILINE)
        for word, meaning in dialect.types.items():
            script = script.replace(f"{{{word}}}", meaning)
        return [each.strip() for each in script.split(";") if each.strip()]


@cache
def load_migrations(dialect: str) -> tuple[Migration, ...]:
    """Every migration for this database, in order."""
    found: list[Migration] = []
    for file in (files("kedge.store") / "migrations").iterdir():
        named = _FILE.fullmatch(file.name)
        if named and named["dialect"] in (None, dialect):
            found.append(Migration(int(named["number"]), named["name"], file.read_text("utf-8")))
    found.sort(key=lambda each: each.number)
    if [each.number for each in found] != list(range(1, len(found) + 1)):
        raise BrokenInstallation("the migrations of kedge.store are not all there; reinstall Kedge")
    return tuple(found)


def read_schema_version(tx: Tx) -> int:
    """The version of the schema that is there; 0 for an empty database."""
    names = {name for (name,) in tx.rows(tx.dialect.list_tables)}
    if "kedge_schema" not in names:
        if names:
            raise CannotOpenStore("this database holds something else than a store of Kedge")
        return 0
    return int(tx.rows("SELECT version FROM kedge_schema")[0][0])


def migrate(tx: Tx, target: int | None = None) -> int:
    """Bring the schema up to date; how many steps that took."""
    if tx.dialect.lock_schema:
        tx.run(tx.dialect.lock_schema)
    version = read_schema_version(tx)
    known = load_migrations(tx.dialect.name)
    if version > len(known):
        raise CannotOpenStore(
            f"this store was written by a newer Kedge (its schema is {version}, this one knows "
            f"{len(known)}); upgrade Kedge, or open a store of its own"
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
