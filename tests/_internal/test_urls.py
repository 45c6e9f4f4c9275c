"""Tests of base URLs, and of the URLs of requests below them."""

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge._internal.urls import check_path, parse_base_url

BASES = ["http://host", "http://svc:secret@host", "https://host:8443/a/b", "http://[::1]:80/v1"]


@for_each(
    ("url", "address", "authorization"),
    [
        ("http://host", "http://host", ""),
        ("HTTPS://host/v1/", "https://host/v1", ""),
        ("http://ada:secret@host:1/v1", "http://host:1/v1", "Basic YWRhOnNlY3JldA=="),
        ("http://ada:s%40cret@host", "http://host", "Basic YWRhOnNAY3JldA=="),
        ("http://ada:s@cret@host", "http://host", "Basic YWRhOnNAY3JldA=="),
        ("http://ada@host", "http://host", "Basic YWRhOg=="),
        ("http://@host", "http://host", ""),
    ],
)
def test_credentials_become_a_header(url: str, address: str, authorization: str) -> None:
    """The address has no user and no password, and neither has its representation."""
    base = parse_base_url(url)
    assert (str(base), base.authorization) == (address, authorization)
    assert "secret" not in repr(base)
    assert "YWRh" not in repr(base)


@for_each(
    "url",
    [
        *("", "host/v1", "ftp://host", "http://", "http://ada:secret/@host"),
        *("http://host:secret", "http://host:0", "http://[secret", "http://host?secret"),
        *("http://host/#secret", "http://host/?", "http://host/a\\secret"),
        *("http://host\\@secret", "http://ho st/secret", "http://host%2F@secret%2F/"),
    ],
)
def test_other_text_is_no_base_url(url: str) -> None:
    """The error does not repeat the text, which may contain a password."""
    with pytest.raises(ValueError, match=r"^it must ") as exc_info:
        parse_base_url(url)
    assert "secret" not in str(exc_info.value)


@for_each("base", BASES)
@for_each(
    "path",
    [
        *("", "x", "@evil/x", ":80@evil/x", ".evil/x", "%2F@evil/x", "//evil/x", "/.."),
        *("/../x", "/a/./b", "/%2e%2E/x", "/%252e%252e/x", "/a%2F..%2Fx", "/a%5C..%5Cx"),
        *("/..;/x", "/..%3Bx/x", "/\\evil", "/a?b", "/a#b", "/a b", "/a\r\nb", "/\u00e9"),
    ],
)
def test_a_path_cannot_leave_the_base_url(base: str, path: str) -> None:
    """A path that could be resolved outside of the base URL is rejected."""
    with pytest.raises(ValueError, match="path"):
        parse_base_url(base).join(path)


@given(
    st.sampled_from(BASES), st.text("/.%25eEfF@:;\\?#ab[]\r\n ", max_size=12), st.text(max_size=8)
)
def test_a_joined_url_names_the_same_server(base: str, path: str, query: str) -> None:
    """Whatever the path and the query are, the URL names the server of the base URL and a path below it."""
    parsed = parse_base_url(base)
    try:
        url = parsed.join(path, query)
    except ValueError:
        return
    parts = urlsplit(url)
    assert (parts.scheme, parts.netloc) == (parsed.scheme, parsed.host)
    assert parts.path.startswith(f"{parsed.path}/")


@for_each("path", ["/", "/x", "/a//b", "/a.b/..c", "/a%2Fb", "/@evil", "/a:b", "/..."])
def test_other_paths_are_unchanged(path: str) -> None:
    """An unusual path that stays below the base URL is accepted as it is."""
    check_path(path)
    assert parse_base_url("http://host/v1").join(path, "a=b#c") == f"http://host/v1{path}?a=b%23c"


@for_each(
    ("location", "path"),
    [
        ("http://host/v1/files?a=b#c", "/files?a=b#c"),
        ("files", "/a/files"),
        ("../files", "/files"),
        ("/v1/files", "/files"),
        ("/v1", None),
        ("/v10/files", None),
        ("/login", None),
        ("//evil/v1/files", None),
        ("/\t/evil/v1/files", None),
        ("\\\\evil/v1/files", None),
        ("http://host@evil/v1/files", None),
        ("http://ada@host/v1/files", None),
        ("http://host:81/v1/files", None),
        ("https://host/v1/files", None),
        ("http://host/v1/../files", None),
        ("http://host/v1/%2e%2e/files", None),
        ("http://host/v1//evil", None),
        ("http://[/v1", None),
        ("javascript:alert(1)", None),
    ],
)
def test_a_redirect_below_the_base_url(location: str, path: str | None) -> None:
    """Only a redirect to the same server, below the base URL, has a path."""
    assert parse_base_url("http://host/v1").localize("http://host/v1/a/b", location) == path
