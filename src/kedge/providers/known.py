"""The providers that Kedge knows: where each lives, and which key opens it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kedge.engines import Engine, ResponsesEngine
from kedge.engines.scopes import make_scope
from kedge.errors import CannotConnect

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CLIENT_SETTINGS = ("timeout", "max_retries", "organization", "project", "default_headers")


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
            return given.rstrip("/") + self.path
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
    owners = (client_settings.get("organization"), client_settings.get("project"))
    scope = settings.pop("scope", None) or make_scope(provider, base_url, api_key, *owners)

    def make_client() -> "AsyncOpenAI":
        from openai import AsyncOpenAI

        # The client insists on a key, also for servers that want none.
        return AsyncOpenAI(api_key=api_key or "none", base_url=base_url, **client_settings)

    return ResponsesEngine(
        model, make_client=make_client, scope=scope, provider=provider, **settings
    )


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
