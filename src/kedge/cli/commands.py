"""The command line: one module per command or group of related commands, imported on first use.

``kedge --help`` must be fast, so the group has only the name and one line of help for each command, and
imports its module (``kedge.cli.<name>``, attribute ``command``) when it is called.
"""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

COMMANDS: dict[str, str] = {
    "chat": "Chat with a model; see what was sent, and why.",
    "conversations": "List the conversations in the store.",
    "show": "Print a conversation.",
    "tree": "Print the response tree of a conversation.",
    "inspect": "List the blocks and the plan of the next request.",
    "diff": "Compare two branches or two positions.",
    "fork": "Continue from any position as a new conversation.",
    "undo": "Go back to before the last message.",
    "redo": "Go forward again to what was undone.",
    "rename": "Change the title of a conversation.",
    "tag": "Add or remove tags of a conversation.",
    "archive": "Archive a conversation, or restore it.",
    "settings": "Show or change the mode, retention and expiry of a conversation.",
    "search": "Search all conversations.",
    "export": "Export conversations as JSON lines.",
    "import": "Import exported conversations.",
    "delete": "Delete a conversation permanently.",
    "verify": "Check the store; with --server also the provider's data.",
    "gc": "Delete expired conversations and reclaim space.",
    "run": "Run a workflow: refine, debate or steps.",
    "batch": "Run prompts from a file; resumable.",
    "stats": "Show requests, tokens, cost and latency.",
    "serve": "Serve the Responses API and a web page.",
    "auth": "Manage the tokens of users: add, list, revoke.",
    "mcp": "Serve the conversations as an MCP server.",
    "proxy": "Forward requests to a Responses server, sending only what is new.",
    "config": "Show the settings in effect and where each came from.",
    "doctor": "Check the installation and the configuration.",
    "completion": "Print the completion script for a shell.",
}
"""The commands and their lines in ``kedge --help``."""

SYNONYMS = {
    **dict.fromkeys(("history", "list", "ls"), "conversations"),
    **dict.fromkeys(("remove", "rm"), "delete"),
    **dict.fromkeys(("cat", "log", "view"), "show"),
    **dict.fromkeys(("analyze", "cost", "usage"), "stats"),
    **dict.fromkeys(("ask", "prompt"), "chat"),
    "workflow": "run",
}
"""Names that other tools use, with the command to suggest for each."""

INTERRUPTED_EXIT_CODE = 130
"""The exit code after Ctrl-C, as in a shell."""

_MODULES = {
    **dict.fromkeys(("completion", "config"), "doctor"),
    **dict.fromkeys(("diff", "tree"), "show"),
    **dict.fromkeys(("delete", "export", "gc", "import", "verify"), "maintenance"),
    **dict.fromkeys(("mcp", "proxy"), "serve"),
    **dict.fromkeys(
        ("archive", "fork", "redo", "rename", "search", "settings", "tag", "undo"),
        "conversations",
    ),
}
"""The modules of commands that have another name than their module."""


def load_command(name: str) -> click.Command:
    """Import a command."""
    module = import_module(f"kedge.cli.{_MODULES.get(name, name)}")
    command: click.Command = getattr(module, f"{name}_command", None) or module.command
    command.short_help = COMMANDS[name]
    return command


class LazyGroup(click.Group):
    """A click group that imports its commands on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command."""
        if cmd_name not in COMMANDS:
            return None
        return load_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the most similar one."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            ctx.fail(f"there is no command {name!r}; {_suggest_command(name)}")
        ctx.invoked_subcommand = name
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Import and run a command; Ctrl-C ends it with the exit code of a shell, also during the import."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note = "Interrupted."
            if ctx.invoked_subcommand == "batch":
                note += " Run the same command again to continue."
            click.echo(note, err=True)
            raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line; a full disk behind the output of ``--help`` is reported in one line."""
        try:
            return super().main(*args, **options)
        except OSError as error:
            from kedge.cli.base import CommandError, discard_output

            discard_output()
            CommandError(error, as_json=False, verbose=False).show()
            sys.exit(CommandError.exit_code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command without importing any."""
        names = [
            CompletionItem(name, help=line)
            for name, line in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def _suggest_command(name: str) -> str:
    """Return advice about an unknown command: the most similar one, or the list."""
    from kedge.errors import find_similar

    similar = SYNONYMS.get(name) or find_similar(name, COMMANDS)
    if similar:
        return f"did you mean {similar}?"
    return "'kedge --help' lists the commands"


def choose_color() -> bool | None:
    """Return False if ``NO_COLOR`` disables color, else None: click disables it outside of terminals."""
    if os.environ.get("NO_COLOR"):
        return False
    return None


@click.group("kedge", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kedge-llm", prog_name="kedge")
@click.option(
    "-v",
    "--verbose",
    count=True,
    help="Show tracebacks and warnings; -vv, -vvv, -vvvv also show info, debug, trace.",
)
@click.pass_context
def group(ctx: click.Context, verbose: int) -> None:
    """Stateful conversations with language models."""
    ctx.color = choose_color()
    ctx.meta["kedge.verbose"] = verbose


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script; after Ctrl-C, do not wait for functions that tools run in threads."""
    try:
        group.main(arguments)
    except SystemExit as end:
        # A function in a thread of anyio, which ends its idle threads, is still running.
        is_blocked = any(thread.name.startswith("AnyIO") for thread in threading.enumerate())
        if end.code == INTERRUPTED_EXIT_CODE and is_blocked:
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(INTERRUPTED_EXIT_CODE)
        raise
