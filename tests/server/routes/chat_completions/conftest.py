"""Fixtures: a server for the package, and the official client connected to it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

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
def client(running: TestServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.base_url, api_key="any", max_retries=0) as openai_client:
        yield openai_client
