"""The pytest plugin: one fixture, available wherever Kedge is installed."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kedge.testing.server import TestServer


@pytest.fixture
def kedge_server() -> "Iterator[TestServer]":
    """Provide an empty server for one test, on a free port of this machine."""
    from kedge.testing.server import serve

    with serve() as server:
        yield server
