"""The built-in providers: their addresses, and the environment variables of their keys."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from kedge import engines
from kedge._internal.arguments import read_variable
from kedge.engines import Engine
from kedge.engines.prompt_cache import CHAT_HOST_RULES, HOST_RULES, find_host_rules
from kedge.engines.stateless import Advice
from kedge.errors import CannotConnect
from kedge.evidence.server_evidence import KNOWN_IDENTITIES, find_known_host
from kedge.planning.cache_plan import CacheRules
from kedge.providers.clients import PRACTICE_SCOPE, check_names, make_engine, parse_address

OLLAMA_PORT = 11434
_OPENAI_HOSTS = ("api.openai.com", "openai.azure.com")
"""Hosts of OpenAI's Chat Completions API, which has its own name for ``max_tokens`` and a limit for call ids."""
_OPENROUTER_HOST = "openrouter.ai"
_CACHE_CONTROL_MODELS = ("anthropic/", "google/gemini", "qwen/")
"""Models for which OpenRouter passes on ``cache_control`` breakpoints."""


def _build_responses_engine(
    provider: str, model: str, base_url: str, api_key: str | None, **settings: Any
) -> Engine:
    from kedge.engines.responses import ResponsesEngine

    settings.setdefault("known_server", find_known_host(str(parse_address(base_url))))
    if settings["known_server"] is not None:
        settings.setdefault("prompt_cache", settings["known_server"].remembers)
    _add_cache_rules(base_url, settings, HOST_RULES)
    return make_engine(ResponsesEngine, provider, model, base_url, api_key, settings)


def _add_cache_rules(
    base_url: str, settings: dict[str, Any], host_rules: Mapping[str, CacheRules]
) -> None:
    """Add how the provider at an address caches prompts, if that is known."""
    host = urlsplit(str(parse_address(base_url))).hostname or ""
    rules = find_host_rules(host, host_rules)
    if rules is not None:
        settings.setdefault("cache_rules", rules)
        settings.setdefault("prompt_cache", True)


def _build_chat_engine(
    provider: str, model: str, base_url: str, api_key: str | None, **settings: Any
) -> Engine:
    from kedge.engines.chat_completions import ChatCompletionsEngine

    _add_cache_rules(base_url, settings, CHAT_HOST_RULES)
    return make_engine(ChatCompletionsEngine, provider, model, base_url, api_key, settings)


def _build_anthropic_engine(
    provider: str, model: str, address: str, api_key: str | None, **settings: Any
) -> Engine:
    from kedge.engines.anthropic import NO_SAMPLING_VERSION, AnthropicEngine

    base_url = address.rstrip("/").removesuffix("/v1")
    headers: dict[str, str] = settings.get("default_headers") or {}
    versions = [value for name, value in headers.items() if name.lower() == "anthropic-version"]
    settings.setdefault("sampling", any(version < NO_SAMPLING_VERSION for version in versions))
    settings["advice"] = Advice(
        unreachable=f"check the network, or correct ANTHROPIC_BASE_URL ({parse_address(base_url).host})",
        no_model=f"is {model!r} a model of this server? Its documentation lists them",
    )
    return make_engine(AnthropicEngine, provider, model, base_url, api_key, settings)


class HostedProvider(Struct, frozen=True):
    """A hosted API, and a function that returns engines for its models."""

    name: str
    key_variable: str
    """The environment variable with the API key."""
    example: str
    """A model, for errors and advice."""
    base_url: str = ""
    """The address; empty if each customer has another one."""
    url_variable: str = ""
    """The environment variable with the address, if the address can differ."""
    path: str = ""
    """The path that is appended to the address of the environment variable."""
    generic_provider: str = "responses"
    """The provider of other servers with the same API, if there is one."""
    engine_class: str = "ResponsesEngine"
    """The name of the class of its engines, whose module takes time to import."""
    build: Callable[..., Engine] = _build_responses_engine
    default_settings: tuple[tuple[str, Any], ...] = (("lanes", 16), ("prompt_cache", True))
    """The settings of its engines, unless others are given."""

    def __call__(self, model: str, /, **settings: Any) -> Engine:
        """Return an engine for a model of this provider."""
        self._check_model(model)
        check_names(getattr(engines, self.engine_class), model, settings)
        api_key = settings.pop("api_key", None) or read_variable(self.key_variable)
        base_url = settings.pop("base_url", None)
        if not api_key:
            raise CannotConnect(
                f"no key for {self.name}:{model}: set {self.key_variable} in the environment, or pass api_key="
            )
        address = base_url or self._resolve_url()
        for name, default in self.default_settings:
            settings.setdefault(name, default)
        return self.build(self.name, model, address, api_key, **settings)

    def _check_model(self, model: str) -> None:
        """Reject a model string without a model, or with an address: the hosted service would receive the requests."""
        if not model:
            raise CannotConnect(
                f"the model is missing; write for example {self.name}:{self.example}"
            )
        if "://" in model:
            message = (
                f"a model string of {self.name} has no address; pass it as base_url=, with a model such as "
                f"{self.name}:{self.example}"
            )
            if self.generic_provider:
                message += f", or write {self.generic_provider}:<url>#<model>"
            raise CannotConnect(message)

    def _resolve_url(self) -> str:
        if self.url_variable:
            address = read_variable(self.url_variable)
            if address:  # with the path or without it
                return address.rstrip("/").removesuffix(self.path) + self.path
        if not self.base_url:
            raise CannotConnect(
                f"no address for {self.name}: set {self.url_variable} in the environment"
            )
        return self.base_url


_KEY_ONLY = frozenset({"api_key"})
"""The setting of providers whose address is part of the model string, or known."""


def connect_responses(rest: str, /, **settings: Any) -> Engine:
    """Return an engine for ``responses:<url>#model``: any server with the Responses API."""
    check_names(engines.ResponsesEngine, rest, settings, _KEY_ONLY)
    base_url, model, api_key = _parse_address("responses", rest, settings)
    return _build_responses_engine("responses", model, base_url, api_key, **settings)


def connect_chat(rest: str, /, **settings: Any) -> Engine:
    """Return an engine for ``chat:<url>#model``: any server with the Chat Completions API."""
    check_names(engines.ChatCompletionsEngine, rest, settings, _KEY_ONLY)
    base_url, model, api_key = _parse_address("chat", rest, settings)
    host = parse_address(base_url).host
    advice = Advice(
        unreachable=f"start the server, or correct its address ({host})",
        no_model=f"is {model!r} a model of this server, and is its address right?",
    )
    settings = {**find_chat_settings(host, model), **settings, "advice": advice}
    return _build_chat_engine("chat", model, base_url, api_key, **settings)


def find_chat_settings(host: str, model: str) -> dict[str, Any]:
    """Return the settings of a ``ChatCompletionsEngine`` for the provider at a host."""
    if host.endswith(_OPENAI_HOSTS):
        return {
            "max_tokens_name": "max_completion_tokens",
            "max_call_id_length": 40,
            "prompt_cache": True,
        }
    if host.endswith(_OPENROUTER_HOST) and model.startswith(_CACHE_CONTROL_MODELS):
        return {"prompt_cache": True, "cache_control": True}
    return {}


def connect_ollama(model: str, /, **settings: Any) -> Engine:
    """Return an engine for ``ollama:<model>``: Ollama on this machine, or at the address in ``OLLAMA_HOST``."""
    if not model:
        raise CannotConnect("the model is missing; write for example ollama:llama3.2")
    check_names(engines.ChatCompletionsEngine, model, settings)
    settings["advice"] = Advice(
        unreachable="start it with: ollama serve",
        no_model=f"fetch it with: ollama pull {model}",
    )
    base_url = settings.pop("base_url", None) or resolve_ollama_url(read_variable("OLLAMA_HOST"))
    api_key = settings.pop("api_key", None)
    return _build_chat_engine("ollama", model, base_url, api_key, **settings)


def resolve_ollama_url(host: str) -> str:
    """Return the address of the API for a value of ``OLLAMA_HOST``, parsed as Ollama parses it."""
    address = host.strip().strip("'\"")
    default_ports: dict[str, int] = {}
    if "://" in address:
        default_ports = {"http": 80, "https": 443}
    else:
        address = f"http://{address}"
    try:
        parts = urlsplit(address)
        port = parts.port or default_ports.get(parts.scheme, OLLAMA_PORT)
    except ValueError:
        raise CannotConnect("the address in OLLAMA_HOST is invalid") from None
    name = parts.hostname or "127.0.0.1"
    if name in ("0.0.0.0", "::"):  # noqa: S104 - the server listens on all interfaces, so also on loopback
        name = "127.0.0.1"
    if ":" in name:  # an address of IPv6
        name = f"[{name}]"
    return f"{parts.scheme}://{name}:{port}{parts.path.rstrip('/')}/v1"


def connect_practice(rest: str, /, **settings: Any) -> Engine:
    """Return an engine for ``practice``: the built-in model, on a server inside this process."""
    if rest not in ("", "practice"):
        raise CannotConnect(f"there is only one practice model, which has no name; remove {rest!r}")
    check_names(engines.ResponsesEngine, "practice", settings, _KEY_ONLY)
    settings.pop(
        "api_key", None
    )  # is ignored, so that a program that passes one can switch to this model
    from kedge.providers.practice_memory import get_embedded_server

    server = get_embedded_server()
    settings.setdefault("scope", PRACTICE_SCOPE)
    # Requests are the same on every machine, with or without the package that encrypts, and so are their sizes.
    settings.setdefault("known_server", KNOWN_IDENTITIES["kedge"])
    settings.setdefault("prompt_cache", True)
    return _build_responses_engine("practice", "practice", server.base_url, None, **settings)


def _parse_address(
    provider: str, rest: str, settings: dict[str, Any]
) -> tuple[str, str, str | None]:
    """Return the address and the model of ``<url>#model``, and the key, which is removed from the settings."""
    base_url, _, model = rest.rpartition("#")
    if not base_url or not model or "://" not in base_url:
        raise CannotConnect(
            f"an address and a model are needed: {provider}:http://127.0.0.1:8484/v1#model"
        )
    return base_url, model, settings.pop("api_key", None) or read_variable("KEDGE_API_KEY")


_HOSTED_PROVIDERS = (
    HostedProvider(
        "openai",
        key_variable="OPENAI_API_KEY",
        example="gpt-5.1",
        base_url="https://api.openai.com/v1",
        url_variable="OPENAI_BASE_URL",
    ),
    HostedProvider(
        "xai",
        key_variable="XAI_API_KEY",
        example="grok-4",
        base_url="https://api.x.ai/v1",
        default_settings=(("lanes", 1), ("prompt_cache", True)),
    ),
    HostedProvider(
        "azure",
        key_variable="AZURE_OPENAI_API_KEY",
        example="my-deployment",
        url_variable="AZURE_OPENAI_ENDPOINT",
        path="/openai/v1",
    ),
    HostedProvider(
        "anthropic",
        key_variable="ANTHROPIC_API_KEY",
        example="claude-opus-4-8",
        engine_class="AnthropicEngine",
        build=_build_anthropic_engine,
        default_settings=(),
        base_url="https://api.anthropic.com",
        url_variable="ANTHROPIC_BASE_URL",
        generic_provider="",
    ),
)
PROVIDERS: dict[str, Callable[..., Engine]] = {
    **{hosted.name: hosted for hosted in _HOSTED_PROVIDERS},
    "responses": connect_responses,
    "chat": connect_chat,
    "ollama": connect_ollama,
    "practice": connect_practice,
}


def list_configured_models() -> list[str]:
    """Return an example of a model string for each hosted provider whose key is in the environment."""
    return [
        f"{provider.name}:{provider.example}"
        for provider in _HOSTED_PROVIDERS
        if read_variable(provider.key_variable)
    ]


ADDRESS_PROVIDERS = frozenset({"responses", "chat"})
"""Providers whose model strings contain the address of the server."""
