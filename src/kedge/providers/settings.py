"""The settings of ``connect``: those of the client, and those of the engines."""

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any, Literal, TypedDict, cast

from kedge.engines import Engine
from kedge.engines.prompt_cache import CacheLifetime
from kedge.errors import UnknownSetting
from kedge.memory.evidence import EvidenceStore, Trust
from kedge.planning import Mode

PRACTICE_SCOPE = "practice"
"""The scope of the practice model's responses."""


class ClientSettings(TypedDict, total=False):
    """Settings of the HTTP client."""

    timeout: Any
    max_retries: int
    max_response_bytes: int | None
    organization: str
    project: str
    default_headers: Mapping[str, str]


class ConnectSettings(ClientSettings, total=False):
    """The keyword arguments of ``connect``. Some are only for one API; ``docs/engines.md`` describes them."""

    api_key: str | None
    base_url: str | None
    mode: Mode
    retention: float | None
    max_depth: int | None
    verify_every: int
    params: Mapping[str, Any] | None
    clock: Callable[[], float]
    transport: Literal["http", "websocket"]
    connections: int
    lanes: int
    trust: Trust
    evidence_store: EvidenceStore | None
    prompt_cache: bool
    scope: str
    max_tokens: str
    max_call_id: int | None
    replay_reasoning: bool
    cache_control: bool
    sampling: bool
    cache_lifetime: CacheLifetime


def make_engine(kind: type[Engine], model: str, **settings: Any) -> Engine:
    """Return an engine with its settings.

    Raises:
        UnknownSetting: The engine has no setting with one of these names.
    """
    accepted = _list_settings(kind)
    for name in settings.keys() - accepted:
        public = ConnectSettings.__optional_keys__
        known = public & (accepted | ClientSettings.__optional_keys__ | {"api_key", "base_url"})
        raise UnknownSetting(name, known, f"the engine of {model!r}")
    return cast("Callable[..., Engine]", kind)(model, **settings)


@cache
def _list_settings(kind: type[Engine]) -> frozenset[str]:
    """Return the names of the settings of an engine and of the classes that it passes them to."""
    constructors = [each.__init__ for each in kind.__mro__ if "__init__" in vars(each)]
    return frozenset(name for each in constructors for name in signature(each).parameters)
