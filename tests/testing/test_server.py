"""The server for tests: what a test of somebody's own code can rely on."""

import subprocess
import sys
import threading
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

import kedge.testing
from kedge.errors import CannotServe
from kedge.server.settings import Settings
from kedge.testing import TestServer, serve

TIMEOUT = 300.0


def create_response(server: TestServer, **body: Any) -> dict[str, Any]:
    asked = {"model": "practice", "input": "hello", **body}
    answer = httpx2.post(f"{server.base_url}/responses", json=asked, verify=False, timeout=TIMEOUT)
    return answer.json()


def test_the_fixture_is_there_without_an_import(kedge_server: TestServer) -> None:
    """A server for the asking."""
    assert kedge_server.url.startswith("http://127.0.0.1:")
    assert kedge_server.base_url == f"{kedge_server.url}/v1"
    assert create_response(kedge_server)["status"] == "completed"


def test_every_request_is_recorded_with_what_the_model_saw(kedge_server: TestServer) -> None:
    """Method, path, headers, body, status, the response's id and the effective context."""
    first = create_response(kedge_server, input="one")
    create_response(kedge_server, input="two", previous_response_id=first["id"])
    create_response(kedge_server, input="three", previous_response_id="resp_x")
    one, two, refused = kedge_server.requests
    assert (one.method, one.path, one.status) == ("POST", "/v1/responses", 200)
    assert one.response_id == first["id"]
    assert one.raw.startswith(b"{")
    assert one.body["input"] == "one"
    assert one.headers["content-type"] == "application/json"
    assert two.body["previous_response_id"] == first["id"]
    assert two.context is not None
    assert [item["role"] for item in two.context] == ["user", "assistant", "user"]
    assert (refused.status, refused.context, refused.response_id) == (400, None, None)


async def test_it_serves_async_tests_as_well(kedge_server: TestServer) -> None:
    """It has a thread and a loop of its own."""
    transport = httpx2.AsyncClient(verify=False, timeout=TIMEOUT)
    async with AsyncOpenAI(
        base_url=kedge_server.base_url, api_key="any", http_client=transport
    ) as client:
        answer = await client.responses.create(model="practice", input="hello")
        assert answer.status == "completed"


def test_any_number_can_run_at_once() -> None:
    """Each with a memory of its own."""
    with serve() as one, serve() as other:
        assert one.url != other.url
        made = create_response(one)
        refused = create_response(other, previous_response_id=made["id"])
        assert refused["error"]["code"] == "previous_response_not_found"
        assert len(one.requests) == len(other.requests) == 1


def test_settings_can_be_given_whole_or_in_part() -> None:
    """What is not given has its default."""
    with serve(Settings(zero_data_retention=True)) as server:
        assert create_response(server)["store"] is False
    with serve(zero_data_retention=True) as server:
        assert create_response(server)["store"] is False


def test_a_test_can_let_time_pass(kedge_server: TestServer) -> None:
    """Expiry is a matter of the server's clock, not of waiting."""
    made = create_response(kedge_server)
    kedge_server.clock.advance(days=31)
    refused = create_response(kedge_server, previous_response_id=made["id"])
    assert refused["error"]["code"] == "previous_response_not_found"
    assert kedge_server.purge() == 1


def test_a_test_can_take_the_memory_away(kedge_server: TestServer) -> None:
    """As a server does that was restored from nothing."""
    made = create_response(kedge_server)
    kedge_server.forget()
    refused = create_response(kedge_server, previous_response_id=made["id"])
    assert refused["error"]["code"] == "previous_response_not_found"


def test_a_stopped_server_leaves_no_thread_behind() -> None:
    """And says so when it is still asked."""
    before = set(threading.enumerate())
    with serve() as server:
        create_response(server)
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name == "kedge-server"]
    with pytest.raises(CannotServe, match="not running"):
        server.purge()


def test_nothing_here_needs_pytest_or_loads_the_server_early() -> None:
    """Loaded by pytest in every run, the package must cost nothing until it is used."""
    code = (
        "import sys; sys.modules['pytest'] = None; import kedge.testing as t; "
        "assert 'starlette' not in sys.modules; t.serve; assert 'starlette' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kedge.testing.nothing  # pyright: ignore[reportAttributeAccessIssue]
