"""Load settings: an option overrides the environment, the file and the default, in this order."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from kedge.config.paths import CONFIG_ENV, config_path
from kedge.config.settings import SETTINGS, Scalar, Setting, format_value
from kedge.errors import InvalidSetting


def read_config_file(path: Path, *, required: bool = False) -> Mapping[str, Scalar]:
    """Read the settings of a file by name; empty if the file does not exist and is not required."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise InvalidSetting(f"{path}, named by {CONFIG_ENV}, does not exist") from None
        return {}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidSetting(f"{path} cannot be read: {reason}") from error
    try:
        parsed = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSetting(f"{path} is not valid TOML: {error}") from error
    return {name: _check_value(name, value, path, text) for name, value in _flatten(parsed)}


def _flatten(table: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        if isinstance(value, Mapping):
            yield from _flatten(value, name)  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield name, value


def _check_value(name: str, value: object, path: Path, text: str) -> Scalar:
    location = f"{path}, line {find_line(name, text)}:"
    setting = SETTINGS.get(name)
    if setting is None:
        raise InvalidSetting(f"{location} unknown setting {name!r}{_suggest(name)}")
    return setting.check(value, f"{location} {setting.name}")


def _suggest(name: str) -> str:
    key = name.rpartition(".")[2]
    same_key = [each for each in SETTINGS if each.rpartition(".")[2] == key]
    # Of several sections with this key, the first in the table is the most likely one.
    close = (
        same_key if key == name and same_key else get_close_matches(name, SETTINGS, n=1) or same_key
    )
    hint = f"; did you mean {_format_key(SETTINGS[close[0]])}?" if close else ""
    return hint or "; 'kedge config' lists all settings"


def _format_key(setting: Setting) -> str:
    return f"{setting.key} under [{setting.section}]" if setting.section else setting.key


def find_line(name: str, text: str) -> int:
    """Return the line number of a key, found by pattern; 1 if it is not found."""
    section, _, key = name.rpartition(".")
    pattern = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
    dotted = re.compile(rf"\s*{re.escape(name)}\s*=")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
            current = found[1]
        elif (current == section and pattern.match(line)) or (not current and dotted.match(line)):
            return number
    return 1


Source = Literal["flag", "environment", "file", "default"]
"""The source of the value of a setting."""


@dataclass(frozen=True, slots=True)
class SettingValue:
    """The value of a setting and its source.

    ``location`` is the option, environment variable or file with the value.
    """

    setting: Setting
    value: Scalar = field(repr=False)  # it may be a secret
    source: Source
    location: str = ""

    @property
    def display_value(self) -> str:
        """The value for display, with secrets masked."""
        return mask_value(self.setting, self.value)


class Config:
    """The settings of this process: ``config["model"]`` is a value, ``find`` also returns its source.

    Args:
        path: The configuration file.
        file: The values of the file, by name.
        environ: The environment variables.
    """

    def __init__(self, path: Path, file: Mapping[str, Scalar], environ: Mapping[str, str]) -> None:
        self.path = path
        self._file = file
        self._environ = environ

    @property
    def file_values(self) -> Mapping[str, Scalar]:
        """The values of the file, by name."""
        return self._file

    def find(self, name: str, flag: Scalar | None = None) -> SettingValue:
        """Return the value of a setting with its source.

        Args:
            name: The name, such as ``serve.port``.
            flag: The value of the command-line option, if it is set.

        Raises:
            InvalidSetting: If the environment variable has an invalid value.
        """
        setting = SETTINGS[name]
        if flag is not None:
            return SettingValue(setting, flag, "flag", setting.flag)
        if text := self._environ.get(setting.env):
            return SettingValue(
                setting, setting.parse(text, setting.env), "environment", setting.env
            )
        if name in self._file:
            return SettingValue(setting, self._file[name], "file", str(self.path))
        return SettingValue(setting, setting.default, "default")

    def __getitem__(self, name: str) -> Any:
        return self.find(name).value

    def __iter__(self) -> Iterator[SettingValue]:
        return (self.find(name) for name in SETTINGS)


def load_config(environ: Mapping[str, str] = os.environ) -> Config:
    """Load the configuration file and the environment.

    Raises:
        InvalidSetting: If the file cannot be read or contains an unknown setting or an invalid value.
            Environment variables are checked when they are read.
    """
    path = config_path()
    return Config(path, read_config_file(path, required=bool(environ.get(CONFIG_ENV))), environ)


def mask_value(setting: Setting, value: Scalar) -> str:
    """Return a value for display, masked if it is secret."""
    text = format_value(value)
    match setting.secret:
        case "full":
            return mask(text)
        case "url":
            return mask_url(text)
        case _:
            return text


def mask(secret: str) -> str:
    """Return a masked secret; of a long one the first and last characters are shown."""
    secret = secret.strip()
    if not secret:
        return ""
    return f"{secret[:3]}…{secret[-4:]}" if len(secret) >= 20 else "…"


def mask_url(url: str) -> str:
    """Return an address with its password masked."""
    url = re.sub(r"(?<=://)([^/@:]*):[^/?#\s]*@", r"\1:…@", url)
    return re.sub(r"(?i)((?:^|[\s?&])[a-z_]*password=)('[^']*'|[^&\s]*)", r"\1…", url)
