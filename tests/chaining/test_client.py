"""Tests of `kedge.chain`: histories are sent as deltas, with the same results as without it."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AzureOpenAI, BadRequestError, NotFoundError, OpenAI

from chaining.conftest import MakeClient
from chaining.programs import ask, bodies, check_contexts, message, replay
from for_each import for_each
from kedge.chaining import PASS_THROUGH_REASONS, MemoryIndex, chain, chain_report
from kedge.chaining.report import ChainedRequest, ChainReport
from kedge.engines.response_bytes import LIMIT_VARIABLE
from kedge.errors import InvalidSetting
from kedge.testing import TestServer


def test_a_resent_history_is_sent_as_a_delta(server: TestServer, client: OpenAI) -> None:
    """From the second request on only the new message is sent; a leading system message is covered."""
    history: list[Any] = [message("Be brief.", "system")]
    ask(client, history, "My name is Ada.")
    assert ask(client, history, "What is my name?").output_text == "Your name is Ada."
    assert ask(client, history, "What did I say first?").output_text == (
        'You said first: "My name is Ada."'
    )
    assert [len(body["input"]) for body in bodies(server)] == [2, 1, 1]
    check_contexts(server, [history[:2], history[:4], history[:6]])
    report = chain_report(client)
    assert (report.requests, report.chained) == (3, 2)
    assert report.passed_through == {"new": 1}
    assert report.saved_bytes > 0


def test_a_chain_that_reached_the_limit_of_its_server_starts_anew(
    server: TestServer, make_client: MakeClient
) -> None:
    """An older response within the limit is not continued: each request on it would be longer than the last."""
    client = chain(make_client(), trust="always", max_depth=2)
    history: list[Any] = []
    for number in range(7):
        ask(client, history, f"Question {number}")
    assert [len(body["input"]) for body in bodies(server)] == [1, 1, 1, 7, 1, 1, 13]
    assert chain_report(client).passed_through == {"new": 1, "no_anchor": 2}


def test_a_null_member_counts_as_absent(server: TestServer, client: OpenAI) -> None:
    """The anchor replaces a `previous_response_id` that the program sends as null."""
    history: list[Any] = []
    ask(client, history, "My name is Ada.", previous_response_id=None)
    response = ask(client, history, "What is my name?", previous_response_id=None, store=None)
    assert response.output_text == "Your name is Ada."
    body = server.requests[-1].raw
    assert body.count(b"previous_response_id") == 1
    assert chain_report(client).chained == 1
    assert chain_report(client).healed == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_silently_lost_its_context_is_healed(
    server: TestServer, client: OpenAI, stream: bool
) -> None:
    """A missing `previous_response_id` in the answer is detected before the program gets output."""
    history: list[Any] = []
    ask(client, history, "My name is Ada.")
    server.faults.set("forget_silently,echo=no", times=1)
    answer = ask(client, history, "What is my name?", streaming=stream)
    assert answer.output_text == "Your name is Ada."
    report = chain_report(client)
    assert report.healed == {"forgot": 1}
    assert (report.requests, report.chained) == (2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_healed_request_has_two_records(server: TestServer, client: OpenAI, stream: bool) -> None:
    """Each has the size, the response and the tokens of one request on the wire."""
    history: list[Any] = []
    ask(client, history, "My name is Ada.")
    server.faults.set("forget_silently,echo=no", times=1)
    ask(client, history, "What is my name?", streaming=stream)
    report = chain_report(client)
    posted = [request for request in server.requests if request.method == "POST"]
    assert [(record.sent_bytes, record.response_id) for record in report.recent] == [
        (len(request.raw), request.response_id) for request in posted
    ]
    assert [record.healed for record in report.recent] == ["", "", "forgot"]
    # An answer that was received completely was paid for.
    assert [bool(record.output_tokens) for record in report.recent] == [True, not stream, True]
    assert report.saved_bytes == -report.recent[1].sent_bytes


def test_an_error_of_the_callback_does_not_prevent_healing(
    server: TestServer, client: OpenAI
) -> None:
    """The full history is sent even if the program's function fails for the record of the rejected request."""
    seen: list[ChainedRequest] = []

    def fail(request: ChainedRequest) -> None:
        seen.append(request)
        raise ValueError("a bug of the program")

    history: list[Any] = []
    chain(client, on_request=fail)
    ask(client, history, "My name is Ada.")
    server.forget()
    assert ask(client, history, "What is my name?").output_text == "Your name is Ada."
    assert [each.healed for each in seen] == ["", "", "rejected"]


def test_items_of_a_response_with_the_same_text_are_sent(
    server: TestServer, client: OpenAI
) -> None:
    """A response whose context equals a prefix of the input, and whose items follow it, is no anchor."""
    answers = [client.responses.create(model="practice", input="Hello") for _ in range(2)]
    history: list[Any] = []
    for answer in answers:
        history += [message("Hello"), *replay(answer)]
    ask(client, history, "What did I say first?")
    assert chain_report(client).healed == {"rejected": 1}
    ask(client, history, "What did I say first?")
    assert chain_report(client).chained == 1
    check_contexts(server, [[message("Hello")], [message("Hello")], history[:5], history[:7]])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"store": False}, "not_stored"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [message("One"), {"type": "compaction_trigger"}]}, "compaction"),
        ({"input": 5}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_unsupported_requests_are_passed_through(
    server: TestServer, changes: dict[str, Any], reason: str
) -> None:
    """The server receives the program's bytes unchanged, and the reason is counted."""
    history = [message("One"), message("Two", "assistant"), message("Three")]
    content = json.dumps({"model": "practice", "input": history, **changes}, indent=1).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer k"}
    with httpx2.Client() as http:
        chain(http).post(f"{server.base_url}/responses", content=content, headers=headers)
        assert chain_report(http).passed_through == {reason: 1}
    assert server.requests[-1].raw == content
    assert reason in PASS_THROUGH_REASONS


def test_a_client_that_chains_by_itself_extends_a_known_response(
    server: TestServer, client: OpenAI
) -> None:
    """A program's own chained request is sent as written; a later full history chains to its response."""
    history: list[Any] = []
    first = ask(client, history, "My name is Ada.")
    second = client.responses.create(
        model="practice", input="What is my name?", previous_response_id=first.id
    )
    history += [message("What is my name?"), *replay(second)]
    ask(client, history, "What did I say first?")
    assert bodies(server)[-1]["previous_response_id"] == second.id


def test_a_retry_of_the_client_is_sent_in_full(server: TestServer, make_client: MakeClient) -> None:
    """After a failed chained request, the SDK's retry sends the program's original request."""
    client = chain(make_client(max_retries=2), trust="always")
    history: list[Any] = []
    ask(client, history, "One")
    server.faults.set("status=500,retry_after=0", times=1)
    ask(client, history, "Two")
    assert ["previous_response_id" in body for body in bodies(server)] == [False, True, False]
    assert chain_report(client).passed_through["retry"] == 1


@for_each(
    ("one", "other", "shared"),
    [
        ({"key": "1"}, {"key": "2"}, False),
        ({}, {"organization": "2"}, False),
        ({}, {"api-key": "2"}, False),
        ({"cookie": "session=1"}, {"cookie": "session=2"}, False),
        ({"cookie": "__cf_bm=1; session=1; _cfuvid=1"}, {"cookie": "session=1; __cf_bm=2"}, True),
        ({}, {"cookie": "AWSALB=2"}, True),
        ({"ocp-apim-subscription-key": "1"}, {"ocp-apim-subscription-key": "2"}, False),
        ({}, {"x-goog-api-key": "2"}, False),
        ({"x-request-id": "1"}, {"x-request-id": "2"}, True),
        ({"query": "Code=1"}, {"query": "Code=2"}, False),
        ({"login": "ada:1"}, {"login": "bob:2"}, False),
        # The HTTP client replaces the API key by the login.
        ({"login": ":a%3Ab%40c", "key": "1"}, {"login": ":a%3Ab%40c", "key": "2"}, True),
    ],
)
def test_credentials_identify_an_account(
    server: TestServer,
    make_client: MakeClient,
    one: dict[str, str],
    other: dict[str, str],
    shared: bool,
) -> None:
    """Credentials in headers and in the URL separate accounts; cookies of load balancers change at any time."""
    index = MemoryIndex()
    history = list[Any]()
    chained: list[int] = []
    for named in (one, other):
        headers = dict(named)
        query, login, key = (headers.pop(name, "") for name in ("query", "login", "key"))
        options: Any = {"default_query": {query[:4]: query[5:]}} if query else {}
        options["organization"] = headers.pop("organization", None)
        client = make_client(key or "key", default_headers=headers, **options)
        if login:
            client.base_url = server.base_url.replace("//", f"//{login}@")
        ask(chain(client, index=index), history, "Hello")
        chained.append(chain_report(client).chained)
    assert chained == [0, shared]


@pytest.mark.parametrize(("method", "chained"), [("retrieve", 1), ("delete", 0)])
def test_a_deleted_response_is_not_used(client: OpenAI, method: str, chained: int) -> None:
    """DELETE through the client removes the response from the index, and GET does not change it."""
    history: list[Any] = []
    first = ask(client, history, "One")
    getattr(client.responses, method)(first.id)
    ask(client, history, "Two")
    assert chain_report(client).healed == {}
    assert chain_report(client).chained == chained


def test_streams_and_raw_responses_match_the_server(make_client: MakeClient) -> None:
    """Events and raw responses are the same with and without Kedge."""
    direct = make_client()
    chained = chain(make_client(), trust="always")
    texts: list[list[str]] = []
    for client in (direct, chained):
        history: list[Any] = [message("One")]
        history += replay(client.responses.create(model="practice", input=history))
        history.append(message("Count to 5"))
        with client.responses.with_streaming_response.create(
            model="practice", input=history, stream=True
        ) as response:
            lines = [line for line in response.iter_lines() if line.startswith("event:")]
        raw = client.responses.with_raw_response.create(model="practice", input=history)
        texts.append([*lines, raw.parse().output_text])
        assert raw.elapsed > timedelta(0)
        assert client.responses.parse(model="practice", input=history).output_text
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "settings",
    [{"trust": "trust"}, {"retention": -1}, {"retention": float("nan")}, {"max_depth": 0}],
)
def test_an_invalid_setting_is_rejected(settings: dict[str, Any], tmp_path: Path) -> None:
    """The client is not changed, and an opened store is closed."""
    with OpenAI(api_key="k") as client:
        for store in (None, str(tmp_path / "index.db")):
            with pytest.raises(InvalidSetting, match=next(iter(settings))):
                chain(client, store=store, **settings)
        with pytest.raises(TypeError, match="not chained"):
            chain_report(client)


def test_an_invalid_setting_of_the_environment_is_rejected_before_requests(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error when a client is chained, and none of an answer that was requested already."""
    request: Any = {"model": "practice", "input": "Hello"}
    with OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        with monkeypatch.context() as patched:
            patched.setenv(LIMIT_VARIABLE, "10MB")
            with pytest.raises(InvalidSetting, match=LIMIT_VARIABLE):
                chain(client)
        chain(client)
        monkeypatch.setenv(LIMIT_VARIABLE, "10MB")
        assert client.responses.create(**request).output_text


def test_azure_clients_and_other_objects() -> None:
    """Azure clients are chained, and objects that are not clients are rejected."""
    settings: Any = {"azure_endpoint": "https://example.invalid", "api_version": "2026-01-01"}
    with AzureOpenAI(api_key="k", **settings) as azure:
        assert chain(azure) is azure
        assert chain_report(azure).requests == 0
    with pytest.raises(TypeError, match="accepts an OpenAI client or an httpx2 client"):
        chain(object())


def test_the_environment_variable_disables_chaining(
    server: TestServer, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ENABLE_RESPONSE_BOUNDARY_TRACKING=disabled` disables chaining for clients."""
    history: list[Any] = []
    ask(client, history, "One")
    monkeypatch.setenv("ENABLE_RESPONSE_BOUNDARY_TRACKING", "disabled")
    ask(client, history, "Two")
    assert chain_report(client).passed_through["switched_off"] == 1


CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
MISSING = {"type": "reasoning", "id": "rs_1", "summary": []}


@pytest.mark.parametrize(
    ("items", "error", "match"),
    [
        ([CALL], BadRequestError, "No tool output found for function call call_1"),
        ([MISSING, message("Hello", "assistant")], NotFoundError, "Item with id 'rs_1' not found"),
    ],
)
def test_an_invalid_request_of_the_program_is_not_evidence(
    server: TestServer, client: OpenAI, items: list[Any], error: type[Exception], match: str
) -> None:
    """A call without output and a missing item are rejected as without Kedge; valid requests are still chained."""
    history: list[Any] = []
    ask(client, history, "My name is Ada.")
    for _ in range(3):
        with pytest.raises(error, match=match):
            ask(client, [*history, *items], "And?")
    assert ask(client, history, "What is my name?").output_text == "Your name is Ada."
    assert bodies(server)[-1]["previous_response_id"]


def test_conversations_that_a_restart_ended_are_chained_again(
    server: TestServer, client: OpenAI
) -> None:
    """All responses that were lost at the same time count as one loss."""
    histories: list[list[Any]] = [[message(f"I am {name}.")] for name in ("Ada", "Bob", "Cy")]
    for history in histories:
        ask(client, history, "Say 1")
    server.forget()
    for number in (2, 3):
        for history in histories:
            ask(client, history, f"Say {number}")
    report = chain_report(client)
    assert report.passed_through == {"new": 3}
    assert report.healed == {"rejected": 3}
    assert report.chained == 3


def test_a_report_is_printed_as_a_summary() -> None:
    """The text of a report has its totals and the reasons, without the requests."""
    text = str(ChainReport(5, 2, 1, {"new": 2, "edited": 1}, {"gone": 1}, 1, 2_000, 9_000, ()))
    assert text.startswith("2 of 5 requests chained, 2 kB of 9 kB were sent")
    assert all(
        each in text
        for each in ("2 new, 1 edited", "1 gone", "refused by the server: 1", "stored context: 1")
    )
    assert len(str(ChainReport(0, 0, 0, {}, {}, 0, 0, 0, ())).splitlines()) == 1
