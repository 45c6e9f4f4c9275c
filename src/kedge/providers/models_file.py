"""Open models by model string, or several of them from a TOML file.

    default = "small"

    [models.small]
    model = "ollama:llama3.2"
    window = 8192

    [models.claude]
    model = "anthropic:claude-opus-4-8"
    key_env = "ANTHROPIC_API_KEY"

An error of the file is an ``InvalidSetting`` of one line, with its location and the valid values. The file never
contains a key, only the name of the environment variable with the key.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_type, read_variable
from kedge._internal.files import MAX_SETTINGS_BYTES, read_regular_file
from kedge.errors import CannotConnect, InvalidSetting, find_similar
from kedge.providers import connect
from kedge.server.engine_models.engine_model import DEFAULT_WINDOW, EngineModel
from kedge.server.models import Model, PracticeModel
from kedge.server.practice_model import Script
from kedge.turns.frozen_json import wrap_copy

BUILTIN_MODELS = ("practice", "script")
"""Models without an engine, which answer inside the server."""


@checked
def open_model(
    model: str,
    *,
    name: str = "",
    pace: float = 0.0,
    window: int | None = None,
    tokens: float = 1.0,
    stateless: bool = False,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> Model:
    """Create a model of the server from a model string.

    Args:
        model: A model string such as ``ollama:llama3.2``, ``practice`` or ``script:FILE``.
        name: The name in ``GET /v1/models``; by default the provider's name of the model.
        pace: Seconds between two streamed chunks of the practice model, which alone has a pace.
        window: The context length in tokens, as in ``EngineModel``.
        tokens: The model's tokens per token of the server's count, as in ``EngineModel``.
        stateless: Whether to never chain upstream.
        params: Parameters of every request.
        **settings: Further settings of ``connect``, such as ``api_key``.

    Returns:
        The model.

    Raises:
        CannotConnect: If the model string is invalid or a key is missing.
        InvalidScript: If the script file cannot be used.

    Example:
        >>> settings = Settings(model=open_model("ollama:llama3.2", window=16_384))
    """
    check_type("name", str, name)
    provider, _, rest = model.partition(":")
    if provider in BUILTIN_MODELS:
        script = None
        if provider == "script":
            if not rest:
                raise CannotConnect("the script has no file; write script:answers.json")
            script = Script.load(rest)
        options: dict[str, Any] = {"pace": pace}
        if window:
            options["window"] = window
        practice_model = PracticeModel(script, **options)
        practice_model.name = name or practice_model.name
        return practice_model
    # Clients of this server repeat a failed request themselves, so it does not.
    settings.setdefault("max_retries", 0)
    return EngineModel(
        name or rest.rpartition("#")[2] or provider,
        connect(model, **settings),
        window=window or DEFAULT_WINDOW,
        tokens=tokens,
        stateless=stateless,
        params=params,
    )


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One key of a model's table: its type, the description of the type, and its minimum."""

    type: type | tuple[type, ...]
    description: str
    minimum: float | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether a value has the type, and at least the minimum."""
        if isinstance(value, bool):  # which is an int in Python
            return self.type is bool
        if not isinstance(value, self.type):
            return False
        return self.minimum is None or value >= self.minimum


MODEL_FIELDS: Mapping[str, FieldSpec] = {
    "model": FieldSpec(str, "a model string, such as 'ollama:llama3.2'"),
    "key_env": FieldSpec(str, "the name of the environment variable that holds the key"),
    "base_url": FieldSpec(str, "an address"),
    "window": FieldSpec(int, "an integer number of tokens", 1),
    "tokens": FieldSpec((int, float), "a number above 0", 0.01),
    "stateless": FieldSpec(bool, "true or false"),
    "timeout": FieldSpec((int, float), "a number of seconds", 0.001),
    "pace": FieldSpec((int, float), "a number of seconds", 0),
    "params": FieldSpec(dict, "a table of parameters"),
}
"""The keys of a model's table."""
SECRET_KEYS = ("api_key", "key", "token", "password", "secret")
"""Keys for secrets, which must not be in a file."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a file.

    Args:
        models: The models by name.
        default: The name of the model that answers requests for any other name; None to reject them.
    """

    models: Mapping[str, Model]
    default: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", wrap_copy(self.models))


@checked
def load_models(path: str | Path) -> Models:
    """Load a TOML file of models.

    Args:
        path: The file.

    Returns:
        The models; each connects when it is first used.

    Raises:
        InvalidSetting: If the file cannot be read or is invalid.
        CannotConnect: If a model cannot be used.
    """
    location = Path(path).name
    try:
        document = tomllib.loads(read_regular_file(path, MAX_SETTINGS_BYTES).decode("utf-8"))
    except OSError as error:
        raise InvalidSetting(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{location} is not TOML: {error}") from None
    _check_keys(document, ("default", "models"), location)
    tables = document.get("models")
    if not isinstance(tables, dict) or not tables:
        raise InvalidSetting(f"{location}: no models; write a table [models.NAME] for each")
    tables_by_name = cast("dict[str, Any]", tables)
    models = {
        name: _load_model(name, table, f"{location}: models.{name}")
        for name, table in tables_by_name.items()
    }
    default = document.get("default")
    if default is not None and default not in models:
        names = ", ".join(models)
        raise InvalidSetting(f"{location}: default must be one of {names}, not {default!r}")
    return Models(models, default)


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], location: str) -> None:
    for key in table:
        if key in known:
            continue
        if key in SECRET_KEYS:
            raise InvalidSetting(
                f"{location}: {key} does not belong in a file; set an environment variable to the key and "
                'name it: key_env = "MY_KEY"'
            )
        hint = f"known keys: {', '.join(known)}"
        similar = find_similar(key, [name for name in known if name not in table])
        if similar:
            hint = f"did you mean {similar}?"
        raise InvalidSetting(f"{location}: unknown key {key!r}; {hint}")


def _load_model(name: str, table: Any, location: str) -> Model:
    if not isinstance(table, dict):
        raise InvalidSetting(f"{location} must be a table with a model")
    members = cast("dict[str, Any]", table)
    _check_keys(members, tuple(MODEL_FIELDS), location)
    for key, value in members.items():
        if not MODEL_FIELDS[key].accepts(value):
            raise InvalidSetting(f"{location}.{key} must be {MODEL_FIELDS[key].description}")
    if "model" not in members:
        raise InvalidSetting(f'{location} needs a model: model = "ollama:llama3.2"')
    settings = {key: value for key, value in members.items() if key not in ("model", "key_env")}
    variable = members.get("key_env")
    if variable is not None:
        settings["api_key"] = read_variable(variable)
        if not settings["api_key"]:
            raise CannotConnect(
                f"{location}: the environment variable {variable} is not set; set it to the key"
            )
    try:
        return open_model(members["model"], name=name, **settings)
    except CannotConnect as error:
        raise CannotConnect(f"{location}: {error}") from error
