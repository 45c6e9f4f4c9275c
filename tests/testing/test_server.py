"""Tests of the server that ``kedge.testing`` provides for users' tests."""

import subprocess
import sys
import threading
from typing import Any

import httpx2
import pytest

import kedge.testing
from kedge.errors import CannotServe, InvalidScript, InvalidSetting, InvalidType, UnknownSetting
from kedge.server.settings import Settings
from kedge.testing import TestServer, serve

TIMEOUT = 300.0


class SilentModel:
    """A model that is never asked."""

    name, window, grace = "silent", 1000, 0.0
    is_closed = False

    async def aclose(self) -> None:
        """Record that the model is closed."""
        self.is_closed = True


def create_response(server: TestServer, **body: Any) -> dict[str, Any]:
    request = {"model": "practice", "input": "hello", **body}
    answer = httpx2.post(
        f"{server.base_url}/responses", json=request, verify=False, timeout=TIMEOUT
    )
    return answer.json()


def test_every_request_is_recorded_with_its_context(kedge_server: TestServer) -> None:
    """A record has the method, path, headers, body, status, response id and effective context."""
    first = create_response(kedge_server, input="one")
    create_response(kedge_server, input="two", previous_response_id=first["id"])
    create_response(kedge_server, input="three", previous_response_id="resp_x")
    one, two, rejected = kedge_server.requests
    assert (one.method, one.path, one.status) == ("POST", "/v1/responses", 200)
    assert one.response_id == first["id"]
    assert one.raw.startswith(b"{")
    assert one.body["input"] == "one"
    assert one.headers["content-type"] == "application/json"
    assert two.body["previous_response_id"] == first["id"]
    assert two.context is not None
    assert [item["role"] for item in two.context] == ["user", "assistant", "user"]
    assert (rejected.status, rejected.context, rejected.response_id) == (400, None, None)


def test_fixed_answers_may_be_texts(kedge_server: TestServer) -> None:
    """Texts are the answers of each conversation in order, the last one repeated; entries apply by their conditions."""
    kedge_server.set_answers("One.", {"when": "weather", "say": "Sunny."}, "Two.", "Three.")
    for _ in range(2):
        previous, said = None, list[str]()
        for text in ("a", "the weather", "b", "c", "d"):
            answer = create_response(kedge_server, input=text, previous_response_id=previous)
            previous = answer["id"]
            said.append(answer["output"][0]["content"][0]["text"])
        assert said == ["One.", "Sunny.", "Three.", "Three.", "Three."]
    kedge_server.set_answers()
    answer = create_response(kedge_server, input="What is 2+3?")
    assert answer["output"][0]["content"][0]["text"] == "2+3 = 5."
    wrong: Any
    for wrong in (5, {"wen": "weather", "say": "Sunny."}):
        with pytest.raises(InvalidScript, match=r"answers\[0\]"):
            kedge_server.set_answers(wrong)


def test_answers_need_the_practice_model() -> None:
    """A server with another model, which it closes at its end, has no fixed answers, and says so."""
    model = SilentModel()
    with serve(model=model) as server:
        with pytest.raises(InvalidSetting, match="needs the practice model"):
            server.set_answers({"say": "Hello"})
        assert not model.is_closed
    assert model.is_closed


def test_settings_can_be_an_object_or_keywords() -> None:
    """Settings may be passed as ``Settings`` or as individual keywords."""
    with serve(Settings(zero_data_retention=True)) as server:
        assert create_response(server)["store"] is False
    with serve(zero_data_retention=True) as server:
        assert create_response(server)["store"] is False


def test_a_test_can_advance_the_clock(kedge_server: TestServer) -> None:
    """Responses expire by the server's clock, which a test can advance."""
    response = create_response(kedge_server)
    kedge_server.clock.advance(days=31)
    rejected = create_response(kedge_server, previous_response_id=response["id"])
    assert rejected["error"]["code"] == "previous_response_not_found"
    assert kedge_server.purge() == 1


def test_a_stopped_server_leaves_no_thread() -> None:
    """The thread of a stopped server has ended, and using the server raises an error."""
    before = set(threading.enumerate())
    with serve() as server:
        create_response(server)
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name == "kedge-server"]
    with pytest.raises(CannotServe, match="not running"):
        server.purge()


def test_the_package_needs_no_pytest_and_loads_the_server_lazily() -> None:
    """Every run of pytest loads the package, so it must not import the server before it is used."""
    code = (
        "import sys; sys.modules['pytest'] = None; import kedge.testing as t; "
        "assert 'starlette' not in sys.modules; t.serve; assert 'starlette' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kedge.testing.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_wrong_settings_are_named() -> None:
    """A misspelled setting, a value of a wrong type and other settings are rejected before the server starts."""
    wrong: Any
    for wrong, error, message in (
        ({"retentoin": 60}, UnknownSetting, "did you mean 'retention'"),
        ({"db": 5}, InvalidType, "db must be str, not int"),
        ({"settings": 5}, InvalidType, "settings must be Settings, not int"),
    ):
        with pytest.raises(error, match=message), serve(**wrong):
            pass
