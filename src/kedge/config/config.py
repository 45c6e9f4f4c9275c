"""Configuration: the table of settings, the sources of their values, and the paths of the user's data.

An option overrides the environment, the file and the default, in this order.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from kedge._internal.argument_types import checked
from kedge._internal.arguments import read_variable
from kedge._internal.files import MAX_SETTINGS_BYTES, read_regular_file
from kedge.config.settings import OTHER_VARIABLES, SETTINGS, Scalar, Setting, format_value
from kedge.errors import CannotOpenStore, InvalidSetting

CONFIG_ENV = "KEDGE_CONFIG"
"""The environment variable with the path of the configuration file."""


def data_dir() -> Path:
    """Return the folder for databases."""
    # platformdirs is not used: on macOS it respects XDG_DATA_HOME, so the files of users who set it would move.
    home = Path.home()
    if sys.platform == "darwin":
        folder = home / "Library" / "Application Support"
    elif sys.platform == "win32":
        folder = Path(read_variable("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        folder = Path(read_variable("XDG_DATA_HOME") or home / ".local" / "share")
    return folder / "kedge"


URL_FORMATS = "sqlite:///path/to/file.db, sqlite://:memory: or postgresql://user@host/database"
_NOT_FILES = frozenset({"", "postgres", "postgresql", "sqlite", "memory"})
"""Names of databases, which are not meant as files, also with a colon behind them."""
_LIBPQ = re.compile(r"(?:^|\s)(?:host|hostaddr|dbname|user|password)\s*=")
"""A member of a connection string of PostgreSQL."""
_SQLITE_MAGIC = b"SQLite format 3\0"


def store_url(address: str = "", *, create: bool = True) -> str:
    """Return the address of the store.

    Args:
        address: A file, ``:memory:``, an address, or empty for the default file.
        create: Whether to create the folder of the default file.

    Raises:
        CannotOpenStore: It is the name of a database.
    """
    if "://" in address:
        return address
    if address == ":memory:":
        return "sqlite://:memory:"
    if address and (address.partition(":")[0] in _NOT_FILES or _LIBPQ.search(address)):
        raise CannotOpenStore(
            f"{mask_url(address)!r} is neither an address nor a file; use one of {URL_FORMATS}, or the "
            "path of a file such as 'chat.db'"
        )
    if address:
        path = Path(address).expanduser()
    else:
        path = data_dir() / "kedge.db"
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"sqlite:///{quote(str(path))}"


def store_file(url: str) -> Path | None:
    """Return the file of a store address, or None if it is not a file."""
    if not url.startswith("sqlite:///") or ":memory:" in url:
        return None
    return Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))


def check_output_file(path: Path, url: str) -> None:
    """Reject an output file that is a database, which would be destroyed.

    Args:
        path: The file.
        url: The address of the store that is in use.

    Raises:
        InvalidSetting: It is the store, another SQLite database, or a journal of one.
    """
    if _is_database(path, url):
        raise InvalidSetting(f"{path} is a database; choose another output file")


def _is_database(path: Path, url: str) -> bool:
    store = store_file(url)
    for suffix in ("", "-wal", "-shm", "-journal"):
        if not path.name.endswith(suffix) or path.name == suffix:
            continue
        file = path.with_name(path.name.removesuffix(suffix))
        if store is not None and file.resolve() == store.resolve():
            return True
        with suppress(OSError):
            if file.is_file():
                with file.open("rb") as opened:
                    if opened.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC:
                        return True
    return False


def config_path() -> Path:
    """Return the path of the configuration file, which may not exist."""
    if path := read_variable(CONFIG_ENV):
        return Path(path).expanduser()
    import click

    return Path(click.get_app_dir("kedge")) / "config.toml"


def read_config_file(path: Path, *, required: bool = False) -> Mapping[str, Scalar]:
    """Read the settings of a file by name; empty if the file does not exist and is not required."""
    import tomllib

    try:
        text = read_regular_file(path, MAX_SETTINGS_BYTES).decode("utf-8")
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
    """Return the end of the message about an unknown key of the file: what to write instead."""
    if name in _SECTIONS:
        return f"; it is a section: write [{name}], and its settings below that line"
    if name.endswith("api_key"):
        return "; API keys are read from the environment, such as OPENAI_API_KEY"
    close = find_similar_setting(name)
    if close is None:
        return "; 'kedge config' lists all settings"
    if close.section:
        return f"; did you mean {close.key} under [{close.section}]?"
    if "." in name:
        return f"; did you mean {close.key}, before the first section?"
    return f"; did you mean {close.key}?"


_SECTIONS = {setting.section: None for setting in SETTINGS.values() if setting.section}
"""The sections of the file, in the order of the table."""


def find_similar_setting(name: str) -> Setting | None:
    """Return the setting that an unknown name of a key or a variable most likely means, if there is one."""
    settings = tuple(SETTINGS.values())
    spellings = {_normalize(text): each for each in settings for text in (each.name, each.env)}
    # Of several sections with the same key, the first in the table is the most likely one.
    keys = {_normalize(each.key): each for each in reversed(settings)}
    section, _, key = name.lower().rpartition(".")
    sections = get_close_matches(section, _SECTIONS, n=1)
    in_section = {_normalize(each.key): each for each in settings if each.section in sections}
    without_section = {text: each for text, each in keys.items() if not each.section}
    return (
        spellings.get(_normalize(name))
        or (without_section | in_section).get(_normalize(key))
        or _find_close(key, in_section, 0.6)
        or keys.get(_normalize(key))
        or _find_close(name, spellings, 0.8)
    )


def _find_close(name: str, settings: Mapping[str, Setting], cutoff: float) -> Setting | None:
    plain = _normalize(name)
    close = get_close_matches(plain, settings, cutoff=cutoff)
    # Exchanged letters are more likely than a missing one: "modle" is "model", not "mode".
    best = max(close, key=lambda each: sorted(each) == sorted(plain), default="")
    return settings.get(best)


def find_similar_variable(name: str) -> str:
    """Return the variable that an unknown one most likely means, or an empty text."""
    for other in get_close_matches(name, OTHER_VARIABLES, n=1, cutoff=0.85):
        return other
    setting_name = name.removeprefix("KEDGE_").lower()
    if setting_name.partition("_")[0] in _SECTIONS:
        setting_name = setting_name.replace("_", ".", 1)
    similar = find_similar_setting(setting_name)
    if similar is None:
        return ""
    return similar.env


def _normalize(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("kedge_"))


def find_line(name: str, text: str) -> int:
    """Return the line number of a key, found by pattern; 1 if it is not found."""
    section, _, key = name.rpartition(".")
    pattern = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
    dotted = re.compile(rf"\s*{re.escape(name)}\s*=")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        heading = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
        if heading:
            current = heading[1]
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
        self.file_values = file
        """The values of the file, by name."""
        self._environ = environ

    @property
    def unknown_variables(self) -> Mapping[str, str]:
        """The environment variables that begin with ``KEDGE_`` and are ignored, with what each most likely means.

        The text is the name of a variable, or empty if none is similar.
        """
        known = {*OTHER_VARIABLES, *(setting.env for setting in SETTINGS.values())}
        names = [name for name in sorted(self._environ) if name.startswith("KEDGE_")]
        return {
            name: find_similar_variable(name)
            for name in names
            if name not in known and read_variable(name, self._environ)
        }

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
        if text := read_variable(setting.env, self._environ):
            return SettingValue(
                setting, setting.parse(text, setting.env), "environment", setting.env
            )
        if name in self.file_values:
            return SettingValue(setting, self.file_values[name], "file", str(self.path))
        return SettingValue(setting, setting.default, "default")

    def __getitem__(self, name: str) -> Any:
        return self.find(name).value

    def __iter__(self) -> Iterator[SettingValue]:
        return (self.find(name) for name in SETTINGS)


@checked
def load_config(environ: Mapping[str, str] = os.environ) -> Config:
    """Load the configuration file and the environment.

    Args:
        environ: The environment variables.

    Raises:
        InvalidSetting: If the file cannot be read or contains an unknown setting or an invalid value.
            Environment variables are checked when they are read.
    """
    path = config_path()
    is_named = bool(read_variable(CONFIG_ENV, environ))
    return Config(path, read_config_file(path, required=is_named), environ)


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
    if len(secret) < 20:
        return "…"
    return f"{secret[:3]}…{secret[-4:]}"


def mask_url(url: str) -> str:
    """Return an address with its password masked."""
    # Also a password with /, ? or # that is not escaped; but a port may be followed by such a path.
    url = re.sub(r"(?i)(postgres(?:ql)?://[^/@:]*):\S*@", r"\1:…@", url)
    url = re.sub(r"(?<=://)([^/@:\[\s]*):(?!\d+[/?#])\S*@", r"\1:…@", url)
    return _SECRET_MEMBER.sub(r"\1…", url)


_SECRET_MEMBER = re.compile(
    r"((?:^|[\s?&])[a-z_]*(?:password|api[_-]?key|token)\s*=\s*)('(?:[^'\\]|\\.)*'?|(?:[^&\s\\]|\\.)*)",
    re.IGNORECASE,
)
"""A member of an address whose value is secret; in a connection string it may be quoted."""
