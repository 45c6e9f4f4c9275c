"""``kedge completion``: print the completion script for a shell."""

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json

COMPLETE_VARIABLE = "_KEDGE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@kedge_command("completion", short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str, as_json: bool) -> None:
    """Print the completion script for a shell.

    To install it: kedge completion bash >> ~/.bashrc, kedge completion zsh >> ~/.zshrc, or
    kedge completion fish > ~/.config/fish/completions/kedge.fish
    """
    script = build_script(shell)
    if as_json:
        echo_json({"shell": shell, "script": script})
    else:
        echo(script)


def build_script(shell: str) -> str:
    """Return the script, without click's check of the local bash version."""
    from click.shell_completion import ShellComplete, get_completion_class

    from kedge.cli import group

    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"completion for {shell} is not supported")
    return ShellComplete.source(made(group, {}, "kedge", COMPLETE_VARIABLE))
