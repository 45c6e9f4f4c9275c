"""The command line: one module per command, loaded only when it is called.

``kedge --help`` must be quick, so the group knows each command by name and one line of help and
imports its module (``kedge.cli.<name>``, attribute ``command``) on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, cast

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

COMMANDS: dict[str, str] = {
    "chat": "Talk with a model; see what was sent, and why.",
    "conversations": "List the conversations in the store.",
    "show": "Show a conversation as it reads.",
    "tree": "Show the chain of a conversation as a graph.",
    "inspect": "Show every block, and what would be sent now, and why.",
    "diff": "Show what two branches or two moments do not share.",
    "fork": "Go on from any place of a conversation, apart from it.",
    "search": "Find words in all conversations.",
    "export": "Write conversations as lines of JSON.",
    "import": "Take in conversations that were exported.",
    "delete": "Delete a conversation for good.",
    "verify": "Check digests; with --server, what the provider holds.",
    "gc": "Give back the space of what was deleted.",
    "run": "Run a workflow: refine, debate or steps.",
    "batch": "Have thousands of conversations from a file; resumable.",
    "stats": "What the store tells about its chains, tokens, cost and latency.",
    "serve": "Serve the Responses API from this machine: no key, no network.",
    "proxy": "Forward requests to a Responses server, sending only what is new.",
    "config": "Show the settings that hold, and where each came from.",
    "doctor": "Look whether everything is in place, with advice.",
    "completion": "Print what makes a shell complete kedge's commands.",
}
"""Every command and its line in ``kedge --help``."""


def module_name(name: str) -> str:
    """The module of a command; a name that is a word of Python has a line after it."""
    return f"kedge.cli.{'import_' if name == 'import' else name.replace('-', '_')}"


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command."""
        if cmd_name not in COMMANDS:
            return None
        return import_module(module_name(cmd_name)).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the one that is most like it."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "'kedge --help' lists those there are"
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete the name of a command without importing any."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=line)
            for name, line in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


def _apply_no_color(ctx: click.Context) -> None:
    """Colour is for terminals whose owner did not say no; click sees to the terminals."""
    import os

    if os.environ.get("NO_COLOR"):
        ctx.color = False


@click.group("kedge", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kedge", prog_name="kedge")
@click.option(
    "-v",
    "--verbose",
    count=True,
    help="Show tracebacks and warnings; twice, thrice, four times: info, debug, trace.",
)
@click.pass_context
def group(ctx: click.Context, verbose: int) -> None:
    """Conversations with language models that remember."""
    _apply_no_color(ctx)
    ctx.meta["kedge.verbose"] = verbose


main = cast("Callable[[], None]", group)
"""The console script."""
