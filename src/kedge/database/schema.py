"""Schemas: the number of the current one, how it is created, and the steps to it from older ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Generic, TypeVar

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Schema(Generic[T]):
    """A numbered schema. Its functions get a transaction and run in that of the upgrade, which is complete or undone.

    Until a version is released, the schema is changed where it is created, and its number is raised.
    """

    version: int
    create: Callable[[T], None]
    steps: Mapping[int, Callable[[T], None]] = field(default_factory=dict[int, Callable[[T], None]])
    """The change from each older schema to the next one."""
    way_out: str = ""
    """What to do with a database that is older than the first step."""

    def list_steps(self, version: int, name: str) -> Sequence[Callable[[T], None]]:
        """Return the functions that change a schema (0 for an empty database) into the current one.

        Raises:
            WrongSchema: The schema is newer than this program, or older than the first step.
        """
        if not version:
            return [self.create]
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

    def upgrade(self, tx: T, version: int, name: str) -> int:
        """Change a schema into the current one, and return the number of steps; the caller stores the new number.

        Raises:
            WrongSchema: See `list_steps`.
        """
        steps = self.list_steps(version, name)
        for step in steps:
            step(tx)
        return len(steps)


def read_statements(package: str, database: str) -> list[str]:
    """Return the statements of a package's file ``schema.<database>.sql``."""
    script = (files(package) / f"schema.{database}.sql").read_text("utf-8")
    script = re.sub(r"--.*$", "", script, flags=re.MULTILINE)
    return [each.strip() for each in script.split(";") if each.strip()]
