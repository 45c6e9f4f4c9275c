"""Stores for the tests: every test of the contract runs on each kind."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kedge.store import Store, open_store


@pytest.fixture(params=["sqlite", "memory"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store."""
    return f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else "sqlite://:memory:"


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """An empty store."""
    async with await open_store(store_url) as opened:
        yield opened
