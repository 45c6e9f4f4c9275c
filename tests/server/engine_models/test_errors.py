"""Test how failures of the upstream model are mapped to API errors."""

import logging
from typing import Any

import openai
import pytest

from engines.fake_server import json_response, make_handler, serve_handler, sse_response
from for_each import for_each
from kedge.errors import (
    CannotConnect,
    KedgeError,
    NotAuthorized,
    RequestRefused,
    ServerFailed,
    StreamTooLarge,
    Unsendable,
)
from kedge.server.engine_models.engine_model import to_api_error
from server.engine_models.conftest import connect_engine_model

REASON = "image input is not supported - hint: if this is unexpected, you may need an mmproj"
LLAMA_CPP = {"error": {"code": 500, "message": REASON, "type": "server_error"}}
RESPONSE: Any = {"id": "resp_1", "status": "failed", "output": []}
RESPONSE["error"] = {"code": "server_error", "message": REASON}
FAILED: Any = {"type": "response.failed", "sequence_number": 0, "response": RESPONSE}


@for_each("streamed", [False, True])
@for_each("kind", ["chat", "responses", "anthropic", "failed"])
def test_permanent_failure_is_a_client_error_with_its_reason(
    kind: str, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp reports an image that its model cannot read as HTTP 500, or in its stream; a retry cannot help."""
    caplog.clear()
    caplog.set_level(logging.WARNING, "kedge.server.engine_models")
    is_late = kind == "failed" and streamed
    with (
        serve_handler(
            make_handler(lambda: sse_response(FAILED) if is_late else json_response(LLAMA_CPP, 500))
        ) as upstream,
        connect_engine_model("responses" if kind == "failed" else kind, upstream) as client,
        pytest.raises(openai.BadRequestError) as exc_info,
    ):
        client.responses.create(model="any", input="Hello", stream=streamed)
    assert REASON in exc_info.value.message
    assert is_late or exc_info.value.code == "upstream_refused"
    assert is_late or REASON in caplog.text


@for_each(
    ("error", "status", "code"),
    [
        (ServerFailed("boom", provider="x", status=500, retryable=True), 502, "upstream_failed"),
        (ServerFailed("too big", provider="x", code="image_too_large"), 400, "image_too_large"),
        (ServerFailed("no", provider="x", status=501), 400, "upstream_refused"),
        (RequestRefused("gone", provider="x", status=404), 502, "upstream_not_found"),
        (RequestRefused("wait", provider="x", status=409, retryable=True), 502, "upstream_failed"),
        (RequestRefused("slow", provider="x", status=408, retryable=True), 502, "upstream_failed"),
        (StreamTooLarge("line", 5), 502, "upstream_error"),
        (Unsendable(["a call"]), 400, "unsupported_parameter"),
        (CannotConnect("no key"), 503, "upstream_unreachable"),
    ],
)
def test_status_and_code_of_a_failure(error: KedgeError, status: int, code: str) -> None:
    """Only failures caused by the request are 4xx; failures that may be temporary are 5xx."""
    mapped = to_api_error(error)
    assert (mapped.status, mapped.code) == (status, code)


def test_what_is_logged_and_sent_of_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Long reasons are logged in part; one that may quote the key is neither logged nor sent."""
    memory = ServerFailed("CUDA out of memory", provider="x", status=500, retryable=True)
    assert "may succeed later" in to_api_error(memory).message
    assert "CUDA out of memory" in caplog.text
    to_api_error(RequestRefused("x" * 2000, provider="x", status=400))  # it may quote a long input
    assert "x" * 300 in caplog.text
    assert "x" * 600 not in caplog.text
    key = NotAuthorized("Incorrect API key provided: sk-ab***yz", provider="x", status=401)
    assert "sk-ab" not in to_api_error(key).message + caplog.text
