"""Edits through the API and the page: allowed for every message, marked, and checked against the head."""

import re

from kedge.conversation import Conversation
from kedge.web.service import ConversationService
from web.conftest import PageServer


def test_message_can_be_edited_after_an_earlier_edit(page: PageServer) -> None:
    """After an edit, a later question can be edited and sent as a new branch, but no other block."""
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
    reply = page.post(f"{path}/runs", message="What is 20+3?", edit=rewritten[2]["id"], at=node)
    assert reply["text"] == "20+3 = 23."
    blocks = page.get(f"{path}/turns")["blocks"]
    texts = [block["parts"][0]["text"] for block in blocks if block["kind"] == "user"]
    assert texts == ["Good morning", "What is 20+3?"]
    for block, status in ((blocks[1]["id"], 400), ("blk_none", 404)):
        answer = page.client.post(f"{path}/runs", json={"message": "x", "edit": block})
        assert answer.status_code == status
    html = page.client.get(f"/conversations/{name}").text
    assert '<p class="words" dir="auto">What is 2+3?</p>' in html
    again = page.post(f"{path}/runs", message="What is 30+3?", edit=blocks[2]["id"])
    blocks = page.get(f"{path}/turns")["blocks"]
    assert (again["text"], len(blocks)) == ("30+3 = 33.", 4)


def test_assistant_and_system_messages_can_be_edited(page: PageServer) -> None:
    """System and assistant messages are edited without sending; other blocks cannot be edited."""
    name = page.post("/api/conversations", system="Be brief.")["id"]
    path = f"/api/conversations/{name}"
    page.post(f"{path}/runs", message="Please call add with a=2 and b=3")
    blocks = page.get(f"{path}/turns")["blocks"]
    by_kind = {block["kind"]: block["id"] for block in blocks}
    for kind in ("system", "assistant"):
        page.post(f"{path}/edit", block=by_kind[kind], text="New text")
    now = {block["kind"]: block for block in page.get(f"{path}/turns")["blocks"]}
    assert now["system"]["text"] == "New text"
    assert now["assistant"]["parts"][0]["text"] == "New text"
    for block, status in ((by_kind["tool_call"], 400), ("blk_none", 404)):
        answer = page.client.post(f"{path}/edit", json={"block": block, "text": "x"})
        assert answer.status_code == status


def test_other_blocks_of_an_edited_question_are_sent_again(page: PageServer) -> None:
    """The edited block replaces one of the blocks that were sent together."""
    name = page.create_conversation()

    async def ask(service: ConversationService) -> None:
        engine, store = service.models.engine, service.store
        await (await Conversation.open(engine, store=store, id=name)).send("One", "Two", "Three")

    page.run(ask)
    path = f"/api/conversations/{name}"
    second = page.get(f"{path}/turns")["blocks"][1]["id"]
    page.post(f"{path}/runs", message="2", edit=second)
    texts = [block["parts"][0]["text"] for block in page.get(f"{path}/turns")["blocks"]]
    assert texts[:3] == ["One", "2", "Three"]


def test_stale_head_is_a_conflict(page: PageServer) -> None:
    """A request with a stale head fails with 409 and writes nothing; with the current head it succeeds."""
    name = page.create_conversation("Hello")
    path = f"/api/conversations/{name}"
    old = page.get(path)["head"]
    page.post(f"{path}/runs", message="Elsewhere", head=old)
    before = page.get(f"{path}/tree")
    for action, body in (
        ("runs", {"message": "Here", "at": old}),
        ("resume", {"node": old}),
        ("edit", {"block": "blk_none", "text": "x"}),
    ):
        answer = page.client.post(f"{path}/{action}", json={**body, "head": old})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "head_conflict")
    assert page.get(f"{path}/tree") == before
    reply = page.post(f"{path}/runs", message="Here", at=old, head=before["head"])
    assert page.get(path)["head"] == reply["node"]


def test_a_conversation_without_a_title_has_one_name(page: PageServer) -> None:
    """After an edit by another program, which is marked, its name is the same in the list and in its heading."""

    async def work(service: ConversationService) -> str:
        conversation = await Conversation.create(service.models.engine, store=service.store)
        await conversation.send("Hello")
        await conversation.edit(conversation.turn.blocks[0].id, "Good morning")
        return conversation.id

    html = page.client.get(f"/conversations/{page.run(work)}").text
    assert '<span class="chip edited">edited</span>' in html
    assert '<p class="words" dir="auto">Hello</p>' in html
    [heading, *_] = re.findall(r"<title>(.*?)</title>", html)
    assert heading.startswith("Good morning")
    assert '<span class="name">Good morning</span>' in page.client.get("/").text
