"""The providers that Kedge knows: where each lives, and which key opens it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kedge.engines import Engine, ResponsesEngine
from kedge.engines.scopes import make_scope
from kedge.engines.transport import NO_KEY
from kedge.errors import CannotConnect

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CLIENT_SETTINGS = ("timeout", "max_retries", "organization", "project", "default_headers")
_OWNERS = {"organization": "OPENAI_ORG_ID", "project": "OPENAI_PROJECT_ID"}
_TELLING = frozenset(
    {"authorization", "api-key", "x-api-key", "openai-organization", "openai-project"}
)
"""Headers that tell one account from another."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A hosted Responses API."""

    name: str
    key: str
    """The environment variable that holds the key."""
    base_url: str = ""
    url: str = ""
    """The environment variable that holds the address, if it can differ."""
    path: str = ""
    """What follows the address that people are given."""
    example: str = ""

    def __call__(self, model: str, **settings: Any) -> Engine:
        """An engine for this model."""
        if not model:
            raise CannotConnect(f"which model? Write {self.name}:{self.example}")
        api_key = settings.pop("api_key", None) or os.environ.get(self.key)
        if not api_key:
            raise CannotConnect(f"no key for {self.name}: set {self.key} in the environment")
        base_url = settings.pop("base_url", None) or self._address()
        return _engine(self.name, model, base_url, api_key, **settings)

    def _address(self) -> str:
        given = os.environ.get(self.url, "") if self.url else ""
        if given:
            return given.rstrip("/").removesuffix(self.path) + self.path
        if not self.base_url:
            raise CannotConnect(f"no address for {self.name}: set {self.url} in the environment")
        return self.base_url


def any_server(rest: str, **settings: Any) -> Engine:
    """``responses:<url>#model``: any server that speaks the Responses API."""
    base_url, _, model = rest.rpartition("#")
    if not base_url or not model or "://" not in base_url:
        raise CannotConnect(
            "an address and a model are needed: responses:http://127.0.0.1:8484/v1#model"
        )
    api_key = settings.pop("api_key", None) or os.environ.get("KEDGE_API_KEY")
    return _engine("responses", model, base_url, api_key, **settings)


def practice(rest: str, **settings: Any) -> Engine:
    """``practice``: the built-in model, on a server that runs inside this process."""
    from kedge.providers.embedded import embedded_server

    if rest not in ("", "practice"):
        raise CannotConnect(f"there is one practice model, without a name; drop {rest!r}")
    server = embedded_server()
    settings.setdefault("scope", "practice")
    return _engine("practice", "practice", server.base_url, None, **settings)


def _engine(
    provider: str, model: str, base_url: str, api_key: str | None, **settings: Any
) -> Engine:
    client_settings = {k: settings.pop(k) for k in _CLIENT_SETTINGS if k in settings}
    key, owners = _checked(provider, api_key), _owners(provider, client_settings)
    headers: dict[str, str] = client_settings.get("default_headers") or {}
    more = [value for name, value in sorted(headers.items()) if name.lower() in _TELLING]
    scope = settings.pop("scope", None) or make_scope(
        provider, base_url, key, *owners.values(), *more
    )

    def make_client() -> "AsyncOpenAI":
        from openai import AsyncOpenAI, DefaultAioHttpClient

        made = AsyncOpenAI(
            api_key=key or NO_KEY,
            base_url=base_url,
            http_client=DefaultAioHttpClient(),  # the client's own other one, of half the cost
            **client_settings,
        )
        # By itself the client would tell every server who pays at OpenAI.
        made.organization, made.project = owners["organization"], owners["project"]
        return made

    return ResponsesEngine(
        model, make_client=make_client, scope=scope, provider=provider, **settings
    )


def _checked(provider: str, api_key: str | None) -> str:
    """The key, without the line end of the file it was read from."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CannotConnect(f"the key for {provider} holds characters that no key has: set it anew")
    return key


def _owners(provider: str, given: dict[str, Any]) -> dict[str, str | None]:
    """On whose account requests go: as given, for OpenAI else as in the environment."""
    return {
        name: given.get(name) or (os.environ.get(variable) if provider == "openai" else None)
        for name, variable in _OWNERS.items()
    }


_HOSTED = (
    Hosted(
        "openai",
        key="OPENAI_API_KEY",
        base_url="https://api.openai.com/v1",
        url="OPENAI_BASE_URL",
        example="gpt-5.1",
    ),
    Hosted("xai", key="XAI_API_KEY", base_url="https://api.x.ai/v1", example="grok-4"),
    Hosted(
        "azure",
        key="AZURE_OPENAI_API_KEY",
        url="AZURE_OPENAI_ENDPOINT",
        path="/openai/v1",
        example="my-deployment",
    ),
)
PROVIDERS: dict[str, Callable[..., Engine]] = {
    **{hosted.name: hosted for hosted in _HOSTED},
    "responses": any_server,
    "practice": practice,
}
