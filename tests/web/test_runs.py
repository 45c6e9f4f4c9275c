"""Runs of the API: they continue without a client and can be followed, stopped and resumed."""

from typing import Any

import httpx2

from for_each import for_each
from kedge.store import RequestRecord
from kedge.turns import tool_call, user
from kedge.web.runs import Run, RunRegistry
from kedge.web.service import ConversationService
from server.gated_model import GatedModel
from server.waiting import wait_until
from web.conftest import PageServer
from web.test_api import parse_events


def start_run(page: PageServer, name: str, message: str, **members: Any) -> str:
    """Start a run, read its first text and close the connection; return the id of its run."""
    body = {"message": message, "stream": True, **members}
    path = f"/api/conversations/{name}/runs"
    with page.client.stream("POST", path, json=body) as answer:
        _read_first_text(answer)
        return answer.headers["x-kedge-run"]


def _read_first_text(answer: httpx2.Response) -> None:
    for line in answer.iter_lines():
        if '"type":"text"' in line:
            return
    raise AssertionError("the stream ended without a text")


def test_run_continues_without_its_client(gated: PageServer, gate: GatedModel) -> None:
    """After a client disconnects, another client receives all events from the first one on."""
    name = gated.create_conversation()
    run = start_run(gated, name, "wait for me")
    runs = gated.get(f"/api/conversations/{name}/runs")
    found = [(each["id"], each["status"], each["message"]) for each in runs["data"]]
    assert found == [(run, "running", "wait for me")]
    assert 'data-do="resume"' not in gated.client.get(f"/conversations/{name}").text
    for path in (f"/api/conversations/{name}/runs/{run}", "/dashboard/live"):
        head = gated.client.head(path)  # ends at once, so that its connection can be used again
        assert head.status_code == 200
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
    gate.open_gate()
    events = parse_events(gated.client.get(f"/api/conversations/{name}/runs/{run}").text)
    assert "".join(each.get("delta", "") for each in events) == "answer to wait for me"
    assert events[-1]["type"] == "done"
    runs = gated.get(f"/api/conversations/{name}/runs")
    assert runs == {"head": events[-1]["reply"]["node"], "data": []}
    assert gate.cancelled == []


async def test_finished_runs_are_dropped_above_the_limits() -> None:
    """The oldest ones are dropped, by their number and by their events; the newest can always be followed."""
    registry = RunRegistry(max_finished=4, max_finished_events=100)

    async def drive(number: int) -> Run:
        async def work(run: Run) -> dict[str, Any]:
            for _ in range(number - 1):
                run.publish({"type": "text"})
            return {}

        async def find_url(_: Run) -> str:
            return ""

        run = registry.start(Run("c", 0, "x"), work, find_url)
        await run.wait()
        return run

    small = [await drive(1) for _ in range(5)]
    assert [registry.get("c", run.id) is run for run in small] == [False, True, True, True, True]
    large = [await drive(60), await drive(60), await drive(500)]
    assert [registry.get("c", run.id) is run for run in large] == [False, False, True]
    assert len([event async for event in large[-1].follow()]) == 500


def test_stopped_run_stores_partial_answer(gated: PageServer, gate: GatedModel) -> None:
    """The partial answer is a node beside the head, and the model is cancelled."""
    name = gated.create_conversation("Hello")
    path = f"/api/conversations/{name}"
    head = gated.get(path)["head"]
    run = f"{path}/runs/{start_run(gated, name, 'wait for me')}"
    assert gated.post(f"{run}/stop")["status"] == "cancelled"
    last = parse_events(gated.client.get(run).text)[-1]
    assert last["type"] == "cancelled"
    tree = gated.get(f"{path}/tree")
    assert tree["head"] == head
    stopped = tree["nodes"][-1]
    assert (stopped["marks"], stopped["response"]["status"]) == (["cancelled"], "cancelled")
    assert last["url"] == f"/conversations/{name}?at={stopped['node']}"
    blocks = gated.get(f"{path}/turns", at=stopped["node"])["blocks"]
    assert blocks[-1]["parts"][0]["text"] == "answer "
    assert "This answer was stopped." in gated.client.get(f"/conversations/{name}").text
    wait_until(lambda: gate.cancelled == ["wait for me"])


def test_stopped_question_is_sent_again(gated: PageServer, gate: GatedModel) -> None:
    """It is answered after the head, once unless it is restarted; the partial answer is no anchor."""
    name = gated.create_conversation("Hello")
    path = f"/api/conversations/{name}"
    gated.post(f"{path}/runs/{start_run(gated, name, 'wait for me')}/stop")
    question = gated.get(f"{path}/tree")["nodes"][-1]["node"] - 1
    gate.open_gate()
    resumed = gated.post(f"{path}/resume", node=question)
    assert resumed["text"] == "answer to wait for me"
    assert resumed["plan"]["sent_blocks"] == 1
    again = gated.post(f"{path}/resume", node=question, restart=False)
    restarted = gated.post(f"{path}/resume", node=question, restart=True)
    assert again["node"] == resumed["node"] != restarted["node"]
    assert "This answer was stopped." not in gated.client.get(f"/conversations/{name}").text


def test_scheduled_deletion_stops_a_run_and_keeps_its_answer(
    gated: PageServer, gate: GatedModel
) -> None:
    """No message follows until the deletion is undone; the partial answer of the run is there then."""
    name = gated.create_conversation()
    start_run(gated, name, "wait for it")
    path = f"/api/conversations/{name}"
    assert gated.client.delete(f"{path}?undo=3600").status_code == 204
    wait_until(lambda: gate.cancelled)
    for method, where, body in (
        ("POST", "runs", {"message": "Again"}),
        ("POST", "fork", {}),
        ("POST", "resume", {"node": 2}),
        ("POST", "edit", {"block": "b", "text": "x"}),
    ):
        answer = gated.client.request(method, f"{path}/{where}", json=body)
        assert answer.status_code == 404, where
        assert "is about to be deleted" in answer.json()["error"]["message"]
    gated.post(f"{path}/restore")
    kinds = [node["response"]["status"] for node in gated.get(f"{path}/tree")["nodes"]]
    assert kinds == ["cancelled"]


def test_deleted_conversation_stops_its_run(gated: PageServer, gate: GatedModel) -> None:
    """Deleting a conversation cancels its model call, not that of another one; nothing is written afterwards."""
    name, other = gated.create_conversation(), gated.create_conversation()
    run = start_run(gated, name, "wait for me")
    start_run(gated, other, "wait for me as well")
    assert gated.client.delete(f"/api/conversations/{name}").status_code == 204
    events = parse_events(gated.client.get(f"/api/conversations/{name}/runs/{run}").text)
    assert events[-1]["type"] == "cancelled"
    wait_until(lambda: gate.cancelled == ["wait for me"])
    assert [each["id"] for each in gated.get("/api/conversations", show="all")["data"]] == [other]
    gate.open_gate()


@for_each(("is_stopped", "status"), [(False, "pending"), (True, "cancelled")])
def test_run_ended_during_tool_call_can_be_continued(
    page: PageServer, *, is_stopped: bool, status: str
) -> None:
    """The page, the API and `pending()` agree that a question whose tool call has no result is unanswered."""
    name = page.create_conversation("Hello")

    async def interrupt(service: ConversationService) -> int:
        store = service.store
        row = await store.conversation(name)
        head = await store.node(row, row.head)
        question = await store.append(row, head, [user("Add 1 and 2")], kind="asked")
        call = tool_call("add", {"a": 1, "b": 2}, call_id="call_1")
        response = RequestRecord(
            provider="practice", scope="s", model="practice", created_at=head.created_at
        )
        called = await store.append(row, question, [call], kind="answered", response=response)
        if is_stopped:
            await store.append(row, called, [], kind="failed")
        assert [each.id for each in await store.pending(row)] == [question.id]
        return question.id

    question = page.run(interrupt)
    resume = f'data-do="resume" data-node="{question}"'
    assert page.get(f"/api/conversations/{name}")["status"] == status
    html = page.client.get(f"/conversations/{name}").text
    assert f'class="chip {status}"' in html
    assert resume in html
    marks = page.get(f"/api/conversations/{name}/tree")["nodes"][-1]["marks"]
    assert marks == ["cancelled"] * is_stopped
    assert page.post(f"/api/conversations/{name}/resume", node=question)["text"]
    assert page.get(f"/api/conversations/{name}")["status"] == "active"
    assert resume not in page.client.get(f"/conversations/{name}").text


def test_unknown_runs_and_questions_are_rejected(page: PageServer) -> None:
    """An unknown run or node is not found, and a node that is not a question cannot be resumed."""
    name = page.create_conversation("Hello")
    path = f"/api/conversations/{name}"
    assert page.client.get(f"{path}/runs/run_none").status_code == 404
    assert page.client.post(f"{path}/runs/run_none/stop").status_code == 404
    assert page.client.get("/api/conversations/none/runs").status_code == 404
    assert page.client.post(f"{path}/resume", json={"node": 10**6}).status_code == 404
    head = page.get(path)["head"]
    wrong = page.client.post(f"{path}/resume", json={"node": head})
    assert "is not a question" in wrong.json()["error"]["message"]


def test_failed_message_offers_retry_and_edit(empty_page: PageServer) -> None:
    """A failed message is stored, and shown at its position with the reason and the actions retry and edit."""
    name = empty_page.create_conversation("Hello")
    path = f"/api/conversations/{name}/runs"
    empty_page.faults.set("status=400", times=1)
    rejected = empty_page.client.post(path, json={"message": "Go on"})
    assert rejected.status_code == 502
    assert rejected.json()["error"]["message"]
    empty_page.faults.set("status=500")
    failed = parse_events(
        empty_page.client.post(path, json={"message": "Go on", "stream": True}).text
    )
    assert failed[-1]["type"] == "error"
    empty_page.faults.clear()
    marks = [node["marks"] for node in empty_page.get(f"/api/conversations/{name}/tree")["nodes"]]
    assert marks == [["head"], ["failed"], ["failed"]]
    html = empty_page.client.get(f"/conversations/{name}").text
    assert 'data-do="retry"' in html
    assert 'data-do="edit"' in html
    assert 'data-do="resume"' not in html
    assert empty_page.client.get(failed[-1]["url"]).text.count("The request failed.") == 1
