"""Create the SDK clients of engines, with their API keys, and derive the scope of their responses."""

import hashlib
import os
from base64 import b64encode
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from kedge.engines.transport import PLACEHOLDER_KEY, Sdk
from kedge.errors import CannotConnect

if TYPE_CHECKING:
    from collections.abc import Callable

    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI


_HASH_KEY = b"kedge.scope/1"


def make_scope(provider: str, base_url: str, *credentials: str | None) -> str:
    """Return the scope in which response ids are valid, such as ``openai/api.openai.com/v1/5f2c…``."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    names = [provider, host + parts.path.rstrip("/"), hash_account(*credentials)]
    return "/".join(name for name in names if name).replace(" ", "%20")


def hash_account(*credentials: str | None) -> str:
    """Return a short name for an account, which does not reveal its credentials."""
    present = [credential for credential in credentials if credential]
    if not present:
        return ""
    joined = "\0".join(present).encode()
    return hashlib.blake2b(joined, key=_HASH_KEY, digest_size=8).hexdigest()


_CLIENT_SETTINGS = ("timeout", "max_retries", "organization", "project", "default_headers")
_OWNER_VARIABLES = {"organization": "OPENAI_ORG_ID", "project": "OPENAI_PROJECT_ID"}
_ACCOUNT_HEADERS = frozenset(
    {"authorization", "api-key", "x-api-key", "openai-organization", "openai-project"}
)
"""Headers that identify an account."""


def prepare_openai_client(
    provider: str, base_url: str, api_key: str | None, settings: dict[str, Any]
) -> "tuple[Callable[[], AsyncOpenAI], str]":
    """Return a factory for the openai client and its scope, and remove the client's settings from ``settings``."""
    base_url, client_settings = _split_settings(base_url, settings)
    key, owners = _check_key(provider, api_key), _resolve_owners(provider, client_settings)
    scope = _resolve_scope(provider, base_url, key, client_settings, settings, *owners.values())
    extra_headers: dict[str, str] = client_settings.pop("default_headers", None) or {}

    def make_client() -> "AsyncOpenAI":
        from openai import AsyncOpenAI

        headers = {} if provider == "openai" else _suppress_env_headers(key or PLACEHOLDER_KEY)
        client = AsyncOpenAI(
            api_key=key or PLACEHOLDER_KEY,
            base_url=base_url,
            http_client=_make_http_client("openai"),
            **client_settings,
            default_headers={**headers, **extra_headers},
        )
        # By default the client would send the OpenAI organization to every server.
        client.organization, client.project = owners["organization"], owners["project"]
        return client

    return make_client, scope


def _make_http_client(sdk: Sdk) -> Any:
    """Return the SDK's client over aiohttp, which needs half the CPU time, or its default one.

    A redirect is not followed: another server would get the conversation and, in most headers, the key.
    """
    name = "DefaultAioHttpClient" if find_spec("aiohttp") else "DefaultAsyncHttpxClient"
    return getattr(import_module(sdk), name)(follow_redirects=False)


def _suppress_env_headers(key: str) -> dict[str, Any]:
    """Return headers that replace those the client reads from the environment, which are meant for OpenAI only."""
    from openai import Omit

    lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")
    names = [line.partition(":")[0].strip() for line in lines if ":" in line]
    replacements = {"authorization": f"Bearer {key}"}
    return {name: replacements.get(name.lower(), Omit()) for name in names}


def prepare_anthropic_client(
    provider: str, base_url: str, api_key: str | None, settings: dict[str, Any]
) -> "tuple[Callable[[], AsyncAnthropic], str]":
    """Return a factory for the anthropic client and its scope, and remove the client's settings from ``settings``."""
    if find_spec("anthropic") is None:
        raise CannotConnect(f"{provider} needs a package: pip install 'kedge[anthropic]'")
    base_url, client_settings = _split_settings(base_url, settings)
    key = _check_key(provider, api_key)
    scope = _resolve_scope(provider, base_url, key, client_settings, settings)

    def make_client() -> "AsyncAnthropic":
        from anthropic import AsyncAnthropic

        return AsyncAnthropic(
            api_key=key or PLACEHOLDER_KEY,
            base_url=base_url,
            http_client=_make_http_client("anthropic"),
            **client_settings,
        )

    return make_client, scope


def _split_settings(base_url: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the address and the settings of the client; a password in the address becomes a header."""
    client_settings = {name: settings.pop(name) for name in _CLIENT_SETTINGS if name in settings}
    credentials, at, host = urlsplit(base_url).netloc.rpartition("@")
    if not at:
        return base_url, client_settings
    encoded = b64encode(unquote(credentials).encode()).decode()
    client_settings["default_headers"] = {
        "Authorization": f"Basic {encoded}",
        **(client_settings.get("default_headers") or {}),
    }
    return base_url.replace(f"{credentials}@{host}", host, 1), client_settings


def _resolve_scope(
    provider: str,
    base_url: str,
    key: str,
    client_settings: dict[str, Any],
    settings: dict[str, Any],
    *owners: str | None,
) -> str:
    headers: dict[str, str] = client_settings.get("default_headers") or {}
    account_values = [
        value for name, value in sorted(headers.items()) if name.lower() in _ACCOUNT_HEADERS
    ]
    explicit = settings.pop("scope", None)
    return explicit or make_scope(provider, base_url, key, *owners, *account_values)


def _check_key(provider: str, api_key: str | None) -> str:
    """Return the key without surrounding blanks, such as the line end of the file it was read from."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CannotConnect(
            f"the key for {provider} contains characters that are not allowed in a key; set it again"
        )
    return key


def _resolve_owners(provider: str, client_settings: dict[str, Any]) -> dict[str, str | None]:
    """Return the organization and project: those of the settings, or for OpenAI those of the environment."""
    return {
        name: client_settings.get(name)
        or (os.environ.get(variable) if provider == "openai" else None)
        for name, variable in _OWNER_VARIABLES.items()
    }
