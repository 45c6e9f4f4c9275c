"""Scopes: where a response id means something.

An id is worth something only at the provider, the endpoint and the account that made it. The account
is told apart by a keyed hash of its credentials, never by the credentials themselves.
"""

import hashlib
from urllib.parse import urlsplit

_KEY = b"kedge.scope/1"


def make_scope(provider: str, base_url: str, *credentials: str | None) -> str:
    """A name such as ``openai/api.openai.com/v1/5f2c…`` for what shares one memory."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    names = [provider, host + parts.path.rstrip("/"), account(*credentials)]
    return "/".join(name for name in names if name).replace(" ", "%20")


def account(*credentials: str | None) -> str:
    """A short name for an account that does not give its credentials away."""
    known = [credential for credential in credentials if credential]
    if not known:
        return ""
    joined = "\0".join(known).encode()
    return hashlib.blake2b(joined, key=_KEY, digest_size=8).hexdigest()
