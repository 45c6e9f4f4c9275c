"""Tests that unsupported requests and internal failures do not affect the program."""

import asyncio
import gzip
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from anyio import CancelScope

from chaining.programs import HISTORY, OUTPUT, URL
from for_each import for_each
from kedge.chaining import IndexedResponse, MemoryIndex, ResponseIndex, chain, chain_report
from kedge.chaining.client import PROBE_SECONDS
from kedge.chaining.observer import ResponseObserver

OTHER = "https://other.example/v1"
SSE = {"content-type": "text/event-stream"}
ANSWER = {"id": "resp_1", "object": "response", "status": "completed", "model": "m"}
GONE = {"error": {"message": "gone", "code": "previous_response_not_found", "param": None}}

Respond = Callable[[httpx2.Request], Any]


class BrokenIndex(MemoryIndex):
    """An index whose methods raise."""

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        raise RuntimeError("broken")

    def add(self, scope: str, entry: IndexedResponse) -> bool:
        raise RuntimeError("broken")


class ForgetfulIndex(MemoryIndex):
    """An index that cannot record losses and evidence."""

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        raise RuntimeError("broken")

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        raise RuntimeError("broken")


def read_body(request: httpx2.Request) -> dict[str, Any]:
    """Return the body of a request; one that cannot be read is empty."""
    try:
        body = json.loads(request.content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def read_anchor(request: httpx2.Request) -> str | None:
    """Return the response that a request continues."""
    return read_body(request).get("previous_response_id")


def answer(request: httpx2.Request) -> httpx2.Response:
    """Return a response that rejects every `previous_response_id`."""
    if read_anchor(request):
        return httpx2.Response(400, json=GONE)
    return httpx2.Response(200, json={**ANSWER, "output": OUTPUT})


def complete(request: httpx2.Request, response_id: str = "") -> dict[str, Any]:
    """Return a response with this id, or a new one, that continues the anchor of a request."""
    names = {
        "id": response_id or f"resp_{uuid4().hex}",
        "previous_response_id": read_anchor(request),
    }
    return {**ANSWER, **names, "output": OUTPUT}


def answer_anchor(request: httpx2.Request) -> httpx2.Response:
    """Return a response that continues every anchor."""
    return httpx2.Response(200, json=complete(request))


def answer_chained(status: int, **options: Any) -> Respond:
    """Return a handler that answers chained requests with this response."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, **options) if read_anchor(request) else answer(request)

    return respond


def make_client(
    respond: Respond = answer, index: ResponseIndex | None = None, **options: Any
) -> httpx2.Client:
    """Return a chained client of a server with this handler."""
    settings = {"transport": httpx2.MockTransport(respond), "base_url": URL, **options}
    return chain(httpx2.Client(**settings), index=index)


def make_async_client(
    respond: Respond = answer, index: ResponseIndex | None = None, **options: Any
) -> httpx2.AsyncClient:
    """Return a chained asynchronous client of a server with this handler."""
    settings = {"transport": httpx2.MockTransport(respond), "base_url": URL, **options}
    return chain(httpx2.AsyncClient(**settings), index=index)


def post(http: Any, count: int = 3, *, headers: Any = None, **members: Any) -> Any:
    """Send the start of the history, with these members of the body."""
    body = {"input": HISTORY[:count], **members}
    return http.post("/responses", json=body, headers=headers)


def open_stream(http: Any, count: int = 3, **members: Any) -> Any:
    """Return the context of a response that is read in chunks."""
    return http.stream("POST", "/responses", json={"input": HISTORY[:count], **members})


def dump_events(*events: dict[str, Any]) -> bytes:
    """Return a stream of these events."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()


def make_events(response: dict[str, Any]) -> bytes:
    """Return a complete stream of a response."""
    return dump_events(
        {"type": "response.created", "response": {**response, "output": []}},
        {"type": "response.output_item.done", "output_index": 0, "item": OUTPUT[0]},
        {"type": "response.completed", "response": response},
    )


class Chunks(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The body of a response that arrives in chunks, and may break after them."""

    def __init__(self, *chunks: bytes, is_cut: bool = False) -> None:
        self.chunks = chunks
        self.is_cut = is_cut
        self.count = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.count += 1
            yield chunk
        if self.is_cut:
            raise httpx2.ReadError("cut")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


class Unreadable(Chunks):
    """The body of a response that cannot be iterated at all."""

    def __iter__(self) -> Iterator[bytes]:
        raise httpx2.ReadError("cut")


@for_each("index", [BrokenIndex(), ForgetfulIndex()])
def test_a_failing_index_does_not_affect_the_program(index: ResponseIndex) -> None:
    """The request is sent as written, and its answer is returned."""
    with make_client(index=index) as http:
        for count in (1, 3):
            assert post(http, count, model="m").json()["output"] == OUTPUT


@for_each(
    ("content", "headers", "reason"),
    [
        (b"{", {}, "not_json"),
        (b'{"input": "a"}', {"content-encoding": "gzip"}, "encoded"),
        (b'{"input": "a"}', {"authorization": "AWS4-HMAC-SHA256 x"}, "signed"),
        (b'{"input": "a"}', {"content-digest": "sha-256=:x:"}, "signed"),
        (b'{"input": "a"}', {}, "new"),
        (b'{"input": [5]}', {}, "input"),
    ],
)
def test_requests_that_cannot_be_parsed_are_passed_through(
    content: bytes, headers: dict[str, str], reason: str
) -> None:
    """Each request is counted under its reason."""
    with make_client() as http:
        assert http.post("/responses", content=content, headers=headers).status_code == 200
        assert chain_report(http).passed_through == {reason: 1}


@for_each(
    ("accepted", "sent"),
    [
        ("gzip;q=0.5, br, zstd", "gzip;q=0.5"),
        ("br", "identity"),
        ("", ""),
    ],
)
def test_only_supported_compressions_are_accepted(accepted: str, sent: str) -> None:
    """Kedge removes compressions it cannot decode from `accept-encoding`, as it must parse the response."""
    encodings: list[str] = []

    def record(request: httpx2.Request) -> httpx2.Response:
        encodings.append(request.headers["accept-encoding"])
        return answer(request)

    with make_client(record) as http:
        headers = {"accept-encoding": accepted}
        assert post(http, headers=headers).request.headers["accept-encoding"] == accepted
        http.get("/models", headers=headers)
    assert encodings == [sent, accepted]


def test_a_redirected_request_is_planned_for_its_last_address() -> None:
    """A redirect is no answer: each request is reported once, and chained at the address that answers."""
    new = "/v1/responses"
    old = "/v1/old/responses"
    sent: list[tuple[str, int]] = []

    def redirect(request: httpx2.Request) -> httpx2.Response:
        sent.append((request.url.path, len(read_body(request)["input"])))
        if request.url.path == old:
            return httpx2.Response(307, headers={"location": new})
        return answer_anchor(request)

    with make_client(redirect, follow_redirects=True) as http:
        for count in (1, 3):
            response = http.post("/old/responses", json={"input": HISTORY[:count]})
            assert response.url == f"{URL}/responses"
            assert json.loads(response.request.read()) == {"input": HISTORY[:count]}
        report = chain_report(http)
    assert sent == [(old, 1), (new, 1), (old, 3), (new, 1)]
    assert (report.requests, report.chained) == (2, 1)


async def test_a_broken_response_is_closed() -> None:
    """The error has the program's own request, as without Kedge, and the response is closed."""
    stream = Unreadable()
    other_stream = Chunks(is_cut=True)
    with make_client(answer_chained(200, stream=stream)) as http:
        post(http, 1)
        with pytest.raises(httpx2.ReadError) as exc_info:
            post(http)
    async with make_async_client(answer_chained(200, stream=other_stream)) as client:
        await post(client, 1)
        with pytest.raises(httpx2.ReadError) as other_info:
            await post(client)
    for error in (exc_info.value, other_info.value):
        assert json.loads(error.request.content) == {"input": HISTORY}
    assert (stream.is_closed, other_stream.is_closed) == (True, True)


@for_each("listed", [False, True])
def test_a_resumed_stream_is_an_anchor_if_its_end_lists_the_output(listed: bool) -> None:
    """A resumed stream contains only the second item, and its last event may list the complete output."""
    second = {**OUTPUT[0], "id": "m2"}
    output = [*OUTPUT, second] if listed else []
    resumed = dump_events(
        {"type": "response.output_item.done", "output_index": 1, "item": second},
        {"type": "response.completed", "response": {**ANSWER, "output": output}},
    )
    anchors: list[Any] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, content=resumed, headers=SSE)
        anchors.append(read_anchor(request))
        status = "queued" if read_body(request).get("background") else "completed"
        body = {**complete(request, "resp_1"), "status": status, "output": []}
        return httpx2.Response(200, json=body)

    with make_client(respond) as http:
        post(http, 1, background=True)
        http.get("/responses/resp_1", params={"stream": "true", "starting_after": "8"})
        for replayed in ([second], [*OUTPUT, second]):
            post(http, input=[HISTORY[0], *replayed, HISTORY[-1]])
    assert anchors == [None, None, "resp_1" if listed else None]


def test_a_background_response_that_the_program_leaves_becomes_an_anchor() -> None:
    """The server generates it without a reader, and a later GET has its output."""
    created = {"type": "response.created", "response": {**ANSWER, "status": "queued", "output": []}}
    anchors: list[Any] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={**ANSWER, "output": OUTPUT})
        anchors.append(read_anchor(request))
        if read_body(request).get("background"):
            stream = Chunks(dump_events(created), dump_events({"type": "response.queued"}))
            return httpx2.Response(200, stream=stream, headers=SSE)
        return answer_anchor(request)

    with make_client(respond) as http:
        with open_stream(http, 1, background=True, stream=True) as response:
            next(response.iter_raw())
        http.get("/responses/resp_1")
        post(http)
    assert anchors == [None, "resp_1"]


def test_an_index_that_cannot_record_a_server_error_does_not_hide_it() -> None:
    """The program gets the response of the server, not the error of the index."""
    with make_client(answer_chained(500, text="overloaded"), ForgetfulIndex()) as http:
        post(http, 1)
        assert post(http).text == "overloaded"


@for_each("coding", ["gzip", "deflate"])
@for_each("count", [1, 3])
def test_the_body_of_an_error_can_be_read_in_every_way(count: int, coding: str) -> None:
    """An error that is streamed has its raw bytes, even if they are not valid."""
    packed = gzip.compress(b'{"error": {"message": "wrong"}}')

    def respond(request: httpx2.Request) -> httpx2.Response:
        if "fails" not in read_body(request):
            return answer(request)
        stream = Chunks(packed[:9], packed[9:])
        return httpx2.Response(400, stream=stream, headers={"content-encoding": coding})

    with make_client(respond) as http:
        post(http, 1)
        with open_stream(http, count, fails=True) as response:
            assert not response.is_stream_consumed
            assert b"".join(response.iter_raw()) == packed
        if coding == "gzip":
            assert post(http, count, fails=True).json() == {"error": {"message": "wrong"}}
        assert not chain_report(http).healed


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("kind", [httpx2.HTTPStatusError, LookupError])
async def test_an_error_of_a_hook_reaches_the_program_unless_it_is_healed(
    kind: type[Exception], is_read: bool
) -> None:
    """A rejection of an anchor is healed; another error has the program's request, and is reported."""

    async def check(response: httpx2.Response) -> None:
        if is_read:
            await response.aread()
        if kind is LookupError and not response.is_success:
            raise LookupError(response.status_code)
        response.raise_for_status()

    for status in (400, 302, 429, 500):
        error = json.dumps(GONE if status == 400 else {}).encode()
        respond = answer_chained(status, stream=Chunks(error))
        async with make_async_client(respond, event_hooks={"response": [check]}) as http:
            await post(http, 1)
            if status == 400:
                assert (await post(http)).json()["output"] == OUTPUT
            else:
                with pytest.raises(kind, match=str(status)) as exc_info:
                    await post(http)
                if isinstance(exc_info.value, httpx2.HTTPStatusError):
                    for request in (exc_info.value.request, exc_info.value.response.request):
                        assert json.loads(request.content) == {"input": HISTORY}
            assert chain_report(http).healed == ({"rejected": 1} if status == 400 else {})
            assert chain_report(http).requests == 2


def test_changes_of_a_request_by_hooks_are_visible() -> None:
    """Headers and extensions that a hook sets are those of the response's request."""

    def mark(request: httpx2.Request) -> None:
        request.headers["x-request-id"] = "7"
        request.extensions["started"] = 8.5

    with make_client(answer_anchor, event_hooks={"request": [mark]}) as http:
        for count in (1, 3):
            request = post(http, count).request
            assert request.headers["x-request-id"] == "7"
            assert request.extensions["started"] == 8.5
            assert request.headers["content-length"] == str(len(request.content))
        assert chain_report(http).chained == 1


def test_a_stream_in_one_chunk_is_recorded_before_it_is_passed_on() -> None:
    """The next request can follow when the last event has arrived, before the end of the stream."""
    index = MemoryIndex()

    def respond(request: httpx2.Request) -> httpx2.Response:
        stream = Chunks(make_events(complete(request)), b"data: [DONE]\n\n")
        return httpx2.Response(200, stream=stream, headers=SSE)

    with make_client(respond, index=index) as http:
        for count, indexed in ((1, 1), (3, 2)):
            with open_stream(http, count, stream=True) as response:
                next(response.iter_raw())
                assert len(index) == indexed
        assert chain_report(http).chained == 1


def make_unlisted_client(probes: list[httpx2.Request], **options: Any) -> httpx2.Client:
    """Return a chained client of an unknown server that does not list items, and records requests for them."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            probes.append(request)
            return httpx2.Response(404)
        content = make_events({**ANSWER, "output": OUTPUT})
        return httpx2.Response(200, content=content, headers=SSE)

    return make_client(respond, base_url=OTHER, **options)


def test_a_probe_has_no_longer_timeout_than_the_program() -> None:
    """A server that does not answer a probe does not delay the program by more than its own timeout."""
    probes: list[httpx2.Request] = []
    for timeout in (httpx2.Timeout(60, read=2), httpx2.Timeout(None)):
        with make_unlisted_client(probes, timeout=timeout) as http:
            for count in (1, 3):
                post(http, count, stream=True)
    longest = dict.fromkeys(("connect", "read", "write", "pool"), PROBE_SECONDS)
    timeouts = [request.extensions["timeout"] for request in probes]
    assert timeouts == [{**longest, "read": 2}, longest]


def test_event_hooks_do_not_see_probes() -> None:
    """A probe has the credentials of the request; hooks, which may raise errors for it, are not called."""
    probes: list[httpx2.Request] = []
    seen: list[str] = []

    def check(response: httpx2.Response) -> None:
        seen.append(response.request.method)
        if response.is_error:
            raise LookupError(response.request.method)

    hooks: Any = {"response": [check]}
    with make_unlisted_client(probes, event_hooks=hooks, auth=("ada", "secret")) as http:
        for count in (1, 3):
            post(http, count, stream=True)
        assert chain_report(http).passed_through == {"new": 1, "untrusted": 1}
    assert seen == ["POST", "POST"]
    assert probes[0].headers["authorization"].startswith("Basic ")


def test_credentials_of_a_hook_separate_accounts() -> None:
    """Credentials that a hook sets identify the account, like those of the client."""
    sent: list[tuple[str, int]] = []
    keys = ["", "key-1", "", "key-2", "key-1"]

    def authorize(request: httpx2.Request) -> None:
        if key := keys.pop(0):
            request.headers["authorization"] = key

    def respond(request: httpx2.Request) -> httpx2.Response:
        sent.append((request.headers["authorization"], len(read_body(request)["input"])))
        return answer_anchor(request)

    options: Any = {"event_hooks": {"request": [authorize]}, "headers": {"authorization": "own"}}
    with make_client(respond, **options) as http:
        for count in (1, 1, 3, 3, 3):
            post(http, count)
        report = chain_report(http)
    assert sent == [("own", 1), ("key-1", 1), ("own", 1), ("key-2", 3), ("key-1", 1)]
    assert report.passed_through == {"new": 2, "no_anchor": 1}
    assert (report.chained, report.healed) == (2, {})


@for_each("header", ["x-request-signature", "x-request-mac"])
def test_a_body_that_a_hook_signs_is_sent_as_written(header: str) -> None:
    """The signature is recognized by its name, or by the status of a request with another body."""
    sent: list[bool] = []

    def sign(request: httpx2.Request) -> None:
        request.headers[header] = sha256(request.content).hexdigest()

    def respond(request: httpx2.Request) -> httpx2.Response:
        is_valid = request.headers[header] == sha256(request.content).hexdigest()
        sent.append(is_valid)
        return answer_anchor(request) if is_valid else httpx2.Response(403, text="wrong signature")

    with make_client(respond, event_hooks={"request": [sign]}) as http:
        for count in (1, 3, 3):
            assert post(http, count).json()["output"] == OUTPUT
        passed = chain_report(http).passed_through
    if header == "x-request-mac":
        assert (sent, passed) == ([True, False, True, True], {"new": 1, "unsupported": 1})
    else:
        assert (sent, passed) == ([True, True, True], {"signed": 3})


def test_a_request_with_an_idempotency_key_is_sent_as_written() -> None:
    """Other attempts with the key have the same body, and the response is an anchor."""
    sent: list[bytes] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.content)
        return httpx2.Response(200, json=complete(request, f"r{len(set(sent))}"))

    with make_client(respond) as http:
        post(http, 1)
        for key in ("1", "1", ""):
            response = post(http, headers={"idempotency-key": key})
            assert response.json()["output"] == OUTPUT
        assert chain_report(http).passed_through == {"new": 1, "idempotency_key": 2}
    assert sent[1] == sent[2] != sent[3]


@for_each("header", ["Idempotency-Key", "X-Idempotency-Key"])
def test_a_key_of_a_hook_is_sent_with_one_body(header: str) -> None:
    """A request is sent as written if a hook adds a key to it, because the key belongs to that body."""
    sent: dict[str, int] = {}

    def add_key(request: httpx2.Request) -> None:
        request.headers.setdefault(header, str(uuid4()))

    def respond(request: httpx2.Request) -> httpx2.Response:
        assert request.headers[header] not in sent
        sent[request.headers[header]] = len(read_body(request)["input"])
        return answer(request)

    with make_client(respond, event_hooks={"request": [add_key]}) as http:
        for count in (1, 3):
            assert post(http, count).status_code == 200
        assert chain_report(http).passed_through == {"idempotency_key": 2}
    assert list(sent.values()) == [1, 3]


def test_chaining_twice_continues_the_report() -> None:
    """The second call changes the settings; the report and the known responses remain."""
    first: list[Any] = []
    second: list[Any] = []
    transport = httpx2.MockTransport(answer_anchor)
    http = chain(httpx2.Client(transport=transport, base_url=URL), on_request=first.append)
    with http:
        post(http, 1)
        chain(http, on_request=second.append)
        assert chain_report(http).requests == 1
        post(http)
        report = chain_report(http)
    assert (report.requests, report.chained, len(report.recent)) == (2, 1, 2)
    assert (len(first), len(second)) == (1, 1)


class BlockingIndex(MemoryIndex):
    """An index that waits, and records the threads in which it is used."""

    is_blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.on_save = lambda: None

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        self.threads.add(threading.get_ident())
        return super().find(scope, digests)

    def add(self, scope: str, entry: IndexedResponse) -> bool:
        self.threads.add(threading.get_ident())
        return super().add(scope, entry)

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        self.threads.add(threading.get_ident())
        self.on_save()
        super().save_evidence(key, form)


async def test_a_probe_is_not_recorded_on_the_event_loop() -> None:
    """An index that waits is only used in worker threads."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/input_items"):
            content = [{"type": "input_text", "text": "One"}]
            item = {"id": "u", "type": "message", "role": "user", "content": content}
            return httpx2.Response(200, json={"data": [item]})
        if request.method == "GET":
            return httpx2.Response(200, json={**ANSWER, "output": OUTPUT})
        response = complete(request, "resp_2" if read_anchor(request) else "resp_1")
        return httpx2.Response(200, content=make_events(response), headers=SSE)

    index = BlockingIndex()
    async with make_async_client(respond, base_url=OTHER, index=index) as http:
        for count in (1, 3):
            await post(http, count, stream=True)
        assert chain_report(http).chained == 1
    assert index.threads
    assert threading.get_ident() not in index.threads


async def test_the_event_loop_does_not_wait_for_evidence_that_is_being_written() -> None:
    """While a worker thread writes evidence, the response to another request is received."""
    index = BlockingIndex()
    loop = asyncio.get_running_loop()
    both_sent = asyncio.Event()
    is_saving = asyncio.Event()
    is_released = threading.Event()
    was_released: list[bool] = []

    def wait() -> None:
        loop.call_soon_threadsafe(is_saving.set)
        was_released.append(is_released.wait(5))

    async def respond(request: httpx2.Request) -> httpx2.Response:
        if read_body(request)["input"] == "first":
            await both_sent.wait()
        else:
            both_sent.set()
            await is_saving.wait()
            loop.call_soon(is_released.set)
        return httpx2.Response(200, json={**ANSWER, "output": OUTPUT}, headers={"server": "kedge"})

    index.on_save = wait
    async with make_async_client(respond, index=index) as http:
        await asyncio.gather(post(http, input="first"), post(http, input="second"))
    assert was_released[0]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_that_breaks_before_its_output_fails_where_it_is_read(status: int) -> None:
    """A stream starts and then fails, as without Kedge, so that clients do not repeat the request."""
    created = {**ANSWER, "previous_response_id": "resp_1"}
    data = dump_events({"type": "response.created", "response": created})

    def make_handler() -> Respond:
        return answer_chained(status, stream=Chunks(data, is_cut=True), headers=SSE)

    with make_client(make_handler()) as http:
        post(http, 1)
        with open_stream(http, stream=True) as response:
            chunks = response.iter_raw()
            assert next(chunks) == data
            with pytest.raises(httpx2.ReadError) as exc_info:
                next(chunks)
        assert json.loads(exc_info.value.request.content) == {"input": HISTORY, "stream": True}
        assert chain_report(http).requests == 2
    async with make_async_client(make_handler()) as client:
        await post(client, 1)
        async with open_stream(client, stream=True) as response:
            received = response.aiter_raw()
            assert await anext(received) == data
            with pytest.raises(httpx2.ReadError):
                await anext(received)
        assert chain_report(client).requests == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_a_response_that_is_too_large_to_be_read_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    """It is not held back nor collected, and it is no anchor."""
    monkeypatch.setenv("KEDGE_MAX_RESPONSE_BYTES", "1000")
    chunks = [b"data: ", *[b"x" * 999] * 9]
    source = Chunks(*chunks)
    headers = SSE if streaming else {"content-type": "application/json"}
    with make_client(answer_chained(200, stream=source, headers=headers)) as http:
        post(http, 1)
        with open_stream(http, stream=streaming) as response:
            received = response.iter_raw()
            assert next(received) == chunks[0]
            assert source.count < len(chunks)
            assert b"".join(received) == b"".join(chunks[1:])
        report = chain_report(http)
    assert (report.chained, report.healed, report.recent[-1].response_id) == (1, {}, "")
    assert not caplog.records


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("must_judge", [False, True])
def test_compressed_and_endless_responses_are_not_collected(
    monkeypatch: pytest.MonkeyPatch, streaming: bool, must_judge: bool
) -> None:
    """Beyond the limit, also of small events that decompress to more, nothing is held back nor decompressed."""
    monkeypatch.setenv("KEDGE_MAX_RESPONSE_BYTES", "2000000")
    event = b'data: {"type":"response.in_progress","padding":"%b"}\n\n' % (b"x" * 1000)
    content = gzip.compress(event * 20_000 if streaming else b"x" * 20_000_000)
    headers = SSE if streaming else {"content-type": "application/json"}
    headers = {**headers, "content-encoding": "gzip"}
    observer = ResponseObserver(headers, "resp_1", must_judge=must_judge)
    assert observer.feed(content) == ("resend" if must_judge else "release")
    assert observer.finish() is None


@for_each("size", [10_000, 50_000_000])
def test_large_errors_are_passed_on(size: int) -> None:
    """An error that is too large to be the rejection of an anchor is neither collected nor decompressed."""
    content = gzip.compress(os.urandom(min(size, 3_000_000)) + b"x" * size)
    source = Chunks(*(content[at : at + 65_536] for at in range(0, len(content), 65_536)))
    respond = answer_chained(500, stream=source, headers={"content-encoding": "gzip"})
    with make_client(respond) as http:
        post(http, 1)
        with open_stream(http) as response:
            assert source.count * 65_536 < 1_200_000
            assert (response.status_code, b"".join(response.iter_raw())) == (500, content)


def break_chained_streams(code: str, *, in_one_chunk: bool = False) -> Respond:
    """Return a handler whose chained streams end with an error after their first output."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        response = complete(request)
        content = make_events(response)
        if read_anchor(request):
            failed = {**response, "status": "failed", "output": [], "error": None}
            content = b"\n\n".join([*content.split(b"\n\n")[:-2], b""]) + dump_events(
                {"type": "error", "code": code, "message": "The request failed."},
                {"type": "response.failed", "response": failed},
            )
        chunks = [content] if in_one_chunk else content.splitlines(keepends=True)
        return httpx2.Response(200, stream=Chunks(*chunks), headers=SSE)

    return respond


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize(
    ("code", "attempts"), [("previous_response_not_found", 1), ("server_error", 2)]
)
async def test_a_chain_that_fails_after_its_first_output_is_not_repeated(
    code: str, attempts: int, is_read: bool
) -> None:
    """The program gets the error, and its next attempts are sent as written."""
    async with make_async_client(break_chained_streams(code)) as http:
        await post(http, 1, stream=True)
        for number in range(3):
            async with open_stream(http, stream=True) as response:
                received = b""
                async for chunk in response.aiter_raw():
                    received += chunk
                    if not is_read and code.encode() in received and received.endswith(b"\n\n"):
                        break
            assert (code.encode() in received) == (number < attempts)
        assert chain_report(http).chained == attempts


def test_a_chain_that_is_rejected_in_the_chunk_of_its_first_output_is_healed() -> None:
    """Nothing was passed on before the error, so the program does not see it."""
    respond = break_chained_streams("previous_response_not_found", in_one_chunk=True)
    with make_client(respond) as http:
        post(http, 1, stream=True)
        assert "response.completed" in post(http, stream=True).text
        assert chain_report(http).healed == {"rejected": 1}


async def test_a_refused_request_has_its_error_without_credentials() -> None:
    """An error in a body or a stream, and a connection that fails, are in the record; a key in them is not."""
    secret = "sk-planted-key"
    error = {"code": f"bad_{secret}", "message": f"no access with {secret}"}

    def respond(request: httpx2.Request) -> httpx2.Response:
        match read_body(request)["input"][0]["content"]:
            case "refuse":
                return httpx2.Response(401, json={"error": error})
            case "fail":
                event = json.dumps({"type": "error", **error})
                return httpx2.Response(200, text=f"data: {event}\n\n", headers=SSE)
            case _:
                raise httpx2.ConnectError("refused")

    headers = {"authorization": f"Bearer {secret}"}
    async with make_async_client(respond, headers=headers) as http:
        for text in ("refuse", "fail", "break"):
            body = {"model": "m", "input": [{"role": "user", "content": text}], "stream": True}
            with suppress(httpx2.ConnectError):
                await http.post("/responses", json=body)
        report = chain_report(http)
    found = [(each.status, each.is_refused, each.error_code, each.error) for each in report.recent]
    assert found == [
        (401, True, "bad_***", "no access with ***"),
        (200, False, "bad_***", "no access with ***"),
        (0, False, "", "no response (ConnectError)"),
    ]
    assert (report.refused, report.chained) == (1, 0)


async def test_a_cancelled_stream_is_closed_and_reported() -> None:
    """Waiting for the index in a cancelled scope does not leave the connection open."""
    is_closed = asyncio.Event()

    class Endless(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            await asyncio.Event().wait()

        async def aclose(self) -> None:
            is_closed.set()

    def respond(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, stream=Endless(), headers=SSE)

    async with make_async_client(respond, index=BlockingIndex()) as http:
        with CancelScope() as scope:
            async with open_stream(http) as response:
                async for _ in response.aiter_raw():
                    scope.cancel()
        assert is_closed.is_set()
        assert chain_report(http).requests == 1


@for_each("headers", [{}, {"content-type": "text/plain"}])
def test_a_stream_without_its_content_type_is_chained(headers: dict[str, str]) -> None:
    """The stream is recorded, and a chained one is passed on before it is complete."""
    received: list[str] = []

    class Paced(Chunks):
        def __iter__(self) -> Iterator[bytes]:
            yield from super().__iter__()
            received.append("end")

    def respond(request: httpx2.Request) -> httpx2.Response:
        chunks = make_events(complete(request)).splitlines(keepends=True)
        return httpx2.Response(200, stream=Paced(*chunks), headers=headers)

    with make_client(respond) as http:
        for count in (1, 3):
            with open_stream(http, count, stream=True) as response:
                received.append("start")
                list(response.iter_raw())
        assert chain_report(http).chained == 1
    assert received == ["start", "end", "start", "end"]


@for_each("is_stream", [False, True])
def test_a_context_that_is_too_long_on_the_server_is_sent_by_the_program(is_stream: bool) -> None:
    """The server's context has reasoning that the program omits, so the original request may be accepted."""
    error = {"code": "context_length_exceeded", "message": "Your input is too long."}
    failed = {**ANSWER, "id": "resp_2", "status": "failed", "output": [], "error": error}
    sent: list[str | None] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        sent.append(read_anchor(request))
        if sent[-1] != "resp_1":
            return httpx2.Response(200, json=complete(request, f"resp_{len(sent)}"))
        if is_stream:
            event = dump_events({"type": "response.failed", "response": failed})
            return httpx2.Response(200, content=event, headers=SSE)
        return httpx2.Response(400, json={"error": error})

    with make_client(respond) as http:
        post(http, 1)
        for history in (HISTORY, [*HISTORY, *OUTPUT, HISTORY[0]]):
            assert post(http, input=history).json()["output"] == OUTPUT
    assert sent == [None, "resp_1", None, "resp_3"]


def test_a_rejection_with_the_status_of_success_is_healed() -> None:
    """Some gateways send the errors of their upstream with HTTP 200; other errors reach the program."""
    busy = {"error": {"message": "busy", "code": "overloaded"}}
    broken = {"error": {"message": "broken", "code": "context_length_exceeded"}}
    for status, error, healed in ((200, GONE, {"rejected": 1}), (200, busy, {}), (500, broken, {})):
        with make_client(answer_chained(status, json=error)) as http:
            post(http, 1)
            received = post(http).json()
            assert received["output"] == OUTPUT if healed else received == error
            assert chain_report(http).healed == healed
