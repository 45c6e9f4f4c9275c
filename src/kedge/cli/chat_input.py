"""Input of a chat: messages of one or more lines on a terminal, lines of a pipe, and attached files.

On a terminal, a paste is one message, Alt+Enter or a backslash at the end of a line continues the message, and
Ctrl-C clears it. prompt-toolkit is imported for terminals only, because its import takes longer than the rest
of a command's start.
"""

import asyncio
import mimetypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.base import echo, wrap_text
from kedge.config import data_dir
from kedge.errors import InvalidTurn
from kedge.turns import Part, TextPart
from kedge.turns.attachments import MAX_FILE_BYTES, audio, file, image, read_file
from kedge.turns.parts import AUDIO_FORMATS, detect_media_type

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

EMPTY_INTERRUPT_MESSAGE = "(Ctrl-D or /quit ends the chat)"


class InputInterrupted(Exception):
    """Ctrl-C was pressed and there was no text to clear."""


def history_file() -> Path:
    """Return the path of the input history."""
    return data_dir() / "chat_history"


def read_messages(
    runner: asyncio.Runner, *, show_lines: bool, completions: tuple[str, ...], remember: bool
) -> Iterator[str]:
    """Yield each non-empty message until the input ends.

    Args:
        runner: The runner for the prompt of a terminal.
        show_lines: Whether lines of a pipe are printed, so that the output is a transcript.
        completions: The texts that Tab completes.
        remember: Whether messages are stored in the input history.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    source = (
        _read_terminal(runner, completions, remember=remember)
        if is_terminal
        else _read_lines(show_lines=show_lines)
    )
    for message in source:
        if text := message.strip():
            yield text


def attach_file(source: str) -> Part:
    """Return the part of a message with an attached file.

    Text becomes a text part, because several providers accept files only if they are PDF documents.

    Args:
        source: The path of a file, the URL of an image or a file, or "-" for the standard input.

    Raises:
        InvalidTurn: If the file cannot be read, is too large, or is neither text nor of a known type.
    """
    if source.startswith(("https://", "http://")):
        media_type, _ = mimetypes.guess_type(source.partition("?")[0])
        return image(source) if (media_type or "").startswith("image/") else file(source)
    path = Path("standard input" if source == "-" else source).expanduser()
    content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if source == "-" else read_file(path)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidTurn(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
    named_type, _ = mimetypes.guess_type(path.name, strict=False)
    media_type = detect_media_type(content) or named_type or ""
    if media_type.startswith("image/") and media_type != "image/svg+xml":
        return image(content, media_type=media_type)
    if media_type in AUDIO_FORMATS:
        return audio(content, media_type=media_type)
    with suppress(UnicodeDecodeError):
        return TextPart(f"{path.name}:\n\n{content.decode()}")
    if not media_type:
        raise InvalidTurn(f"{path} is neither text nor of a known type")
    return file(content, filename=path.name, media_type=media_type)


def _read_lines(*, show_lines: bool) -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
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
    runner: asyncio.Runner, completions: tuple[str, ...], *, remember: bool = True
) -> Iterator[str]:
    prompt = create_prompt(completions, remember=remember)
    while True:
        try:
            yield runner.run(prompt.prompt_async("> "))
        except EOFError:
            return
        except InputInterrupted:
            echo(wrap_text(EMPTY_INTERRUPT_MESSAGE))


def create_prompt(completions: tuple[str, ...], *, remember: bool) -> "PromptSession[str]":
    """Create the prompt of a terminal, with history and completion."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory

    return PromptSession(
        multiline=True,
        prompt_continuation="  ",
        history=_open_history() if remember else InMemoryHistory(),
        completer=WordCompleter([*completions], sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=0,
        key_bindings=_create_key_bindings(),
    )


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
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(str(path))
