"""Edits through the API and the page: allowed for every message, marked, and checked against the head."""

import re
from pathlib import Path

from kedge.conversation import Conversation
from kedge.web.service import ConversationService
from web.conftest import PageServer, serve_page


def test_message_can_be_edited_after_an_earlier_edit(page: PageServer) -> None:
    """After an earlier message was edited, a later message can be edited and sent as a new branch."""
    name = page.create_conversation("Hello", "What is 2+3?", "Thanks")
    path = f"/api/conversations/{name}"
    blocks = page.get(f"{path}/turns")["blocks"]
    node = page.post(f"{path}/edit", block=blocks[0]["id"], text="Good morning")["node"]
    rewritten = page.get(f"{path}/turns")["blocks"]
    texts = [block["parts"][0]["text"] for block in rewritten if block["kind"] == "user"]
    assert texts == ["Good morning", "What is 2+3?", "Thanks"]
    html = page.client.get(f"/conversations/{name}").text
    assert html.count('data-do="edit"') == 6
    assert '<p class="words" dir="auto">Hello</p>' in html
    turn = page.post(f"{path}/turns", text="What is 20+3?", edit=rewritten[2]["id"], at=node)
    assert turn["text"] == "20+3 = 23."
    blocks = page.get(f"{path}/turns")["blocks"]
    texts = [block["parts"][0]["text"] for block in blocks if block["kind"] == "user"]
    assert texts == ["Good morning", "What is 20+3?"]
    html = page.client.get(f"/conversations/{name}").text
    assert '<p class="words" dir="auto">What is 2+3?</p>' in html


def test_assistant_and_system_messages_can_be_edited(page: PageServer) -> None:
    """System and assistant messages are edited without sending; other blocks cannot be edited."""
    name = page.post("/api/conversations", system="Be brief.")["id"]
    path = f"/api/conversations/{name}"
    page.post(f"{path}/turns", text="Please call add with a=2 and b=3")
    blocks = page.get(f"{path}/turns")["blocks"]
    by_kind = {block["kind"]: block["id"] for block in blocks}
    for kind in ("system", "assistant"):
        page.post(f"{path}/edit", block=by_kind[kind], text="New text")
    now = {block["kind"]: block for block in page.get(f"{path}/turns")["blocks"]}
    assert now["system"]["text"] == "New text"
    assert now["assistant"]["parts"][0]["text"] == "New text"
    for block, status in ((by_kind["tool_call"], 400), ("blk_none", 400)):
        answer = page.client.post(f"{path}/edit", json={"block": block, "text": "x"})
        assert answer.status_code == status


def test_stale_head_is_a_conflict(page: PageServer) -> None:
    """A request with a stale head fails with 409 and writes nothing; with the current head it succeeds."""
    name = page.create_conversation("Hello")
    path = f"/api/conversations/{name}"
    old = page.get(path)["head"]
    page.post(f"{path}/turns", text="Elsewhere", head=old)
    before = page.get(f"{path}/chain")
    for action, body in (
        ("turns", {"text": "Here", "at": old}),
        ("resume", {"node": old}),
        ("edit", {"block": "blk_none", "text": "x"}),
    ):
        answer = page.client.post(f"{path}/{action}", json={**body, "head": old})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "head_conflict")
    assert page.get(f"{path}/chain") == before
    turn = page.post(f"{path}/turns", text="Here", at=old, head=before["head"])
    assert page.get(path)["head"] == turn["node"]


def test_edits_by_other_programs_are_marked(page: PageServer) -> None:
    """An edit made outside the page is detected by comparing the paths before and after it."""

    async def work(service: ConversationService) -> str:
        conversation = await Conversation.create(service.models.engine, store=service.store)
        await conversation.send("Hello")
        await conversation.edit(conversation.turn.blocks[0].id, "Good morning")
        return conversation.id

    html = page.client.get(f"/conversations/{page.run(work)}").text
    assert '<span class="chip edited">edited</span>' in html
    assert '<p class="words" dir="auto">Hello</p>' in html


def test_a_conversation_without_a_title_has_one_name(page: PageServer) -> None:
    """After an edit of its first message, a conversation has the same name in the list and in its heading."""
    name = page.create_conversation("Hello", "What is 2+3?")
    first = page.get(f"/api/conversations/{name}/turns")["blocks"][0]["id"]
    page.post(f"/api/conversations/{name}/edit", block=first, text="Good morning")
    html = page.client.get(f"/conversations/{name}").text
    [heading, *_] = re.findall(r"<title>(.*?)</title>", html)
    assert heading.startswith("Good morning")
    assert '<span class="name">Good morning</span>' in page.client.get("/").text


def test_request_after_a_reopened_edit_has_one_name(tmp_path: Path) -> None:
    """After a restart the card, its details, the dashboard and the API name a request after an edit alike."""
    db = str(tmp_path / "server.db")
    with serve_page(tmp_path, db=db) as page:
        name = page.create_conversation("Hello", "What is 2+3?")
        path = f"/api/conversations/{name}"
        first = page.get(f"{path}/turns")["blocks"][0]["id"]
        page.post(f"{path}/edit", block=first, text="Good morning")
    with serve_page(tmp_path, db=db) as page:
        node = page.post(f"{path}/turns", text="Thanks")["node"]
        html = page.client.get(f"/conversations/{name}").text
        assert html.count('<span class="chip sent-full">sent in full</span>') == 1
        assert html.count('<span class="chip ">new chain</span>') == 1
        assert "edited since" in page.client.get(f"/conversations/{name}/plans/{node}").text
        chain = page.get(f"{path}/chain")["nodes"]
        assert [each["node"] for each in chain if "full" in each["marks"]] == [node]
        sends = page.get("/api/analytics")["requests"]["sends"]
        assert {each["name"]: each["count"] for each in sends} == {
            "chained": 1, "new chain": 1, "sent in full": 1
        }  # fmt: skip
        assert "1 chained, 1 new chain, 1 sent in full" in page.client.get("/dashboard").text
