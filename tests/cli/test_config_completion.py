"""Tests of ``kedge completion``: shell scripts and completions."""

import shutil
import subprocess

from click.testing import CliRunner

from for_each import for_each
from kedge.cli import COMMANDS, group
from kedge.cli.doctor import COMPLETE_VARIABLE, SHELLS, completion_command


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
