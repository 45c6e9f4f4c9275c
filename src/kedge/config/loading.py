"""What holds now: a flag, else the environment, else the file, else the default; and which it was."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kedge.config.file import read_file
from kedge.config.places import CONFIG_PATH, config_path
from kedge.config.table import SETTINGS, Scalar, Setting, plain

Source = Literal["flag", "environment", "file", "default"]


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a setting, and where it came from."""

    setting: Setting
    value: Scalar = field(repr=False)  # it may be a secret
    source: Source
    place: str = ""

    @property
    def shown(self) -> str:
        """The value as it may be shown: secrets masked."""
        return masked(self.setting, self.value)


class Config:
    """The settings as they hold for this process."""

    def __init__(self, path: Path, file: Mapping[str, Scalar], environ: Mapping[str, str]) -> None:
        self.path = path
        self._file = file
        self._environ = environ

    @property
    def from_file(self) -> Mapping[str, Scalar]:
        """What the file gives, by name."""
        return self._file

    def find(self, name: str, flag: Scalar | None = None) -> Value:
        """The value of a setting; ``flag`` is what the command line gave, if it did."""
        setting = SETTINGS[name]
        if flag is not None:
            return Value(setting, flag, "flag", setting.flag)
        if given := self._environ.get(setting.env):
            return Value(setting, setting.read(given, setting.env), "environment", setting.env)
        if name in self._file:
            return Value(setting, self._file[name], "file", str(self.path))
        return Value(setting, setting.default, "default")

    def __getitem__(self, name: str) -> Any:
        return self.find(name).value

    def __iter__(self) -> Iterator[Value]:
        return (self.find(name) for name in SETTINGS)


def load_config(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the file; every value is checked when it is asked for, those of the file at once."""
    path = config_path()
    return Config(path, read_file(path, needed=bool(environ.get(CONFIG_PATH))), environ)


def masked(setting: Setting, value: Scalar) -> str:
    """A value as it may be shown."""
    text = plain(value)
    match setting.secret:
        case "whole":
            return mask(text)
        case "url":
            return mask_url(text)
        case _:
            return text


def mask(secret: str) -> str:
    """A secret that its owner can recognise and nobody can use."""
    secret = secret.strip()
    if not secret:
        return ""
    return f"{secret[:3]}…{secret[-4:]}" if len(secret) >= 20 else "…"


def mask_url(url: str) -> str:
    """An address without the password in it, wherever it stands."""
    url = re.sub(r"(?<=://)([^/@:]*):[^/?#\s]*@", r"\1:…@", url)
    return re.sub(r"(?i)((?:^|[\s?&])[a-z_]*password=)('[^']*'|[^&\s]*)", r"\1…", url)
