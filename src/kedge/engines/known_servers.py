"""Servers whose memory is known, by their host or by the name they send in a response header."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

IDENTITY_HEADER = "kedge-server"
"""The header by which the local server of Kedge identifies itself."""


@dataclass(frozen=True, slots=True)
class KnownServer:
    """What is known about a server without asking it."""

    remembers: bool = False
    """Whether its memory needs no further proof."""
    max_depth: int | None = None
    """How many responses of a chain it passes to the model."""


KNOWN_HOSTS: Mapping[str, KnownServer] = {
    "api.openai.com": KnownServer(remembers=True),
    "api.x.ai": KnownServer(remembers=True),
    ".openai.azure.com": KnownServer(remembers=True),
    ".cognitiveservices.azure.com": KnownServer(remembers=True),
    ".services.ai.azure.com": KnownServer(remembers=True),
}
"""Hosted services; a name that starts with a dot matches its subdomains."""
KNOWN_IDENTITIES: Mapping[str, KnownServer] = {
    "kedge": KnownServer(remembers=True),
    "smg": KnownServer(max_depth=100),
}
"""Servers that say who they are."""


def find_known_host(base_url: str) -> KnownServer | None:
    """Return what is known about the server at an address."""
    host = urlsplit(base_url).hostname or ""
    for name, known in KNOWN_HOSTS.items():
        if host == name or (name.startswith(".") and host.endswith(name)):
            return known
    return None


def read_identity(headers: Mapping[str, str]) -> str:
    """Return the name by which a server identifies itself in its headers; empty if it does not."""
    name = headers.get(IDENTITY_HEADER) or headers.get("server") or ""
    return name.partition("/")[0].strip().lower()
