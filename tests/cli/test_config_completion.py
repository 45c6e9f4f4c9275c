"""``kedge completion``: scripts that shells take, and completion that imports nothing."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kedge.cli import COMMANDS
from kedge.cli.config import COMPLETE_VARIABLE, SHELLS, completion_command


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_its_script(shell: str) -> None:
    """It asks kedge itself what there is."""
    plain = CliRunner().invoke(completion_command, [shell]).output
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in plain
    report = json.loads(CliRunner().invoke(completion_command, [shell, "--json"]).output)
    assert report["shell"] == shell
    assert report["script"].strip() == plain.strip()


@pytest.mark.parametrize("shell", [s for s in SHELLS if shutil.which(s)])
def test_script_has_valid_syntax(shell: str) -> None:
    """Where the shell is here, it reads the script."""
    script = CliRunner().invoke(completion_command, [shell]).output
    done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def complete(words: str, number: int) -> str:
    """What a shell is offered."""
    environ = {COMPLETE_VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    code = "from kedge.cli import group; group.main(prog_name='kedge')"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environ},
    ).stdout


def test_commands_and_options_are_completed() -> None:
    """By what was typed so far."""
    offered = {line.partition(",")[2] for line in complete("kedge ", 1).splitlines()}
    assert set(COMMANDS) <= offered
    assert "plain,config" in complete("kedge conf", 1)
    assert "plain,--port" in complete("kedge serve --po", 2)
