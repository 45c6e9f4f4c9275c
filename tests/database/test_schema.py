"""Schemas: which steps lead from a stored number to the current one."""

from collections.abc import Callable

import pytest

from kedge.database.schema import Schema, WrongSchema

Log = list[str]


def make_schema(*numbers: int) -> Schema[Log]:
    """Return schema 5 with steps from these numbers; each function adds its name to a list."""

    def add(name: str) -> Callable[[Log], None]:
        return lambda log: log.append(name)

    steps = {number: add(f"from {number}") for number in numbers}
    return Schema(5, add("create"), steps, way_out="export and import it")


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, ["create"]), (3, ["from 3", "from 4"]), (4, ["from 4"]), (5, [])],
)
def test_steps_run_in_sequence(version: int, expected: Log) -> None:
    """An empty database is created; an older one is changed by every step from its number, a current one by none."""
    log: Log = []
    assert make_schema(4, 3).upgrade(log, version, "x.db") == len(expected)
    assert log == expected


@pytest.mark.parametrize("version", [2, 3])
def test_schema_without_a_step_is_rejected(version: int) -> None:
    """If any step is missing, none runs, and the error names the database and the way out."""
    log: Log = []
    with pytest.raises(WrongSchema, match=r"x\.db .*older.*: export and import it") as error:
        make_schema(4).upgrade(log, version, "x.db")
    assert (log, error.value.advice) == ([], "export and import it")


def test_newer_schema_is_rejected() -> None:
    """A schema of a newer version is not touched."""
    log: Log = []
    with pytest.raises(WrongSchema, match=r"x\.db .*newer.*\(schema 6, .*5\): upgrade Kedge"):
        make_schema(4, 3).upgrade(log, 6, "x.db")
    assert log == []
