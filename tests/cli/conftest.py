"""Fixtures: no test uses the configuration, the data or the keys of this machine, nor leaves its logging behind."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.cli.doctor import KEY_VARIABLES
from kedge.testing import TestServer

UNSET = (
    *("KEDGE_CONFIG", "KEDGE_MODEL", "KEDGE_STORE", "OPENAI_BASE_URL", "VISUAL"),
    *("ENABLE_RESPONSE_BOUNDARY_TRACKING", *KEY_VARIABLES),
)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the handlers and the level of the logger after each test."""
    root = logging.getLogger("kedge")
    handlers = list(root.handlers)
    level = root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use empty folders for configuration and data, and no settings or keys."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@pytest.fixture
def store_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Configure a separate store for the test and return its path."""
    path = tmp_path / "talks and more.db"
    monkeypatch.setenv("KEDGE_STORE", str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kedge_server: TestServer) -> Path:
    """Return the current folder of the test, with a store and a configured model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setenv("KEDGE_MODEL", f"responses:{kedge_server.base_url}#practice")
    return tmp_path
