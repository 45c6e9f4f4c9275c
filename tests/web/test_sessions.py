"""Requests of a browser end with its session: by logging out in another tab, with its token, or by its expiry."""

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from kedge.server.access import Credentials, Grant
from kedge.store import TokenRegistry, open_store
from kedge.web import dashboard, runs
from kedge.web.security import SESSION_SECONDS, PageAuth
from kedge.web.service import ConversationService
from server.gated_model import GatedModel
from server.waiting import wait_until
from web.conftest import TIMEOUT, PageServer, serve_page

ADMIN = "open-sesame"


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send no heartbeats, which would also show that a stream has ended."""
    monkeypatch.setattr(dashboard, "HEARTBEAT_TICKS", 10**9)
    monkeypatch.setattr(runs, "HEARTBEAT_SECONDS", 1e6)


@contextmanager
def log_in(page: PageServer, token: str) -> Iterator[httpx2.Client]:
    """Yield the client of a browser with a session."""
    with httpx2.Client(base_url=page.url, timeout=TIMEOUT) as browser:
        assert browser.post("/login", data={"token": token}).status_code == 303
        yield browser


def open_tab(page: PageServer, browser: httpx2.Client) -> httpx2.Client:
    """Return the client of another tab of a browser."""
    return httpx2.Client(base_url=page.url, timeout=TIMEOUT, cookies=browser.cookies)


def add_token(page: PageServer, name: str) -> str:
    """Add a named token and return its secret."""

    async def work(service: ConversationService) -> str:
        return (await TokenRegistry(service.store).add(name))[1]

    return page.run(work)


def start_run(browser: httpx2.Client) -> tuple[str, str]:
    """Start a run whose model waits; return the path of its conversation and that of the run."""
    name = browser.post("/api/conversations", json={}).json()["id"]
    path = f"/api/conversations/{name}"
    body = {"message": "wait for it", "stream": True}
    with browser.stream("POST", f"{path}/runs", json=body) as answer:
        next(line for line in answer.iter_lines() if '"type":"text"' in line)
        return path, f"{path}/runs/{answer.headers['x-kedge-run']}"


@pytest.mark.parametrize("is_admin", [True, False])
def test_streams_end_when_another_tab_logs_out(tmp_path: Path, is_admin: bool) -> None:
    """The dashboard and a followed run end without an event; the run itself goes on, and so do other sessions."""
    gate = GatedModel()
    with serve_page(tmp_path, model=gate, token=ADMIN) as page:
        token = ADMIN if is_admin else add_token(page, "alice")
        with log_in(page, token) as browser, log_in(page, token) as other:
            path, run = start_run(browser)
            with (
                open_tab(page, browser) as tab,
                browser.stream("GET", "/dashboard/live") as live,
                browser.stream("GET", run) as followed,
                other.stream("GET", run) as kept,
            ):
                figures, events, kept_events = (
                    each.iter_lines() for each in (live, followed, kept)
                )
                for lines in (figures, events, kept_events):
                    assert next(lines)
                assert tab.get("/api/session").json() == {"user": "" if is_admin else "alice"}
                assert tab.post("/logout").status_code == 303
                assert not any('"figures"' in line for line in figures)
                assert not any('"done"' in line for line in events)
                assert browser.get("/api/session").status_code == 401
                gate.open_gate()
                assert any('"type":"done"' in line for line in kept_events)
            blocks = other.get(f"{path}/turns").json()["blocks"]
            assert blocks[-1]["parts"][0]["text"] == "answer to wait for it"


def test_a_request_that_waits_ends_with_its_session(tmp_path: Path) -> None:
    """A request without an answer yet gets 401, and its answer is stored for the next session."""
    gate = GatedModel()
    with serve_page(tmp_path, model=gate, token=ADMIN) as page, log_in(page, ADMIN) as browser:
        name = browser.post("/api/conversations", json={}).json()["id"]
        path = f"/api/conversations/{name}"
        with open_tab(page, browser) as tab:
            request = tab.build_request("POST", f"{path}/runs", json={"message": "wait"})
            with logging_out_later(page, browser, gate):
                answer = tab.send(request)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "token_needed"
        gate.open_gate()
        with log_in(page, ADMIN) as again:
            wait_until(lambda: len(again.get(f"{path}/turns").json()["blocks"]) == 2)


@contextmanager
def logging_out_later(page: PageServer, browser: httpx2.Client, gate: GatedModel) -> Iterator[None]:
    """Log out in another tab as soon as a model waits."""

    def log_out() -> None:
        wait_until(lambda: gate.waiting)
        with open_tab(page, browser) as tab:
            tab.post("/logout")

    thread = threading.Thread(target=log_out)
    thread.start()
    try:
        yield
    finally:
        thread.join(TIMEOUT)


@dataclass
class Clock:
    """A clock that the test sets."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def open_auth(folder: Path, clock: Clock) -> AsyncGenerator[tuple[PageAuth, TokenRegistry]]:
    """Yield the access policy of a page on a store, and its tokens."""
    async with open_store(folder / "store.db") as store:
        registry = TokenRegistry(store, clock=clock)
        yield PageAuth(ADMIN, registry=registry, clock=clock), registry


async def start_session(auth: PageAuth, token: str) -> Grant:
    """Log in with a token, and return what a request with the session is granted."""
    session = await auth.log_in(token)
    assert session
    sender = await auth.find_sender(Credentials(session=session))
    assert sender
    return Grant(sender.caller, session)


@pytest.mark.parametrize("is_admin", [True, False])
async def test_a_session_expires(tmp_path: Path, is_admin: bool) -> None:
    """A session is valid for its time; a bearer token does not expire."""
    clock = Clock()
    async with open_auth(tmp_path, clock) as (auth, registry):
        alice, secret = await registry.add("alice")
        grant = await start_session(auth, ADMIN if is_admin else secret)
        assert grant.caller == (None if is_admin else alice)
        assert await auth.is_valid(grant)
        clock.now += SESSION_SECONDS - 1
        assert await auth.is_valid(grant)
        clock.now += 2
        assert not await auth.is_valid(grant)
        assert await auth.is_valid(Grant(alice))


async def test_a_session_is_invalid_when_its_token_is_revoked(tmp_path: Path) -> None:
    """So are requests with the token itself."""
    async with open_auth(tmp_path, Clock()) as (auth, registry):
        alice, secret = await registry.add("alice")
        grant = await start_session(auth, secret)
        await registry.revoke("alice")
        assert not await auth.is_valid(grant)
        assert not await auth.is_valid(Grant(alice))


def test_the_user_of_a_session_is_reported(tmp_path: Path) -> None:
    """A program or a page asks whether its token or its session is valid, also where none is needed."""
    with serve_page(tmp_path) as page:
        assert page.get("/api/session") == {"user": ""}
        secret = add_token(page, "alice")
        headers = {"authorization": f"Bearer {secret}"}

        def read_user() -> str:
            return page.client.get("/api/session", headers=headers).json()["user"]

        wait_until(
            lambda: read_user() == "alice"
        )  # a store without tokens is checked again now and then
