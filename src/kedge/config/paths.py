"""Paths of the user's data and configuration."""

import os
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from kedge.errors import CannotOpenStore

CONFIG_ENV = "KEDGE_CONFIG"
"""The environment variable with the path of the configuration file."""


def data_dir() -> Path:
    """Return the folder for databases."""
    # platformdirs is not used: on macOS it respects XDG_DATA_HOME, so the files of users who set it would move.
    home = Path.home()
    if sys.platform == "darwin":
        folder = home / "Library" / "Application Support"
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    return folder / "kedge"


URL_FORMATS = "sqlite:///path/to/file.db, sqlite://:memory: or postgresql://user@host/database"
_NOT_FILES = frozenset({"", "postgres", "postgresql", "sqlite", "memory"})
"""Names of databases, which are not meant as files, also with a colon behind them."""


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
    if address and address.partition(":")[0] in _NOT_FILES:
        raise CannotOpenStore(
            f"{address!r} is neither an address nor a file; use one of {URL_FORMATS}, or the path of a file such as "
            "'chat.db'"
        )
    if not address and create:
        data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    path = Path(address).expanduser() if address else data_dir() / "kedge.db"
    return f"sqlite:///{quote(str(path))}"


def store_file(url: str) -> Path | None:
    """Return the file of a store address, or None if it is not a file."""
    if not url.startswith("sqlite:///") or ":memory:" in url:
        return None
    return Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))


def config_path() -> Path:
    """Return the path of the configuration file, which may not exist."""
    if path := os.environ.get(CONFIG_ENV):
        return Path(path).expanduser()
    import click

    return Path(click.get_app_dir("kedge")) / "config.toml"
