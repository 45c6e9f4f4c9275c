"""Settings for every test: hypothesis sets no deadline, and nothing may leave this machine.

A slow machine is no failure. Only the tests of ``tests/live`` may reach a provider, and only when asked.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from kedge.testing import forbid_network

settings.register_profile("kedge", deadline=None)
settings.load_profile("kedge")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Forbid real network calls, unless the live tests were asked for."""
    if os.environ.get("KEDGE_LIVE"):
        yield
        return
    with forbid_network():
        yield
