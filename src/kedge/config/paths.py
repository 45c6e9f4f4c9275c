"""Paths of the user's data and configuration."""

import os
import sys
from pathlib import Path
from urllib.parse import quote, unquote

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


def store_url(address: str = "", *, create: bool = True) -> str:
    """Return the address of the store.

    Args:
        address: A file, an address, or empty for the default file.
        create: Whether to create the folder of the default file.
    """
    if "://" in address:
        return address
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
