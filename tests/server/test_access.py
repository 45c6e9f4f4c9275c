"""The access policy shared by server, web page and proxy."""

from contextlib import closing
from typing import Any

import pytest

from kedge._internal.access_tokens import AccessToken, TokenUse
from kedge.server.access import (
    AccessPolicy,
    check_counts,
    counts_as_request,
)
from kedge.server.errors import RATE_LIMITED, TOKENS_LIMITED, ErrorTemplate
from kedge.store import TokenRegistry, open_store


def make_scope(**headers: str) -> Any:
    """Return an ASGI scope with the given headers."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": pairs}


@pytest.mark.parametrize(
    ("scope", "needed", "is_session", "counts"),
    [
        ({"type": "http", "method": "POST"}, "server", False, True),
        ({"type": "http", "method": "GET"}, "metrics", False, False),
        ({"type": "websocket"}, "server", False, False),
        ({"type": "http", "method": "GET"}, "page", True, False),
        ({"type": "http", "method": "POST"}, "page", True, True),
    ],
)
def test_what_counts_as_a_request(
    scope: dict[str, str], needed: str, is_session: bool, counts: bool
) -> None:
    """Neither metrics nor an opened WebSocket count for the limit of a token, nor what a page reads."""
    assert counts_as_request(scope, needed, is_session=is_session) is counts


@pytest.mark.parametrize(
    ("requests", "tokens", "error"),
    [(2, 9, None), (3, 9, RATE_LIMITED), (2, 10, TOKENS_LIMITED), (3, 10, RATE_LIMITED)],
)
def test_limits_are_reached_by_the_next_request(
    requests: int, tokens: int, error: ErrorTemplate | None
) -> None:
    """The last request within a limit is accepted, and none after all tokens were used."""
    caller = AccessToken("ada", "", frozenset(), requests_per_minute=2, tokens_per_minute=10)
    rejection = check_counts(caller, TokenUse(requests, tokens, 30.0)).rejection
    assert (rejection.error if rejection else None) == error


async def test_tokens_without_a_reservation_are_counted() -> None:
    """Tokens that were not reserved, such as those of a result from the background, count for their caller."""
    store = open_store("sqlite://:memory:")
    with closing(store.database):
        registry = TokenRegistry(store)
        caller, _ = await registry.add("ada", tokens_per_minute=100)
        await AccessPolicy(registry=registry).settle(None, 30, caller)
        assert (await registry.count("ada")).tokens == 30
