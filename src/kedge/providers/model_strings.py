"""Model strings: ``connect("openai:gpt-5")`` returns an engine.

A provider is a function that returns an engine for the part of the string after the colon. Other packages
add providers under the entry point group ``kedge.providers``. Missing configuration is reported in one
line that names the variable to set.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Unpack

from kedge._internal.argument_types import check_members
from kedge.engines import Engine
from kedge.errors import CannotConnect, InvalidSetting, describe_type, find_similar
from kedge.providers.clients import ConnectSettings
from kedge.providers.registry import ADDRESS_PROVIDERS, PROVIDERS

ENTRY_POINT_GROUP = "kedge.providers"
"""The entry point group under which other packages add providers."""


def connect(model: str, **settings: Unpack[ConnectSettings]) -> Engine:
    """Return an engine for a model string.

    Args:
        model: ``openai:gpt-…``, ``xai:grok-…``, ``azure:deployment``, ``anthropic:claude-…``,
            ``ollama:model``, ``responses:<url>#model``, ``chat:<url>#model``, or ``practice`` for the
            built-in model on an embedded server, which needs neither a key nor a network.
        **settings: The settings of the engine and of its client, see ``ConnectSettings``; for hosted providers also
            ``api_key`` and ``base_url``.

    Returns:
        The engine. It connects when it is first used.

    Raises:
        CannotConnect: If the provider is unknown, or a key, an address or a package is missing.
        UnknownSetting: If the engine has no setting with this name.
    """
    if not isinstance(model, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(
            f"a model is text such as 'openai:gpt-5.1', not {describe_type(model)}"
        )
    check_members(settings, ConnectSettings)
    name, separator, rest = model.partition(":")
    # Entry points are in the metadata of every installed package, which takes milliseconds to read.
    available: Mapping[str, Callable[..., Engine]] = PROVIDERS
    if name not in PROVIDERS:
        available = providers()
    if name not in available:
        suggestions = _suggest_models(name, rest, available)
        suggestion = next(filter(_has_valid_form, suggestions), "")
        hint = f"there are: {', '.join(sorted(available))}"
        if not separator:
            hint = f"a model string is PROVIDER:MODEL, such as openai:gpt-5.1; {hint}"
        if suggestion and separator:
            hint = f"did you mean {suggestion!r}?"
        elif suggestion:
            hint = f"did you mean {suggestion!r}? {hint}"
        raise CannotConnect(f"no provider named {name!r} in {model!r}; {hint}")
    return available[name](rest, **settings)


def to_engine(model: Engine | str) -> Engine:
    """Return an engine, or the engine of a model string."""
    check_model(model)
    if isinstance(model, str):
        return connect(model)
    return model


def check_model(model: Engine | str) -> None:
    """Raise ``InvalidSetting`` unless a value is an engine or a model string, which may be wrong."""
    if not isinstance(model, Engine | str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(
            f"the model must be a model string such as 'openai:gpt-5.1', or an engine, not {describe_type(model)}"
        )


_MODEL_PROVIDERS = {"gpt": "openai", "chatgpt": "openai", "claude": "anthropic", "grok": "xai"}
"""The providers of models whose names are well known."""


def _suggest_models(name: str, rest: str, available: Mapping[str, object]) -> Iterator[str]:
    """Yield the model strings that one of an unknown provider may mean, the most likely first."""
    provider, slash, model = name.partition("/")
    if slash and provider in available:
        yield f"{provider}:{model}"
    model_provider = _MODEL_PROVIDERS.get(name.partition("-")[0])
    if model_provider:
        yield f"{model_provider}:{name}"
    # Other libraries write the API of a provider into its name, as in "openai-responses:".
    first_word = re.split(r"[-_]", name)[0]
    if first_word in available:
        yield f"{first_word}:{rest}"
    similar = find_similar(name, available)
    if similar:
        yield f"{similar}:{rest}" if rest else similar
    model_provider = _MODEL_PROVIDERS.get(rest.partition("-")[0])
    if model_provider:
        yield f"{model_provider}:{rest}"


def _has_valid_form(model: str) -> bool:
    """Return whether a model string has what its provider needs: a model, and an address if it is a generic one."""
    name, _, rest = model.partition(":")
    if name == "practice":
        return rest in ("", "practice")
    if name in ADDRESS_PROVIDERS:
        return "://" in rest and "#" in rest
    return bool(rest) and "://" not in rest


def names_address(model: str) -> bool:
    """Return whether a model string itself determines where requests and keys are sent.

    Built-in providers such as ``openai`` read their address from the environment of this machine;
    ``responses:<url>#model``, ``chat:<url>#model`` and providers of other packages may not. A model string
    of the second kind must not be read from data that other users can write.
    """
    name = model.partition(":")[0]
    return name in ADDRESS_PROVIDERS or name not in PROVIDERS


def providers() -> dict[str, Callable[..., Engine]]:
    """Return every provider by name; those of other packages cannot replace the built-in ones."""
    from importlib.metadata import entry_points

    entries = entry_points(group=ENTRY_POINT_GROUP)
    return {**{entry.name: partial(_connect_entry, entry) for entry in entries}, **PROVIDERS}


def _connect_entry(entry: Any, rest: str, **settings: Any) -> Engine:
    """Return an engine of a provider of another package, which is imported now."""
    return entry.load()(rest, **settings)
