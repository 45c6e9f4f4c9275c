"""A plugin of pytest that records which lines each test executes, its duration and whether it failed.

``tests/mutation/measure.py`` loads it into each process that runs tests, and reads what it writes.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

FOLDER_VARIABLE = "KEDGE_MUTATION_FOLDER"
"""The folder for the files of this plugin."""
FILES_VARIABLE = "KEDGE_MUTATION_FILES"
"""The pattern of the files whose lines are recorded."""


class Recorder:
    """Records the tests of one process."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._path = folder / f"tests-{os.getpid()}.json"
        self._seconds: dict[str, float] = {}
        self._failed: list[str] = []
        self._coverage = coverage.Coverage(
            data_file=folder / f"lines-{os.getpid()}.sqlite", include=[pattern], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Assign the lines that are executed from here on to this test."""
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the duration of a test that passed, and each test that failed."""
        if report.failed:
            self._failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self._seconds[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        """Save what was recorded."""
        self._coverage.stop()
        self._coverage.save()
        record = {"seconds": self._seconds, "failed": self._failed}
        self._path.write_text(json.dumps(record), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record in every process that runs tests, not in one that only distributes them."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        folder = Path(os.environ[FOLDER_VARIABLE])
        config.pluginmanager.register(Recorder(folder, os.environ[FILES_VARIABLE]))
