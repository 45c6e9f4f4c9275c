"""Tests of the table of settings, which defines flags, variables, keys and documentation."""

import re
from pathlib import Path

import pytest

from kedge.config import store_url
from kedge.config.settings import OTHER_VARIABLES, SETTINGS
from kedge.errors import CannotOpenStore

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_setting_is_documented() -> None:
    """The tables in docs/configuration.md have each setting and each other variable."""
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| `([A-Z_]+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert rows == [
        (setting.name, setting.env, setting.default_text, setting.help)
        for setting in SETTINGS.values()
    ]
    others = re.findall(r"^\| `(KEDGE_[A-Z_]+)` \| [^`]", PAGE.read_text(), re.MULTILINE)
    assert others == list(OTHER_VARIABLES)


def test_names_variables_and_defaults_are_valid() -> None:
    """Variables are unique, every default is a valid value, and settings that are secrets are marked."""
    assert len({setting.env for setting in SETTINGS.values()}) == len(SETTINGS)
    for setting in SETTINGS.values():
        assert setting.check(setting.default, setting.name) == setting.default
    matching = {
        name for name in SETTINGS if re.search("token|key|password|store|db|model$|upstream", name)
    }
    assert matching <= {name for name, setting in SETTINGS.items() if setting.secret}


def test_store_is_a_file_or_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default store is a file in the data folder, which is created unless the store is only read."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for create in (False, True):
        assert store_url(create=create) == f"sqlite:///{tmp_path}/kedge/kedge.db"
        assert (tmp_path / "kedge").is_dir() is create
    assert store_url("talks.db") == "sqlite:///talks.db"
    assert store_url("postgresql://ada@db/kedge") == "postgresql://ada@db/kedge"
    assert store_url(":memory:") == "sqlite://:memory:"
    with pytest.raises(CannotOpenStore, match="'postgres' is neither an address nor a file"):
        store_url("postgres")
