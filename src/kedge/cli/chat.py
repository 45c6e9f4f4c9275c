"""``kedge chat``: chat with a model on a terminal or through a pipe.

Answers are streamed. After each turn one line shows the mode, the anchor, and how much was sent compared
with a full request. On a terminal, and with ``--conversation``, the conversation is stored and can be continued.
"""

import click

from kedge.cli.base import SOURCES_KEY, setting_option
from kedge.cli.base import command as kedge_command
from kedge.cli.chat_tools import mcp_option
from kedge.cli.store_options import DurationParam, complete_names, store_option


@kedge_command("chat", short_help="Chat with a model; see what was sent, and why.")
@setting_option("model")
@click.option(
    "--conversation",
    "-c",
    metavar="NAME",
    shell_complete=complete_names,
    help="Store the conversation under this name, or continue it.",
)
@click.option(
    "--ttl",
    type=DurationParam(),
    help="Let the conversation expire this long after its last change, such as 30d.",
)
@click.option("--no-save", is_flag=True, help="Do not store a chat without a name.")
@setting_option("system", "system_text")
@click.option(
    "--tool",
    "tool_paths",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Offer a function as a tool. Repeatable.",
)
@mcp_option
@click.option(
    "--schema",
    "schema_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Print answers as JSON that matches the JSON schema in this file.",
)
@click.option("--approve", is_flag=True, help="Ask before each tool call.")
@setting_option("mode")
@setting_option("trace")
@store_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    conversation: str | None,
    ttl: float | None,
    no_save: bool,
    system_text: str,
    tool_paths: tuple[str, ...],
    mcp_servers: tuple[str, ...],
    schema_file: str | None,
    approve: bool,
    mode: str,
    trace: bool,
    store: str,
    as_json: bool,
) -> None:
    """Chat with a model. Type /help in the chat for its commands."""
    from kedge.cli.chat_session import ChatOptions, run_chat

    if conversation is not None and not conversation.strip():
        raise click.BadParameter("the name is empty; give one, or omit the option", param_hint="-c")
    run_chat(
        ChatOptions(
            model=model,
            is_model_given=ctx.meta[SOURCES_KEY]["model"] == "flag",
            name=conversation or "",
            ttl=ttl,
            store=store,
            system=system_text,
            tools=tool_paths,
            mcp=mcp_servers,
            schema_file=schema_file or "",
            approve=approve,
            mode=mode,
            trace=trace,
            as_json=as_json,
            save=not no_save,
        )
    )
