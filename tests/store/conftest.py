"""Fixtures for stores; tests of the contract run on every database."""

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of an empty store."""
    match request.param:
        case "postgresql":
            with request.getfixturevalue("postgres_store").borrow() as url:
                yield url
        case "memory":
            yield "sqlite://:memory:"
        case _:
            yield request.getfixturevalue("sqlite_url")
