"""The access policy shared by server, web page and proxy."""

from typing import Any

import pytest

from kedge.server.access import (
    LOOPBACK_NAMES,
    AccessPolicy,
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


@pytest.mark.parametrize(
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
