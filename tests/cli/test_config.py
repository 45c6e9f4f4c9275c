"""Tests of ``kedge config``, values with their sources and masked secrets, and of ``kedge completion``."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from for_each import for_each
from kedge.cli import group
from kedge.cli.commands import COMMANDS
from kedge.cli.doctor import COMPLETE_VARIABLE, SHELLS, completion_command
from kedge.cli.doctor import config_command as command
from kedge.config.settings import SETTINGS

TOKEN = "planted-token-0123456789abcdef"


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create a configuration file and environment for the test; return the file."""
    file = tmp_path / "config.toml"
    file.write_text(f'model = "xai:grok-4"\n[serve]\ntoken = "{TOKEN}"\n')
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    monkeypatch.setenv("KEDGE_SERVE_PORT", "9000")
    monkeypatch.setenv("KEDGE_STORE", "postgresql://ada:planted-pass@db/kedge")
    return file


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_secret_is_shown(options: list[str]) -> None:
    """Neither a token nor the password in a URL is printed."""
    output = CliRunner().invoke(command, options).output
    assert "planted-token" not in output
    assert "planted-pass" not in output
    assert "pla…cdef" in output
    assert "ada:…@db" in output


def test_json_has_all_settings(configured: Path) -> None:
    """JSON has the typed value and the source of each setting, and text has a line with both."""
    report = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert (report["file"], report["exists"]) == (str(configured), True)
    settings = report["settings"]
    assert list(settings) == list(SETTINGS)
    port = settings["serve.port"]
    assert (port["value"], port["source"]) == (9000, "environment")
    assert (settings["model"]["source"], settings["trace"]["source"]) == ("file", "default")
    lines = [line.split() for line in CliRunner().invoke(command).output.splitlines()]
    assert ["serve.port", "9000", "environment", "KEDGE_SERVE_PORT"] in lines


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_file_with_a_mistake_is_ignored_and_reported(configured: Path, options: list[str]) -> None:
    """The settings, to which the error refers, are listed without those of the file."""
    configured.write_text("qqqqq = 1")
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 1
    assert "unknown setting 'qqqqq'; 'kedge config' lists all settings" in result.stderr
    assert "KEDGE_MODEL" in result.stdout
    assert "xai:grok-4" not in result.stdout


@for_each("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    """The script of each shell calls kedge for the completions, and an installed shell accepts its syntax."""
    script = CliRunner().invoke(completion_command, [shell]).output
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=True)


def complete(line: str, number: int) -> str:
    """Return the completions that a shell would offer."""
    environ = {COMPLETE_VARIABLE: "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(number)}
    return CliRunner(env=environ).invoke(group, prog_name="kedge").stdout


def test_commands_and_options_are_completed() -> None:
    """Commands and options are completed from the typed prefix."""
    offered = {line.partition(",")[2] for line in complete("kedge ", 1).splitlines()}
    assert set(COMMANDS) <= offered
    assert "plain,config" in complete("kedge conf", 1)
    assert "plain,--port" in complete("kedge serve --po", 2)
