"""Fixtures for the engine, shared with the tests of engines, and for servers in memory."""

from collections.abc import AsyncGenerator

import pytest

from engines.conftest import engine
from law.networks import MemoryNetwork

__all__ = ["engine", "network"]


@pytest.fixture
async def network() -> AsyncGenerator[MemoryNetwork]:
    """Connect the clients of the test to servers in memory; rounds over sockets are in ``test_rounds``."""
    network = MemoryNetwork()
    with network.install():
        yield network
