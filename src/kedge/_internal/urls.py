"""The base URL of a server, and the URLs of requests below it.

A path may come from a request, from a server or from a store. It must not determine which server is contacted, so a
URL is built from the parsed parts of the base URL, and compared with them before it is used. A password in a base URL
becomes a header: text that is sent nowhere else cannot become a part of another URL.
"""

import ipaddress
import re
from base64 import b64encode
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

_UNSAFE = re.compile(r"[^\x21-\x7e]|\\")
"""Characters that clients remove, encode or treat as a slash."""
_DECODINGS = 5
"""How often a path is percent-decoded to find hidden segments: a server may decode what a proxy has decoded."""
NOT_A_URL = "it must be an http or https URL with a host name"


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """The base URL of a server, without credentials, a query, a fragment or a slash at its end.

    Attributes:
        scheme: ``http`` or ``https``.
        host: The host and the port, if there is one.
        path: The path, which is empty or begins with a slash.
        authorization: The ``Authorization`` header for the user and the password in the URL; empty for none.
    """

    scheme: str
    host: str
    path: str
    authorization: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}{self.path}"

    @lru_cache(maxsize=64)  # noqa: B019 - most requests of a process have one of a few paths
    def join(self, path: str, query: str = "") -> str:
        """Return the URL of a path below this one.

        Args:
            path: The path, which begins with a slash and is percent-encoded.
            query: The query, percent-encoded.

        Raises:
            ValueError: The URL would not be below this one.
        """
        check_path(path)
        url = f"{self}{path}"
        if query:
            url = f"{url}?{query.replace('#', '%23')}"
        parts = urlsplit(url)
        if (parts.scheme, parts.netloc, parts.path) != (self.scheme, self.host, self.path + path):
            raise ValueError("it is not below the base URL")
        return url

    def localize(self, url: str, target: str) -> str | None:
        """Return the target of a redirect relative to this URL, with which a proxy rewrites ``Location``.

        Args:
            url: The URL that answered with the redirect.
            target: The address that it names, which may be relative to ``url``.

        Returns:
            The path, query and fragment; None if the target is not below this URL.
        """
        try:
            parts = urlsplit(urljoin(url, target))
            path = parts.path.removeprefix(self.path)
            check_path(path)
        except ValueError:
            return None
        # Without the prefix, the path of a target elsewhere would remain complete, so it is compared with it.
        if (parts.scheme, parts.netloc, parts.path) != (self.scheme, self.host, self.path + path):
            return None
        return urlunsplit(("", "", path, parts.query, parts.fragment))


@lru_cache(maxsize=64)
def parse_base_url(url: str) -> BaseUrl:
    """Parse the base URL of a server.

    Raises:
        ValueError: It is not a base URL. The message does not contain any of it, because it may contain a password.
    """
    try:
        parts = urlsplit(url)
        host_name = parts.hostname
        port = parts.port
    except ValueError:  # whose message may contain the password
        raise ValueError(NOT_A_URL) from None
    if parts.scheme not in ("http", "https") or not host_name or port == 0:
        raise ValueError(NOT_A_URL)
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("it must not have a query or a fragment")
    login, _, host = parts.netloc.rpartition("@")
    path = parts.path.rstrip("/")
    # Clients differ in where a login with a backslash ends and the host begins.
    if _UNSAFE.search(host + path) or "\\" in login:
        raise ValueError(
            "it must not have blanks, backslashes, control characters or letters outside of ASCII"
        )
    # Clients differ in whether they decode a host. Within brackets, "%" begins the zone of an IPv6 address.
    _, _, host_outside_brackets = host.rpartition("]")
    if "%" in host_outside_brackets:
        raise ValueError("it must not have '%' in its host")
    return BaseUrl(parts.scheme, host, path, _build_authorization(login))


def _build_authorization(login: str) -> str:
    if not login:
        return ""
    user, _, password = login.partition(":")
    encoded = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return f"Basic {encoded}"


def quote_segment(text: str) -> str:
    """Return a text, such as an id, as one segment of a path."""
    return quote(text, safe="", errors="replace")


def check_path(path: str) -> None:
    """Reject a path that a client or a server could resolve to one outside of the base URL that it is appended to.

    Raises:
        ValueError: It does not begin with exactly one slash, or contains a ``.`` or ``..`` segment, a backslash, a
            blank, or another character that a path cannot contain.
    """
    if not path.startswith("/") or path.startswith("//"):
        raise ValueError("the path must begin with one '/'")
    if _UNSAFE.search(path) or "?" in path or "#" in path:
        raise ValueError("the path must not contain blanks, '\\', '?', '#' or control characters")
    decoded = path
    for _ in range(_DECODINGS):
        decoded = unquote(decoded)
    # Some servers treat a backslash as a slash, and remove parameters such as ";x=1" before they resolve "..".
    segments = decoded.replace("\\", "/").split("/")
    names = {segment.partition(";")[0] for segment in segments}
    if "." in names or ".." in names:
        raise ValueError("the path must not contain '.' or '..' segments")


SAFE_SCHEMES = frozenset({"http", "https", "mailto"})
"""The allowed schemes of links."""


def is_safe_link(url: str) -> bool:
    """Return whether the page may show a URL as a link."""
    # Browsers remove control characters, so "java\tscript:" is a script.
    if any(character <= " " for character in url):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if parts.scheme not in SAFE_SCHEMES:
        return False
    return parts.scheme == "mailto" or bool(parts.netloc)


def find_doubled_part(url: str) -> str:
    """Return the one or two segments of a path that occur twice in a row; empty if there are none.

    In ``/v1/v1/responses`` they are ``/v1``, and in ``/api/v1/api/v1`` ``/api/v1``.
    """
    try:
        segments = urlsplit(url).path.strip("/").split("/")
    except ValueError:
        return ""
    for length in (1, 2):
        for start in range(len(segments)):
            middle = start + length
            part = segments[start:middle]
            next_part = segments[middle : middle + length]
            if any(part) and part == next_part:
                return f"/{'/'.join(part)}"
    return ""
