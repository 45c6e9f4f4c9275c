"""Which model answers: the model of the conversation, a selected model, or none."""

import pytest

from kedge.conversation import Conversation
from kedge.testing import TestServer
from kedge.web.service import ConversationService
from web.conftest import PageServer

LOCAL = ("127.0.0.1", "localhost")


@pytest.fixture
def openai(monkeypatch: pytest.MonkeyPatch, kedge_server: TestServer) -> TestServer:
    """Point the provider ``openai`` to a test server."""
    monkeypatch.setenv("OPENAI_BASE_URL", kedge_server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    return kedge_server


def create_elsewhere(page: PageServer, model: str) -> str:
    """Create a conversation with another program that uses the store of the page."""

    async def work(service: ConversationService) -> str:
        async with Conversation(model, store=service.store) as conversation:
            await conversation.send("My name is Ada.")
            return conversation.id

    return page.run(work)


def count_nodes(page: PageServer, name: str) -> int:
    return len(page.get(f"/api/conversations/{name}/tree")["nodes"])


def test_conversation_keeps_its_provider(empty_page: PageServer, openai: TestServer) -> None:
    """The page connects to the conversation's provider by name and records it with the response."""
    name = create_elsewhere(empty_page, "openai:practice")
    sent = len(openai.requests)
    plan = empty_page.get(f"/api/conversations/{name}/plan", message="What is my name?")
    assert plan["mode"] == "chained"
    assert plan["sent_blocks"] == 1
    reply = empty_page.post(f"/api/conversations/{name}/runs", message="What is my name?")
    assert reply["text"] == "Your name is Ada."
    assert len(openai.requests) == sent + 1
    *_, last = empty_page.get(f"/api/conversations/{name}/tree")["nodes"]
    assert (last["response"]["provider"], last["response"]["model"]) == ("openai", "practice")
    html = empty_page.client.get(f"/conversations/{name}").text
    assert "<option selected>openai:practice</option><option>practice</option>" in html


def test_answers_of_several_models_have_their_names(
    empty_page: PageServer, openai: TestServer
) -> None:
    """The graph and the messages name the model of each answer, once a second model has answered."""
    name = create_elsewhere(empty_page, "openai:gpt-a")
    path = f"/conversations/{name}"
    label = '<span class="who">Assistant</span><span class="hint">{}</span>'
    assert label.format("gpt-a") not in empty_page.client.get(path).text
    first = empty_page.get(f"/api{path}")["head"]
    second = empty_page.post(f"/api{path}/runs", message="What is my name?", model="practice")
    html = empty_page.client.get(path).text
    assert [label.format(model) in html for model in ("gpt-a", "practice")] == [True, True]
    assert [f'class="meta by">{model}<' in html for model in ("gpt-a", "practice")] == [True, True]
    compared = empty_page.client.get(f"{path}/compare?left={first}&right={second['node']}").text
    assert label.format("practice") in compared


def test_a_plan_that_depends_on_a_probe_says_so(empty_page: PageServer, openai: TestServer) -> None:
    """The next plan of the page is a dry run: nothing is sent, and a condition is named."""
    openai.faults.set("anonymous")
    name = create_elsewhere(empty_page, "openai:practice")
    sent = len(openai.requests)
    plan = empty_page.get(f"/api/conversations/{name}/plan", message="What is my name?")
    assert plan["conditional"]
    assert "may change" in plan["explanation"]
    assert len(openai.requests) == sent


def test_missing_api_key_is_reported_before_writing(
    empty_page: PageServer, openai: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message and the plan are rejected with the reason, and another model can be selected."""
    name = create_elsewhere(empty_page, "openai:practice")
    monkeypatch.delenv("OPENAI_API_KEY")
    before = count_nodes(empty_page, name)
    path = f"/api/conversations/{name}"
    for stream in (True, False):
        rejected = empty_page.client.post(
            f"{path}/runs", json={"message": "Hello", "stream": stream}
        )
        assert rejected.status_code == 400
        assert "OPENAI_API_KEY" in rejected.json()["error"]["message"]
    assert empty_page.client.get(f"{path}/plan").status_code == 400
    assert count_nodes(empty_page, name) == before
    html = empty_page.client.get(f"/conversations/{name}").text
    assert "data-model-problem" in html
    assert '<option value="">Choose a model</option><option>practice</option>' in html
    assert empty_page.post(f"{path}/runs", message="What is my name?", model="practice")["text"]
    *_, last = empty_page.get(f"{path}/tree")["nodes"]
    assert (last["response"]["provider"], last["response"]["model"]) == ("responses", "practice")


def test_stored_address_is_never_used(empty_page: PageServer, kedge_server: TestServer) -> None:
    """A conversation with another server is shown, but a message to its model is rejected."""
    address = f"responses:{kedge_server.base_url}#practice"
    name = create_elsewhere(empty_page, address)
    sent = len(kedge_server.requests)
    rejected = empty_page.client.post(f"/api/conversations/{name}/runs", json={"message": "Hello"})
    assert rejected.status_code == 400
    assert "not configured on this server" in rejected.json()["error"]["message"]
    assert "not configured on this server" in empty_page.client.get(f"/conversations/{name}").text
    assert len(kedge_server.requests) == sent


def test_unknown_model_is_rejected(empty_page: PageServer) -> None:
    """An unknown model is rejected for a new conversation and for a message."""
    rejected = empty_page.client.post("/api/conversations", json={"model": "gpt-5.1"})
    assert rejected.status_code == 400
    name = empty_page.post("/api/conversations", model="practice")["id"]
    rejected = empty_page.client.post(
        f"/api/conversations/{name}/runs", json={"message": "Hello", "model": "gpt-5.1"}
    )
    assert rejected.status_code == 400
    assert "there is no model 'gpt-5.1' here" in rejected.json()["error"]["message"]
    assert count_nodes(empty_page, name) == 0
    assert empty_page.post(f"/api/conversations/{name}/runs", message="Hello")["text"]


@pytest.mark.parametrize(
    "model",
    [
        *(
            f"{api}:http://{host}:{{0}}/v1#practice"
            for api in ("responses", "chat")
            for host in LOCAL
        ),
        "openai:practice",
        "chat:{1}#practice",
    ],
)
def test_conversation_of_this_server_continues_on_it(
    page: PageServer, monkeypatch: pytest.MonkeyPatch, kedge_server: TestServer, model: str
) -> None:
    """What was made through ``/v1`` of this server, or by a practice model without memory, continues here."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{page.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    port = page.url.rpartition(":")[2]
    name = create_elsewhere(page, model.format(port, kedge_server.base_url))
    monkeypatch.delenv("OPENAI_API_KEY")
    sent = len(kedge_server.requests)
    assert "data-model-problem" not in page.client.get(f"/conversations/{name}").text
    reply = page.post(f"/api/conversations/{name}/runs", message="What is my name?")
    assert reply["text"] == "Your name is Ada."
    assert len(kedge_server.requests) == sent
