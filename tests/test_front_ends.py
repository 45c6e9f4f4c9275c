"""The rules of access hold for every front end: the server, the page, the proxy and MCP servers."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from for_each import for_each
from kedge._internal.access_tokens import AccessToken, TokenUse
from kedge.chaining.proxy.access import ProxyFrontEnd
from kedge.errors import StoreBusy
from kedge.mcp.server import McpFrontEnd
from kedge.server.access import AccessPolicy
from kedge.server.http import ServerFrontEnd
from kedge.server.request_log import FrontEnd, RequestMiddleware
from kedge.web.security import PageAuth, PageFrontEnd


class Registry:
    """One named token, whose counts the test sets."""

    def __init__(self, *scopes: str, requests: int = 1, is_down: bool = False) -> None:
        self.caller = AccessToken("ada", "ada", frozenset(scopes), requests_per_minute=5)
        self.counts = TokenUse(requests, 0, 30.0)
        self.is_down = is_down

    async def is_required(self) -> bool:
        return True

    async def find(self, token: str) -> AccessToken | None:
        if self.is_down:
            raise StoreBusy("the store is busy")
        return self.caller if token == "named" else None

    async def find_session(self, session: str) -> AccessToken | None:
        return None

    async def is_ended(self, session: str) -> bool:
        return False

    async def is_valid(self, token: AccessToken) -> bool:
        return True

    async def count(self, name: str, *, requests: int = 0, tokens: int = 0) -> TokenUse:
        return self.counts


FRONT_ENDS: dict[str, tuple[Callable[[Any], FrontEnd], str, str]] = {
    "server": (lambda policy: ServerFrontEnd(policy, None), "/v1/models", "server"),
    "page": (PageFrontEnd, "/api/conversations", "api"),
    "proxy": (ProxyFrontEnd, "/v1/models", "server"),
    "mcp": (McpFrontEnd, "/mcp", "server"),
}
"""How each front end is created, one of its paths, and the scope that this path needs."""


def present(token: str) -> dict[str, str]:
    """Return the headers with a token, of which each front end reads one."""
    return {"authorization": f"Bearer {token}", "x-kedge-token": token}


ALL = ("server", "page", "api", "metrics")
OTHER_HOST = {"host": "evil.example"}
OTHER_SITE = {"origin": "http://evil.example"}
CASES: dict[str, tuple[dict[str, Any], dict[str, str], int]] = {
    "accepted": ({}, {}, 200),
    "other host": ({}, OTHER_HOST, 403),
    "any host": ({"any_host": True}, OTHER_HOST, 200),
    "other host and own token": ({"token": "secret"}, {**OTHER_HOST, **present("secret")}, 200),
    "other site": ({}, OTHER_SITE, 403),
    "large headers": ({"header_bytes": 2_000}, {"x-large": "x" * 2_000}, 431),
    "no token": ({"token": "secret"}, {}, 401),
    "wrong token": ({"token": "secret"}, present("wrong"), 401),
    "own token": ({"token": "secret"}, present("secret"), 200),
    "named token": ({"registry": Registry(*ALL)}, present("named"), 200),
    "unknown token": ({"registry": Registry(*ALL)}, present("other"), 401),
    "missing scope": ({"registry": Registry("none")}, present("named"), 403),
    "reached limit": ({"registry": Registry(*ALL, requests=6)}, present("named"), 429),
    "outage": ({"registry": Registry(*ALL, is_down=True)}, present("named"), 503),
}
"""The policy, the headers of a request, and its status."""


async def request_front_end(
    name: str, options: dict[str, Any], method: str = "", path: str = "", **more: Any
) -> httpx2.Response:
    """Send a request to a front end with these options of its policy, in front of an app."""
    create, default_path, _ = FRONT_ENDS[name]
    policy = (PageAuth if name == "page" else AccessPolicy)(**options)
    app = RequestMiddleware(more.pop("app", PlainTextResponse("accepted")), create(policy))
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.request(method or "POST", path or default_path, **more)


@for_each("case", CASES)
@for_each("name", FRONT_ENDS)
async def test_every_rule_holds_for_every_front_end(name: str, case: str) -> None:
    """A request is accepted or rejected with the same status, whoever receives it."""
    options, headers, status = CASES[case]
    answer = await request_front_end(name, options, headers=headers)
    assert answer.status_code == status
    assert (answer.text == "accepted") == (status == 200)
    assert ("retry-after" in answer.headers) == (status == 429)


@for_each("name", FRONT_ENDS)
async def test_each_front_end_needs_its_scope(name: str) -> None:
    """A token with exactly the scope of a path is accepted there."""
    options = {"registry": Registry(FRONT_ENDS[name][2])}
    assert (await request_front_end(name, options, headers=present("named"))).status_code == 200


@pytest.mark.parametrize("name", FRONT_ENDS)
async def test_an_internal_error_reveals_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every front end answers with 500, and only the type of the error is logged."""

    async def fail(*_: object) -> None:
        raise RuntimeError("a private matter")

    with caplog.at_level("INFO"):
        answer = await request_front_end(name, {}, "GET", app=fail)
    assert answer.status_code == 500
    assert "private" not in answer.text + caplog.text
    assert "RuntimeError" in caplog.text


class CountingRegistry(Registry):
    """A named token and a session of it, whose counted requests are recorded."""

    def __init__(self) -> None:
        super().__init__(*ALL)
        self.counted = 0

    async def find_session(self, session: str) -> AccessToken | None:
        return self.caller if session == "open" else None

    async def count(self, name: str, *, requests: int = 0, tokens: int = 0) -> TokenUse:
        self.counted += requests
        return self.counts


COUNTED = [
    ("server", "GET", "/v1/models", {}, True),
    ("server", "GET", "/metrics", {}, False),
    ("proxy", "POST", "/v1/responses", {}, True),
    ("proxy", "GET", "/metrics", {}, False),
    ("proxy", "GET", "/report", {}, False),
    ("mcp", "POST", "/mcp", {}, True),
    ("page", "GET", "/api/conversations", {}, True),
    ("page", "GET", "/", {}, True),
    ("page", "GET", "/", {"cookie": "kedge_page=open"}, False),
    ("page", "POST", "/", {"cookie": "kedge_page=open"}, True),
]
"""A front end, a request to it, and whether it counts for the limit of requests."""


@for_each(("name", "method", "path", "headers", "is_counted"), COUNTED)
async def test_which_requests_count_for_a_limit(
    name: str, method: str, path: str, headers: dict[str, str], is_counted: bool
) -> None:
    """Every request counts, except reading metrics and what a page with a session reads."""
    registry = CountingRegistry()
    sent = headers or present("named")
    answer = await request_front_end(name, {"registry": registry}, method, path, headers=sent)
    assert answer.text == "accepted"
    assert registry.counted == is_counted
