"""``kedge chat``: a conversation in the terminal that shows what was sent, and why.

Lines from a terminal or from a pipe; answers stream as they come. After each turn one line tells the
mode, the anchor, and how much was sent of what a full send would have taken. With ``--conversation`` it
is kept in the store, and goes on where it was left.
"""

from pathlib import Path

import click

from kedge.cli.base import SOURCES_KEY, setting_option
from kedge.cli.base import command as kedge_command
from kedge.cli.store_options import complete_names, store_option


@kedge_command("chat", short_help="Talk with a model; see what was sent, and why.")
@setting_option("model")
@click.option(
    "--conversation",
    "-c",
    metavar="NAME",
    shell_complete=complete_names,
    help="Keep it under this name, or go on with it.",
)
@setting_option("system", "system_text")
@click.option(
    "--tool", "tool_paths", multiple=True, metavar="MODULE:FUNCTION", help="Offer a tool."
)
@setting_option("mode")
@setting_option("trace")
@store_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    conversation: str | None,
    system_text: str,
    tool_paths: tuple[str, ...],
    mode: str,
    trace: bool,
    store: str,
    as_json: bool,
) -> None:
    """Talk with a model. Type /help inside for what else there is."""
    from kedge.cli.chat_session import ChatOptions, run_chat

    run_chat(
        ChatOptions(
            model=model,
            is_model_given=ctx.meta[SOURCES_KEY]["model"] == "flag",
            name=conversation or "",
            store=store,
            system=system_text,
            tools=tool_paths,
            mode=mode,
            trace=trace,
            as_json=as_json,
        )
    )


def history_file() -> Path:
    """Where the lines that were typed are remembered."""
    from kedge.config import data_dir

    return data_dir() / "history"
