"""Schemas: which steps lead from a stored number to the current one."""

from collections.abc import Callable, Iterator

import pytest

from kedge.store.database.schema import Schema, WrongSchema
from kedge.store.database.sqlite import MEMORY, SQLiteDatabase
from kedge.store.database.transactions import Tx


@pytest.fixture
def database() -> Iterator[SQLiteDatabase]:
    """Yield an empty database in memory."""
    opened = SQLiteDatabase(MEMORY)
    yield opened
    opened.close()


def make_schema(log: list[str], *numbers: int) -> Schema:
    """Return schema 5 with steps from these numbers; each function adds its name to a list."""

    def add(name: str) -> Callable[[Tx], None]:
        return lambda _: log.append(name)

    steps = {number: add(f"from {number}") for number in numbers}
    return Schema("numbers", 5, add("create"), steps, way_out="export and import it")


def set_version(database: SQLiteDatabase, version: int) -> None:
    """Create the schema, and give it another number."""
    schema = make_schema([])
    database.write_sync(lambda tx: schema.upgrade(tx, "x.db"))
    database.write_sync(lambda tx: tx.run("UPDATE numbers SET version = ?", (version,)))


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, ["create"]), (3, ["from 3", "from 4"]), (4, ["from 4"]), (5, [])],
)
def test_steps_run_in_sequence(database: SQLiteDatabase, version: int, expected: list[str]) -> None:
    """An empty database is created; an older one is changed by every step from its number, a current one by none."""
    log: list[str] = []
    schema = make_schema(log, 4, 3)
    if version:
        set_version(database, version)
    assert database.read_sync(schema.read_version) == version
    for count in (len(expected), 0):  # the new number is stored
        assert database.write_sync(lambda tx: schema.upgrade(tx, "x.db")) == count
    assert log == expected
    assert database.read_sync(schema.read_version) == 5


@pytest.mark.parametrize("version", [2, 3])
def test_schema_without_a_step_is_rejected(database: SQLiteDatabase, version: int) -> None:
    """If any step is missing, none runs, and the error names the database and the way out."""
    log: list[str] = []
    set_version(database, version)
    with pytest.raises(WrongSchema, match=r"x\.db .*older.*: export and import it") as error:
        database.write_sync(lambda tx: make_schema(log, 4).upgrade(tx, "x.db"))
    assert (log, error.value.advice) == ([], "export and import it")


def test_schemas_of_one_database_have_separate_numbers(database: SQLiteDatabase) -> None:
    """A second schema in a database is created, whatever the number of the first one is."""
    set_version(database, 6)
    log: list[str] = []
    other = Schema("others", 1, lambda _: log.append("create"))
    assert database.write_sync(lambda tx: other.upgrade(tx, "x.db")) == 1
    assert database.read_sync(other.read_version) == 1
    assert log == ["create"]
