"""``kedge chat``: chat with a model on a terminal or through a pipe.

Answers are streamed. After each answer one line shows the mode, the anchor, and how much was sent compared
with a full request. On a terminal, and with ``--conversation``, the conversation is stored and can be continued.
"""

import mimetypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kedge._internal.files import ensure_private_file
from kedge.cli.base import (
    echo,
    get_setting,
    kedge_command,
    repeated_option,
    setting_option,
    wrap_text,
)
from kedge.cli.chat_tools import mcp_option
from kedge.cli.store_options import MODEL_HELP, complete_names, duration_option, store_option
from kedge.config import data_dir
from kedge.errors import InvalidTurn

if TYPE_CHECKING:
    import asyncio

    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from kedge.turns import Part


ATTACH_HELP = 'Attach a file to the first message; "-" is the standard input.'


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
@duration_option(
    "--ttl", "Let the conversation expire this long after its last change, such as 30d."
)
@click.option("--no-save", is_flag=True, help="Do not store a chat without a name.")
@repeated_option("--attach", "attachments", "FILE|URL", ATTACH_HELP, "-a")
@setting_option("system")
@repeated_option("--tool", "tools", "MODULE:FUNCTION", "Offer a function as a tool.")
@mcp_option
@click.option(
    "--schema",
    "schema_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Print answers as JSON that matches the JSON schema in this file.",
)
@click.option("--approve", is_flag=True, help="Ask before each tool call.")
@click.option("--details", is_flag=True, help="Also print each tool call, healing and fallback.")
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
    if get_setting("model").source != "flag":
        options["model"] = None
    elif not options["model"].strip():
        raise click.BadParameter("it is empty; name a model, or omit it", param_hint="--model")
    run_chat(
        ChatOptions(
            **options,
            message=(message or "").strip(),
            attachments=attachments,
            name=conversation or "",
            save=not no_save,
        )
    )


EMPTY_INTERRUPT_MESSAGE = "(Ctrl-D or /quit ends the chat)"


class InputInterrupted(Exception):
    """Ctrl-C was pressed and there was no text to clear."""


def history_file() -> Path:
    """Return the path of the input history."""
    return data_dir() / "chat_history"


def read_messages(
    runner: "asyncio.Runner", *, show_lines: bool, completions: tuple[str, ...], remember: bool
) -> Iterator[str]:
    """Yield each non-empty message until the input ends.

    Args:
        runner: The runner for the prompt of a terminal.
        show_lines: Whether lines of a pipe are printed, so that the output is a transcript.
        completions: The texts that Tab completes.
        remember: Whether messages are stored in the input history.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        lines = _read_terminal(runner, completions, remember=remember)
    else:
        lines = _read_lines(show_lines=show_lines)
    for line in lines:
        message = line.strip()
        if message:
            yield message


def attach_file(source: str) -> "Part":
    """Return the part of a message with an attached file.

    Text becomes a text part, because several providers accept files only if they are PDF documents.

    Args:
        source: The path of a file, the URL of an image or a file, or "-" for the standard input.

    Raises:
        InvalidTurn: If the file cannot be read, is too large, or is neither text nor of a known type.
    """
    from kedge.turns import attachments

    if source.startswith(("https://", "http://")):
        return _attach_url(source)
    most = attachments.MAX_FILE_BYTES
    if source == "-":
        path = Path("standard input")
        content = sys.stdin.buffer.read(most + 1)
    else:
        path = Path(source).expanduser()
        content = attachments.read_file(path)
    if len(content) > most:
        raise InvalidTurn(f"{path} has more than {most:,} bytes")
    return _make_part(path, content)


def _attach_url(url: str) -> "Part":
    from kedge.turns import file, image

    media_type, _ = mimetypes.guess_type(url.partition("?")[0])
    if media_type and media_type.startswith("image/"):
        return image(url)
    return file(url)


def _make_part(path: Path, content: bytes) -> "Part":
    from kedge.turns import TextPart, attachments, file, image

    named_type, _ = mimetypes.guess_type(path.name, strict=False)
    media_type = attachments.detect_media_type(content) or named_type or ""
    if media_type.startswith("image/") and media_type != "image/svg+xml":
        return image(content, media_type=media_type)
    if media_type in attachments.AUDIO_FORMATS:
        return attachments.audio(content, media_type=media_type)
    with suppress(UnicodeDecodeError):
        return TextPart(f"{path.name}:\n\n{content.decode()}")
    if not media_type:
        raise InvalidTurn(f"{path} is neither text nor of a known type")
    return file(content, filename=path.name, media_type=media_type)


def _read_lines(*, show_lines: bool) -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    prompt = "> " if is_terminal else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_terminal:
                return
            raise
        if show_lines and not is_terminal and line.strip():
            echo(f"> {line}")
        yield line


def _read_terminal(
    runner: "asyncio.Runner", completions: tuple[str, ...], *, remember: bool = True
) -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory

    history = InMemoryHistory()
    if remember:
        history = _open_history()
    prompt = PromptSession[str](
        multiline=True,
        prompt_continuation="  ",
        history=history,
        completer=WordCompleter([*completions], sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=0,
        key_bindings=_create_key_bindings(),
    )
    while True:
        try:
            yield runner.run(prompt.prompt_async("> "))
        except EOFError:
            return
        except InputInterrupted:
            echo(wrap_text(EMPTY_INTERRUPT_MESSAGE))


def _create_key_bindings() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def accept(event: "KeyPressEvent") -> None:
        """Send the message, or continue it after a backslash."""
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def continue_message(event: "KeyPressEvent") -> None:
        """Start a new line of the message."""
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def clear(event: "KeyPressEvent") -> None:
        """Clear the message; if it is empty, raise ``InputInterrupted``."""
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=InputInterrupted())

    return keys


def _open_history() -> "History":
    """Open the history, readable by its owner only; in memory if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    path = history_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ensure_private_file(path)
    except OSError:
        return InMemoryHistory()
    if not os.access(path, os.R_OK | os.W_OK):
        return InMemoryHistory()
    return PrivateHistory(str(path))
