"""Tests of the input of a chat: keys in a prompt, and a conversation at a pseudo-terminal."""

import asyncio
import os
import pty
import re
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from forked import ForkedProcess
from kedge.cli import group
from kedge.cli.chat import EMPTY_INTERRUPT_MESSAGE, _read_terminal, history_file

TIMEOUT = 300
ESCAPES = r"(?:\x1b\[[?\d;]*[A-Za-z])*"
"""Sequences that move the cursor or set the style."""
PASTE = "\x1b[200~{}\x1b[201~"
PROMPT = "\x1b[?2004h"
"""The sequence that enables bracketed paste, sent to the terminal when the prompt is ready."""
ALT_ENTER = "\x1b\r"
CTRL_C = "\x03"
CTRL_D = "\x04"
# Makes the terminal the controlling terminal, which receives Ctrl-C, then runs the command.
RUN_AT_TERMINAL = "import os; os.login_tty(0); from kedge.cli import main; main()"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    """Yield the input whose keys are typed into prompts."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def read(keys: PipeInput, *inputs: str, completions: tuple[str, ...] = ()) -> list[str]:
    """Type keys, one message at a time, and return the messages that are read."""
    with asyncio.Runner() as runner:
        messages = _read_terminal(runner, completions)
        lines: list[str] = []
        for text in inputs:
            keys.send_text(text)
            lines += [message for message in [next(messages, None)] if message is not None]
    return lines


def test_prompt_keys(keys: PipeInput) -> None:
    """A paste is one message, a backslash and Alt+Enter continue it, and Ctrl-C clears it."""
    inputs = [
        PASTE.format("first\nsecond") + "\r",
        f"one\\\rtwo{ALT_ENTER}three\r",
        f"half typed{CTRL_C}whole\r",
        "a\\b\r",
    ]
    assert read(keys, *inputs, CTRL_D) == ["first\nsecond", "one\ntwo\nthree", "whole", "a\\b"]


def test_ctrl_c_without_text(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C does not end the chat, because it may be the second one pressed to stop an answer."""
    assert read(keys, f"{CTRL_C}next\r") == ["next"]
    assert EMPTY_INTERRUPT_MESSAGE in capsys.readouterr().out


def test_history_is_private(keys: PipeInput, tmp_path: Path) -> None:
    """Arrow up recalls messages, and other users cannot read them."""
    history_file().parent.mkdir()
    read(keys, "an old line\r")
    read(keys, "My name is Ada.\r")
    assert history_file().stat().st_mode & 0o077 == 0
    assert read(keys, "\x1b[A\r") == ["My name is Ada."]
    assert read(keys, "\x1b[A\x1b[A\r") == ["an old line"]


def test_unwritable_history_is_in_memory(
    keys: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat works without a writable data folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert read(keys, "Hello\r") == ["Hello"]


class Terminal:
    """``kedge chat`` at a pseudo-terminal."""

    def __init__(self, fd: int, process: ForkedProcess) -> None:
        self._fd = fd
        self.process = process
        self.seen = ""

    def read_until(self, text: str) -> str:
        """Return the output before this text, which must appear; it may be drawn in several steps."""
        pattern = re.compile(ESCAPES.join(map(re.escape, text)))
        end = time.monotonic() + TIMEOUT
        while not (match := pattern.search(self.seen)) and time.monotonic() < end:
            if select.select([self._fd], [], [], 1)[0]:
                try:
                    self.seen += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    break
        assert match, self.seen
        before, self.seen = self.seen[: match.start()], self.seen[match.end() :]
        return before

    def type(self, text: str) -> None:
        """Wait for the prompt, then type."""
        self.read_until(PROMPT)
        self.press(text)

    def press(self, text: str) -> None:
        """Type without waiting for the prompt."""
        os.write(self._fd, text.encode())


@contextmanager
def open_terminal(*options: str, **environ: str) -> Iterator[Terminal]:
    controller_fd, terminal_fd = pty.openpty()
    command = ["-c", RUN_AT_TERMINAL, "chat", *options]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal_fd)
    environ = {"TERM": "xterm-256color", "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1", **environ}
    process = ForkedProcess(command, **streams, close_fds=True, env={**os.environ, **environ})
    os.close(terminal_fd)
    try:
        yield Terminal(controller_fd, process)
    finally:
        process.kill()
        process.wait(TIMEOUT)
        os.close(controller_fd)


def test_conversation_at_a_terminal(tmp_path: Path) -> None:
    """Paste, Ctrl-C, /editor, /save and Ctrl-D work, and a second command continues the chat, chained."""
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\necho 'What is 3+4?' > \"$1\"\n")
    editor.chmod(0o700)
    with open_terminal(EDITOR=str(editor)) as terminal:
        assert "Saved as conv_" in terminal.read_until("/save NAME")
        terminal.type(PASTE.format("My name is Ada.\nMy boat is Argo.") + "\r")
        assert "\x1b[" in terminal.read_until("sent 1 of 1 block,")
        terminal.type("Very slowly write 400 words.\r")
        terminal.read_until("The kedge")
        terminal.press(CTRL_C)
        output = terminal.read_until("(interrupted; the partial answer is stored")
        assert output.endswith("\r\n")
        terminal.type("/editor\r")
        terminal.read_until("3+4 = 7.")
        terminal.type("/sav\t")
        terminal.read_until("/save")
        terminal.press(" harbour\r")
        terminal.read_until("saved as harbour")
        terminal.type(CTRL_D)
        terminal.read_until("Continue with: kedge chat -c harbour")
        assert terminal.process.wait(TIMEOUT) == 0
    with open_terminal("-c", "harbour") as terminal:
        terminal.read_until("4 blocks so far")
        terminal.type("What is my boat?\r")
        terminal.read_until("Your boat is Argo.")
        terminal.read_until("sent 1 of 5 blocks")
        terminal.type("/quit\r")
        assert terminal.process.wait(TIMEOUT) == 0
    tree = CliRunner().invoke(group, ["tree", "harbour"]).output
    assert "The kedge" in tree


def test_chat_without_messages_is_not_stored() -> None:
    """Ctrl-D at the first prompt stores no conversation, and --no-save stores nothing at all."""
    with open_terminal() as terminal:
        terminal.type(CTRL_D)
        assert terminal.process.wait(TIMEOUT) == 0
    with open_terminal("--no-save") as terminal:
        terminal.read_until("Not saved; /save NAME saves it.")
        terminal.type("Hello\r")
        terminal.read_until("sent 1 of 1 block,")
        terminal.type(CTRL_D)
        assert terminal.process.wait(TIMEOUT) == 0
    assert not history_file().exists() or "Hello" not in history_file().read_text()
    assert "There are no conversations yet" in CliRunner().invoke(group, ["conversations"]).output
