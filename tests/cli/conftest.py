"""Fixture that restores the logging configuration, which commands change."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the handlers and the level of the logger after each test."""
    root = logging.getLogger("kedge")
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
