"""Requests end when their token is revoked, or their session ends."""

import asyncio
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kedge._internal.access_tokens import AccessToken
from kedge.errors import StoreBusy, StoreReplaced
from kedge.server.access import Grant
from kedge.server.revocation import RevocationWatch
from server.waiting import TIMEOUT

pytestmark = pytest.mark.anyio

GRANT = Grant(AccessToken("alice", "alice", frozenset({"server"})))


class Policy:
    """A policy whose checks have the given results."""

    def __init__(self, *results: bool | Exception) -> None:
        self.results = list(results)

    async def is_valid(self, grant: Grant) -> bool:
        """Return the next result."""
        assert grant is GRANT
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def reject(_: Scope) -> Response:
    """Return the response to a revoked token."""
    return JSONResponse({"error": {"code": "revoked"}}, 401)


def make_watch(*results: bool | Exception) -> RevocationWatch:
    """Return a watch whose checks have the given results."""
    policy: Any = Policy(*results)
    return RevocationWatch(policy, reject, check_seconds=0.0)


async def run(
    app: Any, watch: RevocationWatch, kind: str = "http", turns: int = 0
) -> list[Message]:
    """Run an app for a request of a client that sends nothing, and return what is sent to it within some turns."""
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        sent.append(message)

    async with asyncio.timeout(TIMEOUT):
        await watch.run(app, GRANT, {"type": kind}, receive, send)
    return sent


async def test_a_stream_goes_on_until_its_token_is_known_to_be_revoked() -> None:
    """A store that does not answer does not end a stream, and what an app sends later is dropped."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"late"})

    watch = make_watch(True, StoreBusy("busy"), False)
    sent = await run(app, watch)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["body"] == b""


async def test_a_stream_ends_if_its_token_can_never_be_checked_again() -> None:
    """A stream does not go on if the file with its token was replaced, so that a revocation would not be noticed."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"

    sent = await run(app, make_watch(True, StoreReplaced("its file was replaced")))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_tokens_are_checked_again_after_a_time_without_requests() -> None:
    """The checks end with the last request, and a later request starts them again."""

    async def end(*_: object) -> None:
        pass

    async def wait(_: Scope, receive: Receive, __: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"

    watch = make_watch(False)
    assert await run(end, watch) == []
    for _ in range(20):
        await asyncio.sleep(0)
    assert not watch._tasks
    assert (await run(wait, watch))[0]["status"] == 401


@pytest.mark.parametrize("accepts", [False, True])
async def test_a_websocket_is_closed(accepts: bool) -> None:
    """A connection gets an error, if it was accepted, and is closed."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        if accepts:
            await send({"type": "websocket.accept"})
        assert (await receive())["type"] == "websocket.disconnect"

    sent = await run(app, make_watch(False), "websocket", turns=20)
    before = ["websocket.accept", "websocket.send"] if accepts else []
    assert [message["type"] for message in sent] == [*before, "websocket.close"]
    assert sent[-1]["code"] == 1008


@pytest.mark.parametrize(("is_finished", "messages"), [(False, 1), (True, 2)])
async def test_a_response_of_known_length_is_not_completed(
    is_finished: bool, messages: int
) -> None:
    """An incomplete body gets no end, because the server closes its connection; a finished one is not changed."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"10")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if is_finished:
            await send({"type": "http.response.body", "body": b"0123456789"})
        await receive()

    assert len(await run(app, make_watch(False))) == messages
