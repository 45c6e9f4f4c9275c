"""Several models in one server, from a TOML file.

    default = "small"

    [models.small]
    model = "ollama:llama3.2"
    window = 8192

    [models.claude]
    model = "anthropic:claude-opus-5-5"
    key_env = "ANTHROPIC_API_KEY"

Every mistake is an ``InvalidSetting`` of one line that says where and what would be right. A key never
stands in the file, only the name of the environment variable that holds it.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from kedge.backends.naming import open_model
from kedge.errors import CannotConnect, InvalidSetting
from kedge.server.models import Model


@dataclass(frozen=True, slots=True)
class Member:
    """One key that a model may have: its type, how that is called, the least it may be."""

    type: type | tuple[type, ...]
    words: str
    least: float | None = None


MEMBERS: Mapping[str, Member] = {
    "model": Member(str, "a model string, such as 'ollama:llama3.2'"),
    "key_env": Member(str, "the name of the environment variable that holds the key"),
    "base_url": Member(str, "an address"),
    "window": Member(int, "a whole number of tokens", 1),
    "tokens": Member((int, float), "a number above 0", 0.01),
    "stateless": Member(bool, "true or false"),
    "timeout": Member((int, float), "a number of seconds", 0.001),
    "pace": Member((int, float), "a number of seconds", 0),
    "params": Member(dict, "a table of parameters"),
}
"""What may be said of a model."""
SECRETS = ("api_key", "key", "token", "password", "secret")
"""Keys that people try, and that do not belong into a file."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a file by name, and the one that answers to all other names."""

    models: Mapping[str, Model]
    default: str | None = None


def load_models(path: str | Path) -> Models:
    """Read a file of models and connect each of them."""
    form = _parsed(Path(path))
    where = Path(path).name
    _check_keys(form, ("default", "models"), where)
    tables = form.get("models")
    if not isinstance(tables, dict) or not tables:
        raise InvalidSetting(f"{where}: no models; write a table [models.NAME] for each")
    named = cast("dict[str, Any]", tables)
    models = {name: _model(name, table, where) for name, table in named.items()}
    default = form.get("default")
    if default is not None and default not in models:
        known = ", ".join(models)
        raise InvalidSetting(f"{where}: default must be one of {known}, not {default!r}")
    return Models(models, default)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidSetting(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path.name} is not TOML: {error}") from None


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key in known:
            continue
        if key in SECRETS:
            raise InvalidSetting(
                f"{where}: {key} does not belong into a file; put the key into the environment and "
                'name the variable: key_env = "MY_KEY"'
            )
        close = get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        raise InvalidSetting(f"{where}: there is no {key!r}; {hint}")


def _model(name: str, table: Any, file: str) -> Model:
    where = f"{file}: models.{name}"
    if not isinstance(table, dict):
        raise InvalidSetting(f"{where} must be a table with a model")
    members = cast("dict[str, Any]", table)
    _check_keys(members, tuple(MEMBERS), where)
    for key, value in members.items():
        _check(value, MEMBERS[key], f"{where}.{key}")
    if "model" not in members:
        raise InvalidSetting(f'{where} needs a model: model = "ollama:llama3.2"')
    settings = {key: value for key, value in members.items() if key not in ("model", "key_env")}
    try:
        return open_model(members["model"], name=name, **settings, **_key(members, where))
    except CannotConnect as error:
        raise CannotConnect(f"{where}: {error}") from error


def _check(value: object, member: Member, where: str) -> None:
    wrong = not isinstance(value, member.type)
    if isinstance(value, bool) and member.type is not bool:
        wrong = True
    if not wrong and member.least is not None:
        wrong = cast("float", value) < member.least
    if wrong:
        raise InvalidSetting(f"{where} must be {member.words}")


def _key(members: Mapping[str, Any], where: str) -> dict[str, Any]:
    variable = members.get("key_env")
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise CannotConnect(f"{where}: the environment has no {variable}; set it to the key")
    return {"api_key": key}
