"""The providers that Kedge knows: where each lives, and which key opens it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kedge.engines import AnthropicEngine, ChatCompletionsEngine, Engine, ResponsesEngine
from kedge.engines.anthropic.params import SAMPLING_UNTIL
from kedge.engines.stateless import Advice
from kedge.errors import CannotConnect
from kedge.providers.clients import anthropic_client, openai_client

OLLAMA = "http://127.0.0.1:11434"
"""Where Ollama listens, unless ``OLLAMA_HOST`` says otherwise."""
ANTHROPIC = "https://api.anthropic.com"
_OPENAI = ("api.openai.com", "openai.azure.com")
"""Where the Chat Completions API is OpenAI's own, which is particular in two things."""


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
    lanes: int = 16
    """How many responses it is known to write at once on one WebSocket."""

    def __call__(self, model: str, **settings: Any) -> Engine:
        """An engine for this model."""
        if not model:
            raise CannotConnect(f"which model? Write {self.name}:{self.example}")
        api_key = settings.pop("api_key", None) or os.environ.get(self.key)
        if not api_key:
            raise CannotConnect(f"no key for {self.name}: set {self.key} in the environment")
        base_url = settings.pop("base_url", None) or self._address()
        settings.setdefault("lanes", self.lanes)
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
    base_url, model = _place("responses", rest)
    api_key = settings.pop("api_key", None) or os.environ.get("KEDGE_API_KEY")
    return _engine("responses", model, base_url, api_key, **settings)


def chat_server(rest: str, **settings: Any) -> Engine:
    """``chat:<url>#model``: any server that speaks the Chat Completions API."""
    base_url, model = _place("chat", rest)
    api_key = settings.pop("api_key", None) or os.environ.get("KEDGE_API_KEY")
    host = _host(base_url)
    advice = Advice(
        unreachable=f"start the server, or mend its address ({host})",
        no_model=f"is {model!r} a model of this server, and is its address right?",
    )
    if host.endswith(_OPENAI):
        settings = {"max_tokens": "max_completion_tokens", "max_call_id": 40, **settings}
    return _chat_engine("chat", model, base_url, api_key, advice, **settings)


def ollama(model: str, **settings: Any) -> Engine:
    """``ollama:<model>``: a model of the Ollama on this machine, or where ``OLLAMA_HOST`` says."""
    if not model:
        raise CannotConnect("which model? Write ollama:llama3.2")
    advice = Advice(
        unreachable="start it with: ollama serve",
        no_model=f"fetch it with: ollama pull {model}",
    )
    address = settings.pop("base_url", None) or ollama_address(os.environ.get("OLLAMA_HOST", ""))
    return _chat_engine("ollama", model, address, settings.pop("api_key", None), advice, **settings)


def anthropic(model: str, **settings: Any) -> Engine:
    """``anthropic:<model>``: Anthropic's API, or a server that speaks it."""
    if not model:
        raise CannotConnect("which model? Write anthropic:claude-opus-4-8")
    api_key = settings.pop("api_key", None) or os.environ.get("ANTHROPIC_API_KEY")
    if not api_key:
        raise CannotConnect("no key for anthropic: set ANTHROPIC_API_KEY in the environment")
    given = settings.pop("base_url", None) or os.environ.get("ANTHROPIC_BASE_URL") or ANTHROPIC
    base_url = given.rstrip("/").removesuffix("/v1")
    headers: dict[str, str] = settings.get("default_headers") or {}
    versions = [value for name, value in headers.items() if name.lower() == "anthropic-version"]
    settings.setdefault("sampling", any(version < SAMPLING_UNTIL for version in versions))
    make_client, scope = anthropic_client("anthropic", base_url, api_key, settings)
    advice = Advice(
        unreachable=f"check the network, or mend ANTHROPIC_BASE_URL ({_host(base_url)})",
        no_model=f"is {model!r} a model of this server? Its documentation lists them",
    )
    return AnthropicEngine(model, make_client=make_client, scope=scope, advice=advice, **settings)


def ollama_address(host: str) -> str:
    """The address of the API for what ``OLLAMA_HOST`` says, as Ollama itself reads it."""
    given = host.strip().strip("'\"")
    parts = urlsplit(given if "://" in given else f"http://{given}" if given else OLLAMA)
    standard = {"http": 80, "https": 443}.get(parts.scheme, 11434) if "://" in given else 11434
    name = parts.hostname or "127.0.0.1"
    if name in ("0.0.0.0", "::"):  # noqa: S104 - where a server listens is where we find it
        name = "127.0.0.1"
    shown = f"[{name}]" if ":" in name else name
    return f"{parts.scheme}://{shown}:{parts.port or standard}{parts.path.rstrip('/')}/v1"


def practice(rest: str, **settings: Any) -> Engine:
    """``practice``: the built-in model, on a server that runs inside this process."""
    from kedge.providers.embedded import embedded_server

    if rest not in ("", "practice"):
        raise CannotConnect(f"there is one practice model, without a name; drop {rest!r}")
    server = embedded_server()
    settings.setdefault("scope", "practice")
    return _engine("practice", "practice", server.base_url, None, **settings)


def _host(base_url: str) -> str:
    """Host and port, without the password that an address may hold."""
    return urlsplit(base_url).netloc.rpartition("@")[2]


def _place(kind: str, rest: str) -> tuple[str, str]:
    """The address and the model of ``<url>#model``."""
    base_url, _, model = rest.rpartition("#")
    if not base_url or not model or "://" not in base_url:
        raise CannotConnect(
            f"an address and a model are needed: {kind}:http://127.0.0.1:8484/v1#model"
        )
    return base_url, model


def _engine(
    provider: str, model: str, base_url: str, api_key: str | None, **settings: Any
) -> Engine:
    make_client, scope = openai_client(provider, base_url, api_key, settings)
    return ResponsesEngine(
        model, make_client=make_client, scope=scope, provider=provider, **settings
    )


def _chat_engine(
    provider: str,
    model: str,
    base_url: str,
    api_key: str | None,
    advice: Advice,
    **settings: Any,
) -> Engine:
    make_client, scope = openai_client(provider, base_url, api_key, settings)
    return ChatCompletionsEngine(
        model, make_client=make_client, scope=scope, provider=provider, advice=advice, **settings
    )


_HOSTED = (
    Hosted(
        "openai",
        key="OPENAI_API_KEY",
        base_url="https://api.openai.com/v1",
        url="OPENAI_BASE_URL",
        example="gpt-5.1",
    ),
    Hosted("xai", key="XAI_API_KEY", base_url="https://api.x.ai/v1", example="grok-4", lanes=1),
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
    "chat": chat_server,
    "ollama": ollama,
    "anthropic": anthropic,
    "practice": practice,
}
