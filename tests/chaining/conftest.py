"""Fixtures: a strict server and clients of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from openai import OpenAI

from kedge.chaining import chain
from kedge.testing import TestServer

MakeClient = Callable[..., OpenAI]


@pytest.fixture
def make_client(server: TestServer) -> Iterator[MakeClient]:
    """Yield a function that creates bare clients, which are closed after the test."""
    with ExitStack() as stack:

        def make(api_key: str = "key", **options: Any) -> OpenAI:
            settings = {"max_retries": 0, **options}
            client = OpenAI(base_url=server.base_url, api_key=api_key, **settings)
            return stack.enter_context(client)

        yield make


@pytest.fixture
def client(make_client: MakeClient) -> OpenAI:
    """Return a chained client."""
    return chain(make_client(), trust="always")
