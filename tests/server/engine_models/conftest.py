"""Fixtures for one server as the upstream and a second server whose engine model sends requests to it."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from openai import OpenAI

from kedge.providers import open_model
from kedge.server.models import Model
from kedge.testing import TestServer, serve

ENGINE_MODEL_KINDS = ("chat", "anthropic", "responses", "responses, stateless")


@contextmanager
def serve_engine_model(upstream: TestServer, kind: str, **settings: Any) -> Generator[TestServer]:
    """Serve an engine model of this kind that sends its requests to the upstream server."""
    with serve(model=make_model(kind, upstream.base_url, **settings)) as server:
        yield server


def make_model(kind: str, base_url: str, **settings: Any) -> Model:
    """Create an engine model of this kind that sends its requests to the server at this address."""
    settings.setdefault(
        "timeout", 300
    )  # connecting may take longer than 5 seconds on a busy machine
    if kind == "anthropic":
        # This version still accepts sampling parameters.
        settings["default_headers"] = {"anthropic-version": "2023-06-01"}
        return open_model("anthropic:practice", base_url=base_url, api_key="any", **settings)
    name, _, option = kind.partition(", ")
    settings.setdefault("stateless", option == "stateless")
    return open_model(f"{name}:{base_url}#practice", **settings)


def open_client(server: TestServer) -> OpenAI:
    """Return a client of a server, which does not repeat requests."""
    return OpenAI(base_url=server.base_url, api_key="any", max_retries=0)


@contextmanager
def connect_engine_model(kind: str, base_url: str, **settings: Any) -> Generator[OpenAI]:
    """Yield a client of a server whose engine model sends its requests to the server at this address."""
    with (
        serve(model=make_model(kind, base_url, **settings)) as server,
        open_client(server) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def shared() -> Iterator[TestServer]:
    with serve() as upstream_server:
        yield upstream_server


@pytest.fixture
def upstream(shared: TestServer) -> Iterator[TestServer]:
    """Yield the upstream server, which runs the model."""
    shared.requests.clear()
    yield shared
    shared.faults.clear()


@pytest.fixture(scope="session", params=ENGINE_MODEL_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of the engine model."""
    return request.param


@pytest.fixture(scope="session")
def fronts(shared: TestServer) -> Iterator[dict[str, TestServer]]:
    """Yield the servers in front of the upstream, one per kind of engine model."""
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(serve_engine_model(shared, kind))
            for kind in ENGINE_MODEL_KINDS
        }


@pytest.fixture
def server(kind: str, fronts: dict[str, TestServer], upstream: TestServer) -> Iterator[TestServer]:
    """Yield the server in front of the upstream, with its own stored responses."""
    front = fronts[kind]
    front.requests.clear()
    yield front
    front.faults.clear()


@pytest.fixture
def client(server: TestServer) -> Iterator[OpenAI]:
    with open_client(server) as openai_client:
        yield openai_client
