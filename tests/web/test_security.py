"""Tests of the page's access control: token, session, host, origin and content security policy."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from kedge.errors import InvalidSetting
from kedge.server.request_log import RequestMiddleware
from kedge.server.settings import Settings
from kedge.web.app import create_page
from kedge.web.security import (
    CONTENT_SECURITY_POLICY,
    MAX_ALL_LOGIN_FAILURES,
    MAX_LOGIN_FAILURES,
    SESSION_COOKIE,
    LoginThrottle,
    PageAuth,
    PageFrontEnd,
)
from web.conftest import serve_page

BASE_URL = "http://127.0.0.1:8484"


def open_page(**settings: Any) -> TestClient:
    """Return a client of a small application behind the access control."""

    async def hello(_: Request) -> Response:
        return PlainTextResponse("hello")

    methods = ["GET", "POST", "DELETE"]
    app = Starlette(
        routes=[Route(path, hello, methods=methods) for path in ("/", "/api/x", "/login")],
        middleware=[Middleware(RequestMiddleware, PageFrontEnd(PageAuth(**settings)))],
    )
    return TestClient(app, base_url=BASE_URL, follow_redirects=False)


def test_every_response_has_security_headers() -> None:
    """Every response, including errors, forbids inline scripts, foreign resources and caching."""
    page = open_page(token="secret")
    for answer in (page.get("/login"), page.get("/"), page.get("/api/x"), page.get("/nowhere")):
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'")


def test_loopback_page_accepts_loopback_hosts_only() -> None:
    """Another host name that resolves to 127.0.0.1 is rejected, which prevents DNS rebinding."""
    page = open_page()
    for host in ("127.0.0.1:8484", "localhost", "[::1]:8484", "127.0.0.2"):
        assert page.get("/", headers={"host": host}).status_code == 200
    for host in ("rebound.example:8484", "127.0.0.1.evil.example", ""):
        assert page.get("/", headers={"host": host}).status_code == 403


def test_write_must_come_from_page() -> None:
    """A write needs the page's own origin, or no origin headers, as from a program; links can be followed."""
    page = open_page()
    same_site = {"origin": BASE_URL.upper(), "sec-fetch-site": "Same-Origin"}
    own: list[dict[str, str]] = [{}, {"origin": BASE_URL}, same_site, {"sec-fetch-site": "none"}]
    origins = ("https://evil.example", "null", "http://127.0.0.1:9999")
    foreign = [{"sec-fetch-site": "cross-site"}, *({"origin": each} for each in origins)]
    for headers in (*own, *foreign):
        status = 200 if headers in own else 403
        assert page.post("/api/x", headers=headers, json={}).status_code == status
        assert page.delete("/api/x", headers=headers).status_code == status
        assert page.get("/", headers=headers).status_code == 200


def test_bearer_token_must_match() -> None:
    """An API request is accepted only with the exact bearer token."""
    page = open_page(token="secret")
    wrong = ("Bearer wrong", "Bearer", "Basic secret", "Bearer sécret")
    for token in ("Bearer secret", "bearer  secret", *wrong):
        headers: Any = {"authorization": token.encode()}
        assert page.get("/api/x", headers=headers).status_code == (401 if token in wrong else 200)


def test_session_expires_and_cannot_be_forged() -> None:
    """A session is signed with the token and contains its expiry time."""
    now = 1_000_000.0
    auth = PageAuth(token="secret", clock=lambda: now)
    session = auth.new_session()
    page = open_page(token="secret", clock=lambda: now)
    assert page.get("/", headers={"cookie": f"{SESSION_COOKIE}={session}"}).status_code == 200
    end, _, rest = session.partition(".")
    forged = (f"{int(end) + 1}.{rest}", f"{end}.", end, "", "x.y", f"{'9' * 400}.{rest}")
    foreign = PageAuth(token="other", clock=lambda: now).new_session()
    for value in (*forged, "²." + rest, session.replace(".", ".x", 1), foreign):
        assert not auth.is_signed_session(value)
    assert auth.is_signed_session(auth.sign_session(end))  # the format of earlier versions
    now += 31 * 86_400
    assert not auth.is_signed_session(session)
    assert "secret" not in session


def test_invalid_cookie_is_ignored() -> None:
    """A malformed or duplicate cookie is no session; cookies of other programs on the host do not end one."""
    page = open_page(token="secret")
    name = SESSION_COOKIE
    for value in ("\x00", "=", f'{name}="', f"{name}=a;{name}=b", "é"):
        headers: Any = {"cookie": value.encode()}
        assert page.get("/", headers=headers).headers["location"] == "/login"
    session = f"{name}={PageAuth(token='secret').new_session()}"
    others = ('state={"tab": 1, "open": true}', "theme", 'a="b', "a b=c", "path=/", "a@b=1", "ä=ö")
    for other in others:
        for cookies in (f"{other}; {session}", f"{session}; {other}"):
            headers = {"cookie": cookies.encode()}
            assert page.get("/", headers=headers).status_code == 200, cookies


def test_failed_logins_are_limited_per_address() -> None:
    """Failures count for a minute: for their address and, with a higher limit, for all addresses."""
    now = 100.0
    throttle = LoginThrottle(lambda: now)
    for _ in range(2 * MAX_LOGIN_FAILURES):  # attempts that succeed do not count
        assert throttle.count_attempt("a") == 0
        throttle.forget("a")
    for _ in range(MAX_LOGIN_FAILURES):
        assert throttle.count_attempt("a") == 0
    assert (throttle.count_attempt("a"), throttle.count_attempt("b")) == (60, 0)
    now = 159.0
    assert throttle.count_attempt("a") == 1
    now = 161.0
    assert throttle.count_attempt("a") == 0
    for number in range(MAX_ALL_LOGIN_FAILURES - 1):
        assert throttle.count_attempt(str(number)) == 0
    assert throttle.count_attempt("another") == 60


@dataclass(frozen=True, slots=True)
class SlowAuth(PageAuth):
    """A policy whose checks of a login wait until the test lets them continue."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    checked: list[str] = field(default_factory=list[str])

    async def log_in(self, token: str) -> str | None:
        """Check a token when the test allows it."""
        self.checked.append(token)
        await self.release.wait()
        return await super(SlowAuth, self).log_in(token)


@pytest.mark.anyio
async def test_parallel_logins_are_limited() -> None:
    """Of many wrong logins at the same time, no more are checked than one after the other."""
    auth = SlowAuth(token="secret")
    app = create_page(cast("Any", None), auth)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url=BASE_URL) as client:
        logins = [
            asyncio.create_task(client.post("/login", data={"token": f"wrong {number}"}))
            for number in range(60)
        ]
        async with asyncio.timeout(60):
            waiting = iter(asyncio.as_completed(logins))
            rejected = [await next(waiting) for _ in range(60 - MAX_LOGIN_FAILURES)]
            auth.release.set()
            checked = [await each for each in waiting]
    assert {each.status_code for each in rejected} == {429}
    assert {each.status_code for each in checked} == {403}
    assert len(auth.checked) == MAX_LOGIN_FAILURES


@pytest.mark.parametrize("trusted", ["", "10.0.0.1,127.0.0.0/8"])
def test_failures_behind_a_trusted_proxy_count_for_the_client(tmp_path: Path, trusted: str) -> None:
    """The header of a trusted proxy names the client; from any other address it is ignored."""
    with serve_page(tmp_path, token="secret", trusted_proxies=trusted) as page:

        def log_in(address: str) -> int:
            headers = {"x-forwarded-for": f"9.9.9.9, {address}"}
            return page.client.post("/login", data={"token": "x"}, headers=headers).status_code

        assert [log_in("1.1.1.1") for _ in range(6)] == [403] * 5 + [429]
        assert log_in("2.2.2.2") == (403 if trusted else 429)


def test_an_invalid_trusted_proxy_is_rejected() -> None:
    """A trusted proxy is an address or a network, not a name."""
    with pytest.raises(InvalidSetting, match="addresses or networks"):
        Settings(trusted_proxies="127.0.0.1,proxy.internal")
