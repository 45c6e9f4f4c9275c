"""Fixtures: a server for the package, and the official client connected to it."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic

from kedge.testing import TestServer, serve


@pytest.fixture(scope="package")
def running() -> Iterator[TestServer]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: TestServer) -> Iterator[TestServer]:
    yield running
    running.faults.clear()


@pytest.fixture(scope="package")
def client(running: TestServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=running.url, api_key="any", max_retries=0) as anthropic_client:
        yield anthropic_client
