"""Tests that unsupported requests and internal failures do not affect the program."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import pytest

from kedge.incremental import AnchorIndex, IndexedResponse, MemoryIndex, chain, chain_report

URL = "https://api.openai.com/v1"
ANSWER = {"id": "resp_1", "object": "response", "status": "completed", "model": "m"}
TEXT = {"type": "output_text", "text": "Hello", "annotations": []}
OUTPUT = [{"id": "m", "type": "message", "role": "assistant", "content": [TEXT]}]


class BrokenIndex(MemoryIndex):
    """An index whose methods raise."""

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        raise RuntimeError("broken")

    def add(self, entry: IndexedResponse) -> bool:
        raise RuntimeError("broken")


class ForgetfulIndex(MemoryIndex):
    """An index that cannot record losses."""

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        raise RuntimeError("broken")


def answer(request: httpx2.Request) -> httpx2.Response:
    """Return a response that rejects every `previous_response_id`."""
    try:
        body: Any = json.loads(request.content)
    except ValueError:
        body = {}
    if isinstance(body, Mapping) and "previous_response_id" in body:
        error = {"message": "gone", "code": "previous_response_not_found", "param": None}
        return httpx2.Response(400, json={"error": error})
    return httpx2.Response(200, json={**ANSWER, "output": OUTPUT})


def make_client(index: AnchorIndex | None = None) -> httpx2.Client:
    """Return a chained client of that server."""
    http = httpx2.Client(transport=httpx2.MockTransport(answer), base_url=URL)
    return chain(http, index=index)


@pytest.mark.parametrize("index", [BrokenIndex(), ForgetfulIndex()])
def test_a_failing_index_does_not_affect_the_program(index: AnchorIndex) -> None:
    """The request is sent as written, and its answer is returned."""
    history: list[Any] = [{"role": "user", "content": "One"}]
    with make_client(index) as http:
        for _ in range(2):
            response = http.post("/responses", json={"model": "m", "input": history})
            assert response.json()["output"] == OUTPUT
            history += [*OUTPUT, {"role": "user", "content": "Two"}]


@pytest.mark.parametrize(
    ("content", "headers", "reason"),
    [
        (b"{", {}, "not_json"),
        (b'{"input": "a"}', {"content-encoding": "gzip"}, "encoded"),
        (b'{"input": "a"}', {"authorization": "AWS4-HMAC-SHA256 x"}, "signed"),
        (b'{"input": "a"}', {}, "no_history"),
        (b'{"input": [5]}', {}, "input"),
    ],
)
def test_requests_that_cannot_be_parsed_are_passed_through(
    content: bytes, headers: dict[str, str], reason: str
) -> None:
    """Each request is counted under its reason."""
    with make_client() as http:
        response = http.post("/responses", content=content, headers=headers)
        assert response.status_code == 200
        assert chain_report(http).passed_through == {reason: 1}


def test_other_requests_and_streamed_bodies_are_not_counted() -> None:
    """Other routes, streamed bodies and requests with `auth` are passed through uncounted."""
    with make_client() as http:
        http.get("/models")
        http.post("/responses", content=iter([b'{"input": "a"}']))
        http.post("/responses", json={"input": "a"}, auth=("user", "password"))
        assert chain_report(http).requests == 0
