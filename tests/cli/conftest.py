"""Commands show log records if they are asked to; for other tests that must not last."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Put the loggers back as they were."""
    root = logging.getLogger("kedge")
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
