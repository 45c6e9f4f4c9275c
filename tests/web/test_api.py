"""Tests of the JSON API: conversations, runs, chains, plans and statistics."""

import json
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

from for_each import for_each
from kedge.web import openapi
from server.waiting import TIMEOUT, SlowCall, wait_until
from web.conftest import PageServer


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_message_is_answered(page: PageServer) -> None:
    """The reply has the answer, the plan, the usage and the model."""
    created = page.post("/api/conversations", system="Be brief.")
    reply = page.post(f"/api/conversations/{created['id']}/runs", message="What is 2+3?")
    assert reply["text"] == "2+3 = 5."
    assert reply["plan"]["sent_blocks"] == 1
    assert reply["usage"]["output_tokens"] > 0
    assert (reply["model"], reply["status"], reply["healed"]) == ("practice", "completed", [])


def test_conversation_is_created_renamed_and_listed(empty_page: PageServer) -> None:
    """The list has the title, the tags, the expiry and the summary; a conversation is read as it is listed."""
    created = empty_page.post("/api/conversations", title="Sums", tags=["work"], ttl=60.0)
    path = f"/api/conversations/{created['id']}"
    empty_page.post(f"{path}/runs", message="What is 2+3?")
    empty_page.client.patch(path, json={"title": "Adding"})
    listed = empty_page.get("/api/conversations")
    assert listed["total"] == 1
    (row,) = listed["data"]
    assert (row["title"], row["tags"], row["responses"]) == ("Adding", ["work"], 1)
    assert (row["first_words"], row["last_answer"]) == ("What is 2+3?", "2+3 = 5.")
    assert (row["status"], created["ttl"], row["ttl"]) == ("active", 60.0, 60.0)
    assert empty_page.get(path) == row


def test_run_settings_are_stored_with_response(page: PageServer) -> None:
    """Settings are sent and shown in the response tree."""
    name = page.create_conversation("What is 2+3?")
    options = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 500, "effort": "low"}
    path = f"/api/conversations/{name}"
    page.post(f"{path}/runs", message="Hello", reasoning={"summary": "auto"}, **options)
    first, last = (node["response"] for node in page.get(f"{path}/tree")["nodes"])
    assert first["settings"] == {}
    reasoning = {"summary": "auto", "effort": "low"}
    expected = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 500, "reasoning": reasoning}
    assert last["settings"] == expected


def test_answer_that_was_cut_off_is_an_error(page: PageServer) -> None:
    """The limit of output tokens ends the answer, which is 422."""
    path = f"/api/conversations/{page.create_conversation()}/runs"
    body = {"message": "Write 100 words", "max_output_tokens": 16}
    rejected = page.client.post(path, json=body)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (422, "incomplete")


def test_last_blocks_are_read_without_the_others(page: PageServer) -> None:
    """The last blocks are those at the end of all."""
    path = f"/api/conversations/{page.create_conversation('One', 'Two')}/turns"
    assert page.get(path, last=3)["blocks"] == page.get(path)["blocks"][-3:]


def test_repeated_run_on_a_branch_does_not_move_the_head(page: PageServer) -> None:
    """A run repeated with its idempotency key returns the stored answer; another message with it is a conflict."""
    name = page.create_conversation("First", "Second")
    at = page.get(f"/api/conversations/{name}/tree")["nodes"][0]["node"]
    path = f"/api/conversations/{name}/runs"
    first = page.post(path, message="Elsewhere", at=at, key="once")
    repeated = page.post(path, message="Elsewhere", at=at, key="once")
    assert (first["stored"], repeated["stored"]) == (False, True)
    assert page.get(f"/api/conversations/{name}")["head"] == first["node"] == repeated["node"]
    other = page.client.post(path, json={"message": "Something else", "at": at, "key": "once"})
    assert other.status_code == 409


def test_run_can_branch_from_any_response(page: PageServer) -> None:
    """A run can branch at a response id or a node, and the other branches stay in the response tree."""
    name = page.create_conversation("First", "Second", "Third")
    first = page.get(f"/api/conversations/{name}/tree")["nodes"][0]
    path = f"/api/conversations/{name}/runs"
    by_id = page.post(
        path, message="How many?", previous_response_id=first["response"]["response_id"]
    )
    assert by_id["plan"]["anchor"] == first["response"]["response_id"]
    by_node = page.post(path, message="What did I say last?", at=first["node"])
    tree = page.get(f"/api/conversations/{name}/tree")
    below = [node["node"] for node in tree["nodes"] if node["parent"] == first["node"]]
    assert len(below) == 3
    assert {by_id["node"], by_node["node"]} < set(below)
    assert tree["head"] == by_node["node"]
    assert len(tree["nodes"]) == 5


def test_run_can_be_streamed(page: PageServer) -> None:
    """The stream has the plan, the text in deltas and the stored reply."""
    path = f"/api/conversations/{page.create_conversation('Hello')}/runs"
    body = {"message": "What is 2+3?", "stream": True}
    with page.client.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = parse_events("".join(answer.iter_text()))
    assert events[0]["type"] == "plan"
    assert "".join(event["delta"] for event in events if event["type"] == "text") == "2+3 = 5."
    assert events[-1]["type"] == "done"
    assert events[-1]["reply"]["text"] == "2+3 = 5."
    assert page.client.get(events[-1]["url"]).status_code == 200


def test_tool_calls_are_streamed(page: PageServer) -> None:
    """The stream has the plan of each request and the tool calls as they run; each response is a node."""
    name = page.create_conversation()
    path = f"/api/conversations/{name}"
    body = {"message": "Please call add with a=2 and b=3", "stream": True}
    events = parse_events(page.client.post(f"{path}/runs", json=body).text)
    types = [event["type"] for event in events]
    assert types.count("plan") == 2
    assert {"tool", "tool_done", "done"} <= set(types)
    assert len(page.get(f"{path}/tree")["nodes"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_answer_has_the_reasoning_text(page: PageServer, *, stream: bool) -> None:
    """The reply, its event and a stored answer have the reasoning; a provider that hides it gives an empty text."""
    path = f"/api/conversations/{page.create_conversation()}"
    body = {
        "message": "Think about two.",
        "reasoning": {"summary": "auto"},
        "key": "k",
        "stream": stream,
    }

    def send(body: dict[str, Any]) -> Any:
        answer = page.client.post(f"{path}/runs", json=body)
        return parse_events(answer.text)[-1]["reply"] if stream else answer.json()

    reply = send(body)
    blocks = page.get(f"{path}/turns")["blocks"]
    (stored,) = [each for each in blocks if each["kind"] == "reasoning"]
    assert reply["reasoning"] == "\n\n".join(stored["summary"]) != ""
    again = send(body)
    assert (again["stored"], again["reasoning"]) == (True, reply["reasoning"])
    assert send({"message": "Think about three.", "stream": stream})["reasoning"] == ""
    schema = page.get("/api/openapi.json")["components"]["schemas"]["ReplyShape"]
    assert "reasoning" in schema["required"]


def test_past_and_next_plans_are_available(page: PageServer) -> None:
    """Plans of sent requests and of the next one are available, also from an earlier response."""
    name = page.create_conversation("First", "Second")
    head = page.get(f"/api/conversations/{name}/tree")["head"]
    plan = page.get(f"/api/conversations/{name}/plans/{head}")
    assert plan["sent_blocks"] == 1
    assert plan["explanation"].startswith("Chained on resp_")
    future = page.get(f"/api/conversations/{name}/plan", message="Third")
    assert (future["sent_blocks"], future["full_blocks"]) == (1, 5)
    earlier = page.get(f"/api/conversations/{name}/plan", at=plan["anchor"], message="x")
    assert earlier["anchor"] == plan["anchor"]
    assert page.client.get(f"/api/conversations/{name}/plans/1").status_code == 404


def test_plans_give_the_reason_for_an_older_anchor(empty_page: PageServer) -> None:
    """The next plan, the record of the request and its card say that the last answer came without an id."""
    page, name = empty_page, empty_page.create_conversation("First")
    path = f"/api/conversations/{name}"
    page.faults.set("omit_response_id", times=1)
    unnamed = page.post(f"{path}/runs", message="Second")
    words = "the last answer, because it came without an id."
    rejected = [{"response_id": "", "reason": "no_id", "words": words}]
    plan = page.get(f"{path}/plan", message="Third")
    assert (plan["rejected"], bool(plan["anchor"])) == (rejected, True)
    assert f"Not used: {words}" in plan["explanation"]
    node = page.post(f"{path}/runs", message="Third")["node"]
    assert page.get(f"{path}/plans/{node}")["rejected"] == rejected
    assert words in page.client.get(f"/conversations/{name}/plans/{node}").text
    card = page.client.get(f"/conversations/{name}/plans/{unnamed['node']}").text
    assert "Later requests cannot continue the answer, because it came without an id." in card


def test_fork_is_a_separate_conversation(page: PageServer) -> None:
    """A fork at a response, node or block shares the messages before it and continues separately."""
    name = page.create_conversation("First", "Second", title="Origin")
    first = page.get(f"/api/conversations/{name}/tree")["nodes"][0]
    created = page.post(f"/api/conversations/{name}/fork", at=first["node"])
    assert (created["forked_from"], created["forked_at"]) == (name, first["node"])
    reply = page.post(f"/api/conversations/{created['id']}/runs", message="What did I say first?")
    assert reply["text"] == 'You said first: "First"'
    assert reply["plan"]["anchor"] == first["response"]["response_id"]
    assert page.get(f"/api/conversations/{name}")["head"] != reply["node"]
    path = f"/api/conversations/{name}"

    def fork(**at: Any) -> list[Any]:
        fork_id = page.post(f"{path}/fork", **at)["id"]
        return [block["id"] for block in page.get(f"/api/conversations/{fork_id}/turns")["blocks"]]

    ids = [block["id"] for block in page.get(f"{path}/turns")["blocks"]]
    assert fork(previous_response_id=first["response"]["response_id"]) == ids[:2]
    assert fork(block=ids[2]) == ids[:3]
    assert fork() == ids
    assert page.client.post(f"{path}/fork", json={"block": "none"}).status_code == 404


def test_conversations_are_filtered_and_sorted(empty_page: PageServer) -> None:
    """The list has those with a title or a message, selected by text, status, tag and model, in pages."""
    empty_page.post("/api/conversations")
    empty_page.create_conversation("Tell me about the anchor", title="Boats")
    empty_page.post("/api/conversations", title="Trains", tags=["work"])
    name = empty_page.create_conversation("Tell me about wings", title="Planes")
    empty_page.client.patch(f"/api/conversations/{name}", json={"archived": True})
    queries: list[tuple[dict[str, Any], list[str]]] = [
        ({"order": "title"}, ["Boats", "Trains"]),
        ({"q": "anchor"}, ["Boats"]),
        ({"show": "archived"}, ["Planes"]),
        ({"show": "all", "order": "title", "limit": 2, "offset": 1}, ["Planes", "Trains"]),
        ({"show": "failed"}, []),
        ({"tag": "work"}, ["Trains"]),
        ({"model": "practice"}, ["Boats"]),
    ]
    for query, titles in queries:
        rows = empty_page.get("/api/conversations", **query)["data"]
        assert [row["title"] for row in rows] == titles, query
    html = empty_page.client.get("/?tag=work").text
    assert "Trains" in html
    assert "Boats" not in html


@for_each(
    ("path", "body", "status", "code"),
    [
        ("/api/conversations", {"titel": "x"}, 422, "invalid"),
        ("/api/conversations", {"tags": ["a"] * 51}, 422, "invalid"),
        ("/api/conversations/none/runs", {"message": "x"}, 404, "not_found"),
        ("/api/conversations/none/runs", {"message": "x", "temperature": 3}, 422, "invalid"),
        ("/api/nowhere", {}, 404, "not_found"),
        ("/api/analytics", {}, 405, "not_allowed"),
    ],
)
def test_errors_have_one_shape(
    page: PageServer, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    """An error has a status, a code for programs and a readable message."""
    answer = page.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_bodies_are_json_and_bounded(page: PageServer) -> None:
    """Other content types are rejected, so that foreign forms cannot post, and the size is limited."""
    path = "/api/conversations"
    assert page.client.post(path, content=b"title=x").status_code == 415
    form = {"content-type": "text/plain"}
    assert page.client.post(path, content=b"{}", headers=form).status_code == 415
    kind = {"content-type": "application/json"}
    assert page.client.post(path, content=b"{", headers=kind).status_code == 422
    compressed = {**kind, "content-encoding": "gzip"}
    assert page.client.post(path, content=b"{}", headers=compressed).status_code == 415
    flood = (b" " * 100_000 for _ in range(30))
    assert page.client.post(path, content=flood, headers=kind).status_code == 413
    tags = {"title": "x", "tags": ["x"] * 20_000}
    rejected = page.client.post(path, json=tags)
    assert rejected.status_code == 413
    assert "20,000 JSON values" in rejected.json()["error"]["message"]


def test_large_bodies_and_answers_are_handled_beside_other_requests(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message with attachments is parsed, and a long conversation encoded, while the page answers."""
    name = page.create_conversation("Hello")
    parse, encode = openapi._parse_body, openapi._encode_answer
    slow_parser, slow_encoder = SlowCall(parse), SlowCall(encode)
    monkeypatch.setattr(openapi, "_parse_body", slow_parser)
    monkeypatch.setattr(openapi, "LARGE_BYTES", 1_000)
    picture = "data:image/png;base64," + b64encode(b"\x89PNG" + b"x" * 1_000).decode()
    message = {"message": "Look", "attachments": [{"data": picture}]}
    path = f"/api/conversations/{name}"
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(page.client.post, f"{path}/runs", json=message)
        wait_until(slow_parser.started.is_set)
        assert page.client.get("/api/choices").status_code == 200
        slow_parser.may_end.set()
        assert sent.result(TIMEOUT).status_code == 200
        monkeypatch.setattr(openapi, "_encode_answer", slow_encoder)
        read = threads.submit(page.client.get, f"{path}/turns")
        wait_until(slow_encoder.started.is_set)
        monkeypatch.setattr(openapi, "_encode_answer", encode)
        assert page.client.get("/api/choices").status_code == 200
        slow_encoder.may_end.set()
        assert picture in read.result(TIMEOUT).text
    assert slow_parser.was_stopped
    assert slow_encoder.was_stopped


def test_export_has_all_messages(page: PageServer) -> None:
    """The export has all messages as JSON lines, also of a conversation whose id no header can have."""
    name = page.create_conversation("What is 2+3?")
    answer = page.client.get(f"/api/conversations/{name}/export")
    assert answer.headers["content-disposition"] == f"attachment; filename*=UTF-8''{name}.jsonl"
    assert "What is 2+3?" in answer.text
    assert all(isinstance(json.loads(line), dict) for line in answer.text.splitlines())
    for name in ("разговор", "two\nlines", 'with "quotes"', "a/b", "a%2Fb"):
        page.run(lambda service, name=name: service.store.create(id=name))
        quoted = quote(name, safe="")
        answer = page.client.get(f"/api/conversations/{quoted}/export")
        assert answer.status_code == 200
        assert answer.headers["content-disposition"].endswith(f"{quoted}.jsonl")


def test_paths_and_methods_without_a_route(page: PageServer) -> None:
    """The ``allow`` header lists the methods of a path; no route has a number that Python does not convert."""
    for path, allowed in (
        ("/api/conversations", "GET, HEAD, POST"),
        ("/api/conversations/x", "DELETE, GET, HEAD, PATCH"),
        ("/login", "GET, HEAD, POST"),
    ):
        answer = page.client.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    for path in ("/api/requests", "/api/conversations/x/plans", "/requests"):
        assert page.client.get(f"{path}/{'9' * 5000}").status_code == 404


def test_chains_and_turns_are_read_in_pages(page: PageServer) -> None:
    """Each page of a response tree or a Turn has the total count."""
    name = page.create_conversation("One", "Two", "Three")
    path = f"/api/conversations/{name}"
    complete = page.get(f"{path}/tree")
    assert (complete["total"], complete["has_more"]) == (3, False)
    first = page.get(f"{path}/tree", limit=2)
    assert first["has_more"]
    rest = page.get(f"{path}/tree", limit=2, after=first["nodes"][-1]["node"])
    assert not rest["has_more"]
    assert first["nodes"] + rest["nodes"] == complete["nodes"]
    blocks = page.get(f"{path}/turns")
    assert (blocks["offset"], blocks["total"]) == (0, 6)
    part = page.get(f"{path}/turns", limit=2, offset=3)
    assert (part["blocks"], part["offset"]) == (blocks["blocks"][3:5], 3)
    assert page.get(f"{path}/turns", last=2)["offset"] == 4


def test_api_has_the_data_of_the_page(empty_page: PageServer) -> None:
    """The API has comparisons, statistics by time and conversation, tags and models."""
    name = empty_page.create_conversation("One", "Two", title="Numbers")
    path = f"/api/conversations/{name}"
    empty_page.client.patch(path, json={"tags": ["work"]})
    first, second = (node["node"] for node in empty_page.get(f"{path}/tree")["nodes"])
    other = empty_page.post(f"{path}/runs", message="Three", at=first)["node"]
    comparison = empty_page.get(f"{path}/compare", left=second, right=other)
    assert comparison["common_count"] == 2
    texts = [(row["kind"], [each["text"] for each in row["left"]]) for row in comparison["rows"]]
    assert ("changed", ["Two"]) in texts
    assert empty_page.get("/api/analytics", until=1.0)["requests"]["total"] == 0
    buckets = empty_page.get("/api/analytics/over-time", buckets=4)["data"]
    assert sum(each["requests"] for each in buckets) == 3
    (row,) = empty_page.get("/api/analytics/conversations")["data"]
    assert (row["id"], row["title"], row["requests"], row["chained"]) == (name, "Numbers", 3, 2)
    choices = empty_page.get("/api/choices")
    assert choices == {"tags": ["work"], "models": ["practice"], "choices": ["practice"]}
    html = empty_page.client.get("/dashboard").text
    assert "By conversation" in html
    assert f'href="/conversations/{name}"' in html


def test_settings_of_a_conversation_are_changed(empty_page: PageServer) -> None:
    """Mode, retention and expiry of a conversation are changed for its next run; null is the default."""
    created = empty_page.post("/api/conversations", mode="stateless", retention=600)
    path = f"/api/conversations/{created['id']}"
    assert (created["mode"], created["retention"], created["ttl"]) == ("stateless", 600, None)
    empty_page.post(f"{path}/runs", message="My name is Ada.")
    changed = empty_page.client.patch(path, json={"mode": None, "ttl": 3600}).json()
    assert (changed["mode"], changed["retention"], changed["ttl"]) == (None, 600, 3600)
    empty_page.post(f"{path}/runs", message="What is my name?")
    last = empty_page.post(f"{path}/runs", message="And now?")
    assert last["plan"]["mode"] == "chained"
    assert last["plan"]["anchor"]
    kept = empty_page.client.patch(path, json={"title": None, "retention": None}).json()
    assert (kept["title"], kept["retention"], kept["ttl"]) == ("", None, 3600)
    empty_page.client.patch(path, json={"mode": "stateless"})
    assert empty_page.post(f"{path}/runs", message="Hello")["plan"]["mode"] == "stateless"
    for wrong in ({"mode": "private"}, {"retention": -1}, {"ttl": "soon"}, {"head": 1}):
        assert empty_page.client.patch(path, json=wrong).status_code == 422
