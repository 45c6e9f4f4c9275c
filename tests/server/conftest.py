"""A real server on a real socket, and the real client of the API to talk to it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from kedge.testing import TestServer, serve


@pytest.fixture
def server() -> Iterator[TestServer]:
    """A server of its own for the test."""
    with serve() as running:
        yield running


@pytest.fixture
def client(server: TestServer) -> Iterator[OpenAI]:
    """The official client, pointed at the server."""
    with OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as made:
        yield made
