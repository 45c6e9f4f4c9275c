"""Logging with the standard library: the TRACE level and ids as fields."""

import logging
import subprocess
import sys

import pytest

from kedge.observe import TRACE, get_logger


def test_fields_go_along_as_attributes(caplog: pytest.LogCaptureFixture) -> None:
    """Ids are fields of the record; empty ones are omitted."""
    caplog.set_level(TRACE, "kedge.test")
    log = get_logger("kedge.test")
    log.trace("a step", response_id="resp_1", call_id="")
    (record,) = caplog.records
    assert record.levelname == "TRACE"
    assert record.__dict__["kedge"] == {"response_id": "resp_1"}
    assert record.funcName == "test_fields_go_along_as_attributes"


def test_disabled_level_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No record is created below the configured level."""
    caplog.set_level(logging.WARNING, "kedge.test")
    get_logger("kedge.test").debug("never")
    assert caplog.records == []


def test_library_is_silent_by_default() -> None:
    """Without logging configuration, a warning is not written to standard error."""
    code = "from kedge.observe import get_logger; get_logger('kedge.x').warning('hush')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
