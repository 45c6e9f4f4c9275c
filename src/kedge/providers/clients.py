"""The settings of ``connect``: their names, the client that they describe, and the scope of its responses.

A scope names the server and the account, so a response id is never sent to a server or an account that did not
create it.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast
from urllib.parse import urlsplit

import kedge
from kedge._internal.arguments import check_count, read_variable, validate_seconds
from kedge._internal.urls import BaseUrl, parse_base_url
from kedge.engines import Engine
from kedge.engines.http_errors import (
    CREDENTIAL_HEADERS,
    GATEWAY_HEADERS,
    PLACEHOLDER_KEY,
    ErrorBuilder,
    find_secrets,
)
from kedge.engines.prompt_cache import CacheLifetime
from kedge.engines.response_bytes import resolve_limit
from kedge.errors import CannotConnect, InvalidSetting, UnknownSetting
from kedge.evidence.server_evidence import EvidenceStore, Trust
from kedge.planning import CacheRules, Mode

if TYPE_CHECKING:
    from kedge.engines.http_client import HttpClient
    from kedge.engines.transport import AnyClient

PRACTICE_SCOPE = "practice"
"""The scope of the practice model's responses."""


class ClientSettings(TypedDict, total=False):
    """Settings of the HTTP client. Servers of Anthropic's API have neither organizations nor projects."""

    timeout: Any
    max_retries: int
    max_response_bytes: int | None
    organization: str
    project: str
    default_headers: Mapping[str, str]


class ConnectSettings(ClientSettings, total=False):
    """The keyword arguments of ``connect``; ``docs/engines.md`` describes them, and the APIs that have them."""

    api_key: str | None
    base_url: str | None
    mode: Mode
    retention: float | None
    max_depth: int | None
    audit_every: int
    params: Mapping[str, Any] | None
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    transport: Literal["http", "websocket"]
    connections: int
    lanes: int
    trust: Trust
    evidence_store: EvidenceStore | None
    prompt_cache: bool
    cache_rules: CacheRules | None
    scope: str
    max_tokens_name: str
    max_call_id_length: int | None
    replay_reasoning: bool
    cache_control: bool
    sampling: bool
    cache_lifetime: CacheLifetime


ANTHROPIC_VERSION = "2026-10-21"
"""The version of Anthropic's API, unless another is set in ``default_headers``."""
_HASH_KEY = b"kedge.scope/1"


def parse_address(base_url: str) -> BaseUrl:
    """Parse the base URL of a server.

    Raises:
        CannotConnect: It is not a base URL.
    """
    try:
        return parse_base_url(base_url)
    except ValueError as error:
        raise CannotConnect(f"the address is invalid: {error}") from None


def make_scope(provider: str, base_url: str, *credentials: str | None) -> str:
    """Return the scope in which response ids are valid, such as ``openai/api.openai.com/v1/5f2c…``."""
    parts = urlsplit(base_url)
    address = parts.hostname or ""
    if parts.port:
        address += f":{parts.port}"
    address += parts.path.rstrip("/")
    segments = [provider, address, hash_account(*credentials)]
    return "/".join(segment for segment in segments if segment).replace(" ", "%20")


def hash_account(*credentials: str | None) -> str:
    """Return a short name for an account, which does not reveal its credentials."""
    present = [credential for credential in credentials if credential]
    if not present:
        return ""
    joined = "\0".join(present).encode()
    return hashlib.blake2b(joined, key=_HASH_KEY, digest_size=8).hexdigest()


_OWNER_VARIABLES = {"organization": "OPENAI_ORG_ID", "project": "OPENAI_PROJECT_ID"}
"""Settings that name the owner of a key, which only OpenAI's APIs have, and their environment variables."""
_ACCOUNT_HEADERS = frozenset(
    {*CREDENTIAL_HEADERS, *GATEWAY_HEADERS, "openai-organization", "openai-project"}
)
"""Headers that identify an account."""


_HEADER_VARIABLES = {"openai": "OPENAI_CUSTOM_HEADERS", "anthropic": "ANTHROPIC_CUSTOM_HEADERS"}
"""The environment variables with further headers, by provider."""


def prepare_client(
    provider: str, base_url: str, api_key: str | None, settings: dict[str, Any]
) -> "tuple[Callable[[], AnyClient], str]":
    """Return a function that makes the client, and the scope; the client's settings are removed from ``settings``."""
    base_url, client_settings = _split_settings(base_url, settings)
    key = _check_key(provider, api_key)
    owners = _resolve_owners(provider, client_settings)
    env_headers = _read_env_headers(_HEADER_VARIABLES.get(provider, ""))
    default_headers: dict[str, str] = client_settings.get("default_headers") or {}

    scope = settings.pop("scope", None)
    if not scope:
        further_headers = _merge_headers(env_headers, default_headers)
        account_values = [
            further_headers[name] for name in sorted(further_headers) if name in _ACCOUNT_HEADERS
        ]
        scope = make_scope(provider, base_url, key, *owners.values(), *account_values)

    login_headers: dict[str, str | None] = {}
    if provider == "anthropic":
        login_headers["X-Api-Key"] = key or PLACEHOLDER_KEY
        login_headers["Anthropic-Version"] = ANTHROPIC_VERSION
    else:
        login_headers["Authorization"] = f"Bearer {key or PLACEHOLDER_KEY}"
        login_headers["OpenAI-Organization"] = owners["organization"]
        login_headers["OpenAI-Project"] = owners["project"]
    headers = _merge_headers(login_headers, env_headers, default_headers)
    error_builder = ErrorBuilder(provider, base_url, key, find_secrets(headers))
    return lambda: _make_client(error_builder, headers, client_settings), scope


def _make_client(
    error_builder: ErrorBuilder, headers: Mapping[str, str], settings: Mapping[str, Any]
) -> "HttpClient":
    # To import aiohttp takes time, which a program that sends no request should not need.
    from kedge.engines import http_client

    return http_client.HttpClient(
        error_builder,
        _merge_headers({"User-Agent": f"kedge/{kedge.__version__}"}, headers),
        timeouts=http_client.Timeouts.of(settings.get("timeout", http_client.DEFAULT_TIMEOUTS)),
        max_retries=settings.get("max_retries", http_client.DEFAULT_MAX_RETRIES),
        max_response_bytes=settings.get("max_response_bytes"),
    )


_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")


def _merge_headers(*groups: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of all groups; the last value of a name counts, and ``None`` removes it.

    Raises:
        InvalidSetting: A header cannot be sent.
    """
    merged = {name.lower(): value for group in groups for name, value in group.items()}
    headers = {name: value for name, value in merged.items() if value is not None}
    for name, value in headers.items():
        is_text = isinstance(value, str) and _HEADER_VALUE.fullmatch(value)
        if not (is_text and _HEADER_NAME.fullmatch(name)):  # the value may be secret
            raise InvalidSetting(
                f"the header {name!r} must have a name without blanks and be text without line breaks"
            )
    return headers


def _read_env_headers(variable: str) -> dict[str, str]:
    """Return the headers of an environment variable: lines of a name, a colon and a value."""
    lines = read_variable(variable).split("\n")
    pairs = [line.partition(":") for line in lines if ":" in line]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _split_settings(base_url: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the address and the settings of the client; a password in the address becomes a header."""
    client_settings = {
        name: settings.pop(name) for name in ClientSettings.__optional_keys__ & settings.keys()
    }
    _check_settings(client_settings)
    base = parse_address(base_url)
    if base.authorization:
        client_settings["default_headers"] = {
            "Authorization": base.authorization,
            **(client_settings.get("default_headers") or {}),
        }
    return str(base), client_settings


def _check_settings(settings: Mapping[str, Any]) -> None:
    resolve_limit(settings.get("max_response_bytes"))
    timeout = settings.get("timeout")
    for phase in ("connect", "read"):  # a number is the limit of both
        validate_seconds(getattr(timeout, phase, timeout), "timeout")
    check_count("max_retries", settings.get("max_retries", 0))


def _check_key(provider: str, api_key: str | None) -> str:
    """Return the key without surrounding blanks, such as the line end of a file that it was read from.

    Raises:
        CannotConnect: The key has a character that a header cannot contain.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CannotConnect(
            f"the key for {provider} contains characters that are not allowed in a key; set it again"
        )
    return key


def _resolve_owners(provider: str, client_settings: dict[str, Any]) -> dict[str, str | None]:
    """Return the organization and project of the settings, or for OpenAI of the environment; else None."""
    owners: dict[str, str | None] = {}
    for name, variable in _OWNER_VARIABLES.items():
        owner = client_settings.get(name)
        if not owner and provider == "openai":
            owner = read_variable(variable)
        owners[name] = owner or None
    return owners


def make_engine(
    kind: type[Engine],
    provider: str,
    model: str,
    base_url: str,
    api_key: str | None,
    settings: dict[str, Any],
) -> Engine:
    """Return an engine with the client of a server, and with its settings, whose names were checked."""
    settings["make_client"], settings["scope"] = prepare_client(
        provider, base_url, api_key, settings
    )
    settings["provider"] = provider
    return cast("Callable[..., Engine]", kind)(model, **settings)


PROVIDER_SETTINGS = frozenset({"api_key", "base_url"})
"""The settings of a provider that are not settings of its engines."""
_DETERMINED_SETTINGS = frozenset({"make_client", "provider"})
"""The settings of an engine that its provider determines."""


def check_names(
    kind: type[Engine],
    model: str,
    settings: Mapping[str, Any],
    provider_settings: frozenset[str] = PROVIDER_SETTINGS,
) -> None:
    """Check that a provider, its engine or its client has settings with these names.

    Args:
        kind: The class of the engine.
        model: The model, for the error.
        settings: The settings of a caller of ``connect``.
        provider_settings: Those of ``PROVIDER_SETTINGS`` that the provider accepts.

    Raises:
        UnknownSetting: One of them is unknown.
    """
    engine_settings = _list_engine_settings(kind) - _DETERMINED_SETTINGS
    accepted = engine_settings | _list_client_settings(kind) | provider_settings
    for name in settings.keys() - accepted:
        documented = ConnectSettings.__optional_keys__ & accepted
        raise UnknownSetting(name, documented, f"the engine of {model!r}")


def _list_client_settings(kind: type[Engine]) -> frozenset[str]:
    if getattr(kind, "sdk", "openai") == "anthropic":
        return ClientSettings.__optional_keys__ - _OWNER_VARIABLES.keys()
    return ClientSettings.__optional_keys__


@cache
def _list_engine_settings(kind: type[Engine]) -> frozenset[str]:
    """Return the names of the settings of an engine's class, its base classes and ``EngineSettings``."""
    from kedge.engines.request_engine import EngineSettings

    names = set(EngineSettings.__annotations__)
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = signature(base.__init__).parameters.values()
            names |= {
                parameter.name
                for parameter in parameters
                if parameter.kind is parameter.KEYWORD_ONLY
            }
    return frozenset(names)
