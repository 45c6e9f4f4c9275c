"""``kedge completion``: the script that makes a shell complete kedge's commands and options."""

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json

COMPLETE_VARIABLE = "_KEDGE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@kedge_command("completion", short_help="Print what makes a shell complete kedge's commands.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str, as_json: bool) -> None:
    """Print what makes a shell complete kedge's commands.

    For good: kedge completion bash >> ~/.bashrc, kedge completion zsh >> ~/.zshrc, or
    kedge completion fish > ~/.config/fish/completions/kedge.fish
    """
    script = build_script(shell)
    if as_json:
        echo_json({"shell": shell, "script": script})
    else:
        echo(script)


def build_script(shell: str) -> str:
    """The script; the version of a bash at hand is not looked at, as it need not be the one used."""
    from click.shell_completion import ShellComplete, get_completion_class

    from kedge.cli import group

    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"there is no completion for {shell}")
    return ShellComplete.source(made(group, {}, "kedge", COMPLETE_VARIABLE))
