"""The configuration file: TOML, checked against the table, with errors that name the line."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kedge.config.places import CONFIG_PATH
from kedge.config.table import SETTINGS, Scalar, Setting
from kedge.errors import InvalidSetting


def read_file(path: Path, *, needed: bool = False) -> Mapping[str, Scalar]:
    """The settings that the file gives, by name; nothing if there is no file and none is needed."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if needed:
            raise InvalidSetting(f"{path} is not there, though {CONFIG_PATH} names it") from None
        return {}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise InvalidSetting(f"{path} cannot be read: {reason}") from error
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSetting(f"{path} is no TOML: {error}") from error
    return {name: _checked(name, value, path, text) for name, value in _flat(parsed)}


def _flat(table: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        if isinstance(value, Mapping):
            yield from _flat(value, name)  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield name, value


def _checked(name: str, value: object, path: Path, text: str) -> Scalar:
    where = f"{path}, line {line_of(name, text)}:"
    setting = SETTINGS.get(name)
    if setting is None:
        raise InvalidSetting(f"{where} there is no setting {name!r}{_guess(name)}")
    return setting.check(value, f"{where} {setting.name}")


def _guess(name: str) -> str:
    close = get_close_matches(name, SETTINGS, n=1) or [
        each for each in SETTINGS if each.rpartition(".")[2] == name.rpartition(".")[2]
    ]
    hint = f"; did you mean {_written(SETTINGS[close[0]])}?" if close else ""
    return hint or "; 'kedge config' lists those there are"


def _written(setting: Setting) -> str:
    return f"{setting.key} under [{setting.section}]" if setting.section else setting.key


def line_of(name: str, text: str) -> int:
    """The line on which a key stands, as well as a look at the text can tell."""
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
