"""Users of the page and the API see only their own conversations, runs and statistics."""

import base64
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx2
import pytest

from kedge.server.settings import Settings
from kedge.store import ProxiedRequest, TokenRegistry, open_store
from kedge.web import dashboard
from kedge.web.api import OPERATIONS
from kedge.web.app import PageSettings
from kedge.web.pages import ROUTES
from kedge.web.security import DelegatedTokens
from kedge.web.service import ConversationService
from web.conftest import TIMEOUT, PageServer

ADMIN = "admin-secret"
SKIPPED = {"/login", "/logout", "/static/{name}", "/dashboard/live"}
"""Routes without content, and one whose response does not end."""


class UserPage:
    """A running page with named tokens."""

    def __init__(self, page: PageServer) -> None:
        self.page = page
        self.secrets: dict[str, str] = {"admin": ADMIN}

    def add(self, name: str, **options: Any) -> str:
        """Add a token."""

        async def work(service: ConversationService) -> str:
            return (await TokenRegistry(service.store).add(name, **options))[1]

        self.secrets[name] = self.page.run(work)
        return self.secrets[name]

    def revoke(self, name: str) -> None:
        """Revoke a token."""
        self.page.run(lambda service: TokenRegistry(service.store).revoke(name))

    def call(self, name: str, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request with the token of a user."""
        headers = {"authorization": f"Bearer {self.secrets[name]}"}
        return self.page.client.request(method, path, headers=headers, **options)

    @contextmanager
    def log_in(self, name: str) -> Iterator[httpx2.Client]:
        """Yield a client with the session of a user."""
        with httpx2.Client(base_url=self.page.url, timeout=TIMEOUT, verify=False) as client:
            answer = client.post("/login", data={"token": self.secrets[name]})
            assert answer.status_code == 303, answer.text
            yield client

    def send(self, name: str, text: str) -> str:
        """Create a conversation, send this text in it and return its id."""
        path = "/api/conversations"
        conversation_id = self.call(name, "POST", path, json={"title": text}).json()["id"]
        answer = self.call(name, "POST", f"{path}/{conversation_id}/runs", json={"message": text})
        assert answer.status_code == 200, answer.text
        return conversation_id


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserPage]:
    """Yield a page with the users alice and bob."""
    folder = tmp_path_factory.mktemp("users")
    settings = Settings(token=ADMIN, db=str(folder / "server.db"))
    page = PageServer(settings, PageSettings(f"sqlite:///{folder / 'store.db'}"))
    page.start()
    users = UserPage(page)
    users.add("alice")
    users.add("bob")
    yield users
    page.stop()


def list_paths() -> list[tuple[str, str]]:
    """Return the method and path of every route of the page and the API."""
    pages = [
        (method, r.path) for r in ROUTES for method in sorted(r.methods or ()) if method != "HEAD"
    ]
    return [*pages, *((each.method, each.path) for each in OPERATIONS)]


@pytest.mark.parametrize("other", ["bob", "admin"])
def test_every_route_hides_other_users_data(running: UserPage, other: str) -> None:
    """Each route responds as for an unknown id, without any content of the other user."""
    name = running.send("alice", "My secret is Zanzibar.")
    node = running.call("alice", "GET", f"/api/conversations/{name}/tree").json()["head"]
    assert node
    bodies = {
        "PATCH /api/conversations/{id}": {"title": "stolen"},
        "POST /api/conversations/{id}/runs": {"message": "hello"},
        "POST /api/conversations/{id}/resume": {"node": node},
        "POST /api/conversations/{id}/edit": {"block": "blk", "text": "x"},
        "POST /api/conversations/{id}/fork": {},
    }
    for method, path in list_paths():
        if path in SKIPPED or (method == "POST" and "{id}" not in path):
            continue
        answers: list[str] = []
        for each in (name, "conv_unknown"):
            url = path.replace("{id}", each).replace("{node:number}", str(node))
            url = re.sub(r"\{\w+:number\}", "0", url)
            url = re.sub(r"\{\w+\}", "x", url)
            url += "?q=secret" if url in ("/", "/api/search") else ""
            url += f"?left={node}&right={node}" if url.endswith("/compare") else ""
            body = bodies.get(f"{method} {path}")
            answer = running.call(other, method, url, **({} if body is None else {"json": body}))
            assert "Zanzibar" not in answer.text, url
            answers.append(f"{answer.status_code} {answer.text.replace(each, 'ID')}")
        if "{id}" in path and answers:
            assert answers[0] == answers[1], path
            assert answers[0].startswith("404"), (path, answers[0])
    conversation = running.call("alice", "GET", f"/api/conversations/{name}").json()
    assert conversation["title"] == "My secret is Zanzibar."


def test_attachments_are_hidden_from_other_users(running: UserPage) -> None:
    """The attachment of a user is 404 for another user and the administrator, on the page and in the API."""
    path = "/api/conversations"
    name = running.call("alice", "POST", path, json={}).json()["id"]
    data = f"data:text/plain;base64,{base64.b64encode(b'Zanzibar' * 1_000).decode()}"
    body = {"message": "See", "attachments": [{"data": data, "filename": "secret.txt"}]}
    running.call("alice", "POST", f"{path}/{name}/runs", json=body)
    question = running.call("alice", "GET", f"{path}/{name}/turns").json()["blocks"][0]
    attachment = f"/conversations/{name}/attachments/{question['id']}/1"
    for url in (attachment, f"/api{attachment}"):
        assert running.call("alice", "GET", url).content == b"Zanzibar" * 1_000
        for other in ("bob", "admin"):
            assert running.call(other, "GET", url).status_code == 404


def test_lists_search_and_statistics_are_per_user(running: UserPage) -> None:
    """Lists, search, filters, statistics and proxied requests contain only the caller's rows."""
    running.send("alice", "Tell me about Quokkas.")
    assert running.call("alice", "GET", "/api/search?q=Quokkas").json()["data"]
    assert running.call("bob", "GET", "/api/search?q=Quokkas").json()["data"] == []
    assert running.call("bob", "GET", "/api/conversations").json()["total"] == 0
    assert "Quokkas" in running.call("alice", "GET", "/").text
    figures = [
        running.call(name, "GET", "/api/analytics").json()["requests"]["total"]
        for name in ("alice", "bob", "admin")
    ]
    assert figures[0] > 0
    assert figures[1:] == [0, 0]
    request = ProxiedRequest(1.0, "m", 200, "", "resp_p", 1, 1, 10, 10, upstream="https://host/v1")
    running.page.run(lambda service: service.store.add_proxied([request]))
    assert running.call("admin", "GET", "/requests/1").status_code == 200
    assert running.call("alice", "GET", "/requests/1").status_code == 404


def test_server_requests_are_shown_to_their_user_only(running: UserPage) -> None:
    """Requests to the server and responses of the page belong only to the user of their token."""
    running.send("alice", "Sent by the page")
    body = {"model": "practice", "input": "Sent by a program"}
    response_id = running.call("alice", "POST", "/v1/responses", json=body).json()["id"]
    (row,) = running.call("alice", "GET", "/api/requests").json()["data"]
    assert row["response_id"] == response_id
    assert running.call("alice", "GET", f"/requests/{row['id']}").status_code == 200
    for other in ("bob", "admin"):
        requests = running.call(other, "GET", "/api/requests").json()["data"]
        assert response_id not in {each["response_id"] for each in requests}
        assert running.call(other, "GET", f"/requests/{row['id']}").status_code == 404
    name = running.send("alice", "Hello from Alice.")
    tree = running.call("alice", "GET", f"/api/conversations/{name}/tree").json()
    response = tree["nodes"][-1]["response"]["response_id"]
    statuses = {
        user: running.call(user, "GET", f"/v1/responses/{response}").status_code
        for user in ("alice", "bob", "admin")
    }
    assert statuses == {"alice": 200, "bob": 404, "admin": 404}


def test_session_ends_with_its_token(running: UserPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session and its open streams end when the token is revoked, and other tokens of the user remain."""
    monkeypatch.setattr(dashboard, "HEARTBEAT_TICKS", 10**9)
    running.add("carol")
    running.add("carol-phone", user="carol", scopes=["page"])
    with running.log_in("carol") as browser, running.log_in("carol-phone") as phone:
        with browser.stream("GET", "/dashboard/live") as stream:
            chunks = stream.iter_bytes()
            assert next(chunks)
            running.revoke("carol")
            list(chunks)  # the stream ends although nothing is sent
        assert browser.get("/").status_code == 303
        assert browser.get("/api/conversations").status_code == 401
        assert phone.get("/").status_code == 200


def test_sessions_of_a_user_show_the_same_data(running: UserPage) -> None:
    """Each token of a user gives a session with the data of the user, without the token in a cookie."""
    running.add("erin")
    running.add("erin-phone", user="erin", scopes=["page"])
    running.send("erin", "Erin was here.")
    for name in ("erin", "erin-phone"):
        with running.log_in(name) as browser:
            assert "Erin was here." in browser.get("/").text
            assert browser.get("/api/conversations").json()["total"] == 1
            assert running.secrets[name] not in str(browser.cookies)
    with running.log_in("bob") as other:
        assert "Erin was here." not in other.get("/").text


def test_logout_ends_a_session_but_not_its_token(running: UserPage) -> None:
    """Copies of the cookie are invalid, and the token gives another session; a bearer token has no session."""
    running.add("frank", scopes=["page"])
    with running.log_in("frank") as browser:
        cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        browser.post("/logout")
        assert browser.get("/", headers={"cookie": cookies}).status_code == 303
    with running.log_in("frank") as browser:
        assert "Log out" in browser.get("/").text
    assert "Log out" not in running.call("bob", "GET", "/").text


def test_scopes_limit_where_a_token_is_accepted(running: UserPage) -> None:
    """A token is accepted only by the parts of the server that its scopes name."""
    running.add("only-server", scopes=["server"])
    running.add("only-page", scopes=["page"])
    running.add("only-api", scopes=["api"])
    status = {
        name: [
            running.call(name, "GET", path, follow_redirects=False).status_code
            for path in ("/v1/models", "/", "/api/conversations")
        ]
        for name in ("only-server", "only-page", "only-api")
    }
    assert status["only-server"] == [200, 403, 403]
    assert status["only-page"] == [403, 200, 403]
    assert status["only-api"] == [403, 403, 200]
    login = running.page.client.post("/login", data={"token": running.secrets["only-api"]})
    assert login.status_code == 403
    with running.log_in("only-page") as browser:
        assert browser.get("/api/conversations").status_code == 200


def test_limits_apply_to_page_and_api(running: UserPage) -> None:
    """Requests above a limit get 429 with headers; tokens of the page's messages count."""
    running.add("dave", requests_per_minute=1_000, tokens_per_minute=5)
    name = running.send("dave", "Hello.")
    path = f"/api/conversations/{name}/runs"

    def send_until_limited(send: Callable[..., httpx2.Response]) -> httpx2.Response:
        """Send messages until one is rejected, because a new minute may begin between two of them."""
        answers = (send("POST", path, json={"message": "Hello."}) for _ in range(20))
        return next(answer for answer in answers if answer.status_code != 200)

    rejected = send_until_limited(partial(running.call, "dave"))
    assert rejected.status_code == 429
    assert rejected.json()["error"]["code"] == "rate_limited"
    assert 0 < int(rejected.headers["retry-after"]) <= 60
    assert rejected.headers["x-ratelimit-limit-tokens"] == "5"
    with running.log_in("dave") as browser:
        assert send_until_limited(browser.request).status_code == 429
        assert browser.get("/").status_code == 200  # a session's reads are not counted


def test_users_cannot_use_server_api_keys(running: UserPage) -> None:
    """A user cannot continue a conversation whose provider uses the environment variables of the server."""

    async def prepare(service: ConversationService) -> str:
        row = await service.store.use_namespace("alice").create(data={"model": "openai:gpt-5.1"})
        return row.id

    name = running.page.run(prepare)
    answer = running.call("alice", "POST", f"/api/conversations/{name}/runs", json={"message": "x"})
    assert answer.status_code == 400
    assert "not available to users" in answer.json()["error"]["message"]


async def test_revoked_user_cannot_send() -> None:
    """The token with which the page calls the server is revoked with the user's own token."""
    async with open_store("sqlite://:memory:") as store:
        registry = delegated = DelegatedTokens(store)
        erin, secret = await registry.add("erin", requests_per_minute=9, tokens_per_minute=9)
        assert await delegated.find(secret) == erin
        issued = delegated.issue(erin)
        token = await delegated.find(issued)
        assert token is not None
        assert (token.namespace, token.scopes, token.tokens_per_minute) == ("erin", {"server"}, 9)
        assert token.requests_per_minute is None  # the request to the page was counted
        await registry.revoke("erin")
        assert await delegated.find(issued) is None
        await registry.add("erin")
        assert await delegated.find(issued) is None
