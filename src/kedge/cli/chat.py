"""``kedge chat``: chat with a model on a terminal or through a pipe.

Answers are streamed. After each turn one line shows the mode, the anchor, and how much was sent compared
with a full request. On a terminal, and with ``--conversation``, the conversation is stored and can be continued.
"""

import sys
from typing import Any

import click

from kedge.cli.base import get_setting, kedge_command, setting_option
from kedge.cli.chat_tools import mcp_option
from kedge.cli.store_options import MODEL_HELP, DurationParam, complete_names, store_option


@kedge_command("chat")
@click.argument("message", required=False)
@setting_option("model", help=MODEL_HELP)
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
@click.option(
    "--attach",
    "-a",
    "attachments",
    multiple=True,
    metavar="FILE|URL",
    help='Attach a file to the first message; "-" is the standard input. Repeatable.',
)
@setting_option("system")
@click.option(
    "--tool",
    "tools",
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
def command(
    message: str | None,
    conversation: str | None,
    no_save: bool,
    attachments: tuple[str, ...],
    **options: Any,
) -> None:
    """Chat with a model. Type /help in the chat for its commands.

    With MESSAGE, send this message, print the answer and exit; if it is "-", the complete standard input is the
    message. Such a chat is stored only under a name (-c).
    """
    from kedge.cli.chat_session import ChatOptions, run_chat

    if "-" in attachments and (message in (None, "-") or attachments.count("-") > 1):
        raise click.BadParameter(
            '"-" needs a MESSAGE, and can be given once', param_hint="--attach"
        )
    if message == "-":
        message = sys.stdin.read()
    if message is not None and not message.strip():
        raise click.BadParameter("the message is empty", param_hint="MESSAGE")
    if conversation is not None and not conversation.strip():
        raise click.BadParameter("the name is empty; give one, or omit the option", param_hint="-c")
    is_model_given = get_setting("model").source == "flag"
    if is_model_given and not options["model"].strip():
        raise click.BadParameter("it is empty; name a model, or omit it", param_hint="--model")
    run_chat(
        ChatOptions(
            **options,
            message=(message or "").strip(),
            attachments=attachments,
            is_model_given=is_model_given,
            name=conversation or "",
            save=not no_save,
        )
    )
