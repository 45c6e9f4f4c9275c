"""The access policy shared by server, web page and proxy."""

from typing import Any

import pytest

from for_each import for_each
from kedge.security.access_tokens import AccessToken, TokenUse
from kedge.server.access import (
    LOOPBACK_NAMES,
    AccessPolicy,
    Credentials,
    check_counts,
    counts_as_request,
    is_same_origin,
    parse_host_name,
    read_bearer_token,
)


def make_scope(**headers: str) -> Any:
    """Return an ASGI scope with the given headers."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": pairs}


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8484", "localhost"),
        ("LOCALHOST", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:8484", "[::1]"),
        ("", ""),
    ],
)
def test_host_name_is_parsed_without_its_port(host: str, name: str) -> None:
    """The port is removed, also after an IPv6 address, which contains colons itself."""
    assert parse_host_name(host.encode()) == name


def test_only_the_listed_host_names_are_allowed() -> None:
    """A policy with host names rejects other names; without host names it allows any."""
    policy = AccessPolicy(hosts=LOOPBACK_NAMES)
    assert policy.allows_host(make_scope(host="localhost:1"))
    assert not policy.allows_host(make_scope(host="localhost.evil.example"))
    assert not policy.allows_host(make_scope())
    assert AccessPolicy().allows_host(make_scope(host="evil.example"))


def test_a_token_matches_only_itself() -> None:
    """A token that is not ASCII is compared correctly, and without a token nothing matches."""
    policy = AccessPolicy(token="pässword")
    assert policy.matches_token("pässword".encode())
    assert not policy.matches_token(b"password")
    assert not policy.matches_token(b"")
    assert not AccessPolicy().matches_token(b"")


@for_each(
    ("origin", "same"),
    [
        ("", True),
        ("http://localhost:8484", True),
        ("HTTP://LOCALHOST:8484", True),
        ("http://localhost:9999", False),
        ("http://evil.example", False),
        ("null", False),
    ],
)
def test_an_origin_must_be_the_server_itself(origin: str, same: bool) -> None:
    """An origin must equal the server's address; a client that is not a browser sends none."""
    headers = {"origin": origin} if origin else {}
    assert is_same_origin(make_scope(host="localhost:8484", **headers)) is same


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer x", b"x"), ("bearer  x ", b"x"), ("Basic x", b""), ("x", b""), ("", b"")],
)
def test_a_bearer_token_is_read(header: str, token: bytes) -> None:
    """A bearer token is read from the header; other schemes give none."""
    assert read_bearer_token(make_scope(authorization=header)) == token


@pytest.mark.parametrize(
    ("site", "same"),
    [
        ("", True),
        ("none", True),
        ("Same-Origin", True),
        ("same-site", False),
        ("cross-site", False),
    ],
)
def test_a_browser_names_the_site_of_a_request(site: str, same: bool) -> None:
    """A page of another site is recognized also by a request without an origin, such as one for an image."""
    headers = {"sec-fetch-site": site} if site else {}
    assert is_same_origin(make_scope(host="localhost:8484", **headers)) is same


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
    ("requests", "tokens", "problem"),
    [(2, 9, None), (3, 9, "requests"), (2, 10, "tokens"), (3, 10, "requests")],
)
def test_limits_are_reached_by_the_next_request(
    requests: int, tokens: int, problem: str | None
) -> None:
    """The last request within a limit is accepted, and none after all tokens were used."""
    caller = AccessToken("ada", "", frozenset(), requests_per_minute=2, tokens_per_minute=10)
    rejection = check_counts(caller, TokenUse(requests, tokens, 30.0)).rejection
    assert (rejection.problem if rejection else None) == problem


@pytest.mark.parametrize(("token", "problem"), [(None, "host"), ("secret", None)])
async def test_any_host_needs_a_token(token: str | None, problem: str | None) -> None:
    """A page accepts other host names only while a token protects it."""
    policy = AccessPolicy(token, LOOPBACK_NAMES, frees_hosts=True)
    access = await policy.authorize(make_scope(host="kedge.example"), Credentials(b"secret"))
    assert (access.rejection.problem if access.rejection else None) == problem
