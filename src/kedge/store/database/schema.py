"""Schemas: the number of the current one, how it is created, and the steps to it from older ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from msgspec import Struct

from kedge.store.database.transactions import Tx

_Change = Callable[[Tx], None]
_LOCK = "SELECT pg_advisory_xact_lock(5461731, hashtext(current_schema()))"


class WrongSchema(Exception):
    """A database has a schema that this version of Kedge cannot use.

    Args:
        problem: What is wrong with which database.
        advice: What to do.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem = problem
        self.advice = advice


class Schema(Struct, frozen=True):
    """A numbered schema. Its functions run in the transaction of the upgrade, which is complete or undone.

    Until a version is released, the schema is changed where it is created, and its number is raised.
    """

    table: str
    """The table with the number; a database may have several schemas."""
    version: int
    create: _Change
    steps: Mapping[int, _Change] = {}
    """The change from each older schema to the next one."""
    way_out: str = ""
    """What to do with a database that is older than the first step."""

    def read_version(self, tx: Tx) -> int:
        """Return the number of the schema in a database; 0 if there is none."""
        if (self.table,) not in tx.rows(tx.dialect.list_tables):
            return 0
        return int(tx.rows(f"SELECT version FROM {self.table}")[0][0])

    def list_steps(self, version: int, name: str) -> Sequence[_Change]:
        """Return the functions that change a schema (0 for none) into the current one.

        Raises:
            WrongSchema: The schema is newer than this program, or older than the first step.
        """
        if not version:
            return [self._create]
        if version > self.version:
            raise WrongSchema(
                f"{name} was written by a newer version of Kedge (schema {version}, this version supports "
                f"{self.version})",
                "upgrade Kedge, or use another database",
            )
        numbers = range(version, self.version)
        if any(number not in self.steps for number in numbers):
            raise WrongSchema(
                f"{name} was written by an older version of Kedge (schema {version}, this version needs "
                f"{self.version})",
                self.way_out,
            )
        return [self.steps[number] for number in numbers]

    def upgrade(self, tx: Tx, name: str) -> int:
        """Create the schema or change it into the current one, and return the number of steps.

        Raises:
            WrongSchema: See `list_steps`.
        """
        tx.lock(_LOCK)
        steps = self.list_steps(self.read_version(tx), name)
        for step in steps:
            step(tx)
        tx.run(f"UPDATE {self.table} SET version = ?", (self.version,))
        return len(steps)

    def _create(self, tx: Tx) -> None:
        tx.run(f"CREATE TABLE {self.table} (version INTEGER NOT NULL)")
        tx.run(f"INSERT INTO {self.table} (version) VALUES (0)")
        self.create(tx)


def read_statements(package: str, file: str) -> list[str]:
    """Return the statements of an SQL file in a package."""
    script = re.sub(r"--.*$", "", (files(package) / file).read_text("utf-8"), flags=re.MULTILINE)
    return [each.strip() for each in script.split(";") if each.strip()]
