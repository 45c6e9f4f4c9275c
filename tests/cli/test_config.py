"""``kedge config``: what holds, where it came from, and no secret in it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kedge.cli.config import command
from kedge.config import SETTINGS

TOKEN = "planted-token-0123456789abcdef"


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file and an environment of the test's own."""
    file = tmp_path / "config.toml"
    file.write_text(f'model = "xai:grok-4"\n[serve]\ntoken = "{TOKEN}"\n')
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    monkeypatch.setenv("KEDGE_SERVE_PORT", "9000")
    monkeypatch.setenv("KEDGE_STORE", "postgresql://ada:planted-pass@db/kedge")
    return file


def test_it_shows_each_value_with_its_source() -> None:
    """One line a setting."""
    lines = CliRunner().invoke(command).output.splitlines()
    (model,) = [line for line in lines if line.startswith("model")]
    (port,) = [line for line in lines if line.startswith("serve.port")]
    assert model.split() == ["model", "xai:grok-4", "config.toml", "KEDGE_MODEL"]
    assert port.split() == ["serve.port", "9000", "environment", "KEDGE_SERVE_PORT"]
    assert len(lines) == len(SETTINGS) + 3


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_secret_is_shown(options: list[str]) -> None:
    """Neither the token nor the password in an address."""
    output = CliRunner().invoke(command, options).output
    assert "planted-token" not in output
    assert "planted-pass" not in output
    assert "pla…cdef" in output
    assert "ada:…@db" in output


def test_json_has_everything(configured: Path) -> None:
    """Values in their types, sources and places."""
    report = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert report["file"] == str(configured)
    assert report["exists"] is True
    assert list(report["settings"]) == list(SETTINGS)
    assert report["settings"]["serve.port"]["value"] == 9000
    assert report["settings"]["model"]["source"] == "file"
    assert report["settings"]["trace"] == {
        "value": False,
        "source": "default",
        "place": "",
        "variable": "KEDGE_TRACE",
        "help": SETTINGS["trace"].help,
    }


def test_missing_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that one can be made."""
    monkeypatch.delenv("KEDGE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    output = CliRunner().invoke(command).output
    assert "does not exist" in output
    assert "config.toml" in output
