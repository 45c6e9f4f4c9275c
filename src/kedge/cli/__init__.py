"""The command line: one module per command, loaded only when it is called.

``kedge --help`` must be quick, so the group knows each command by name and one line of help and
imports its module (``kedge.cli.<name>``, attribute ``command``) on first use.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

import click

from kedge.errors import KedgeError

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS: dict[str, str] = {
    "chat": "Talk with a model; see what was sent, and why.",
    "serve": "Serve the Responses API from this machine: no key, no network.",
}
"""Every command and its line in ``kedge --help``."""


class _LazyGroup(click.Group):
    """A click group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(f"kedge.cli.{cmd_name.replace('-', '_')}").command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; an error of ours is one line, not a traceback."""
        try:
            return super().invoke(ctx)
        except KedgeError as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if COMMANDS:
            with formatter.section("Commands"):
                formatter.write_dl(list(COMMANDS.items()))


@click.group("kedge", cls=_LazyGroup)
@click.version_option(package_name="kedge", prog_name="kedge")
def _kedge() -> None:
    """Conversations with language models that remember."""
    # Logs are for those who ask for them; what a user should know is told by the commands.
    logging.getLogger().addHandler(logging.NullHandler())


main: "Callable[[], None]" = _kedge
"""The console script."""
