"""Model strings: ``connect("openai:gpt-5")`` gives an engine.

A provider is a function from the rest of the string to an engine; third parties add theirs under the
entry point group ``kedge.providers``. Missing configuration is reported in one line with what to set.
"""

from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from kedge.engines import Engine
from kedge.errors import CannotConnect
from kedge.providers.registry import ADDRESS_PROVIDERS, PROVIDERS

ENTRY_POINT_GROUP = "kedge.providers"
"""The entry point group under which other packages add providers."""

__all__ = ["ENTRY_POINT_GROUP", "connect", "names_address", "providers"]


def connect(model: str, **settings: Any) -> Engine:
    """An engine for a model string.

    ``openai:gpt-…``, ``xai:grok-…``, ``azure:deployment``, ``anthropic:claude-…``, ``ollama:model``,
    ``responses:<url>#model``, ``chat:<url>#model`` or ``practice``, the built-in model on an embedded
    server, which needs neither key nor network. Settings are those of the engine, and for hosted
    providers ``api_key`` and ``base_url``.
    """
    name, _, rest = model.partition(":")
    # Entry points are in the metadata of every installed package, which takes milliseconds to read.
    known = PROVIDERS if name in PROVIDERS else providers()
    if name not in known:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(known))}"
        raise CannotConnect(f"no provider named {name!r} in {model!r}; {hint}")
    return known[name](rest, **settings)


def names_address(model: str) -> bool:
    """Return whether a model string itself decides where requests and keys are sent.

    Kedge's own providers such as ``openai`` take their address from this machine's environment;
    ``responses:<url>#model``, ``chat:<url>#model`` and providers of other packages may not. A model string
    of the second kind must not be taken from data that someone else may have written.
    """
    name = model.partition(":")[0]
    return name in ADDRESS_PROVIDERS or name not in PROVIDERS


def providers() -> dict[str, Callable[..., Engine]]:
    """Every provider by name; those of other packages come after ours and cannot replace them."""
    found = {entry.name: _load_lazily(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **PROVIDERS}


def _load_lazily(entry: Any) -> Callable[..., Engine]:
    def make(rest: str, **settings: Any) -> Engine:
        return entry.load()(rest, **settings)

    return make


# Names of version 0.1, which keep working.
GROUP = ENTRY_POINT_GROUP
