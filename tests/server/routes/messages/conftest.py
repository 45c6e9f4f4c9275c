"""Fixtures: a server for the package, and the official client connected to it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from anthropic_sdk import make_anthropic
from kedge.testing import TestServer, serve

if TYPE_CHECKING:
    from anthropic import Anthropic


@pytest.fixture(scope="package")
def running() -> Iterator[TestServer]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: TestServer) -> Iterator[TestServer]:
    yield running
    running.faults.clear()


@pytest.fixture(scope="package")
def client(running: TestServer) -> Iterator["Anthropic"]:
    with make_anthropic(running.url) as anthropic_client:
        yield anthropic_client
