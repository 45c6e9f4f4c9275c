"""Sessions of terminal programs, as shown in ``docs/clients.md``.

The first line of a session is the command. A line that begins with the prompt of the program is typed, and any
other line must appear on the screen. Afterwards the program must end by itself.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false

import json
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

ROWS, COLUMNS = 50, 120
PROMPTS = (
    "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
    "\N{HEAVY RIGHT-POINTING ANGLE QUOTATION MARK ORNAMENT}",
)
"""The prompts of Codex and Claude Code."""
UNSUPPORTED = re.compile(rb"\x1b\[(?:[<>=][\d;:]*[a-zA-Z]|\?[\d;:]*u)")
"""Sequences that pyte would print: keyboard protocols and queries about the terminal."""
UNFINISHED = re.compile(rb"\x1b(?:\[[\d;:<>=?]*)?$")


class SessionFailed(Exception):
    """The program ended early, or did not show the text of the session in time."""


class Screen(pyte.Screen):
    """A screen that answers queries of the program, such as for the position of the cursor."""

    def __init__(self, answer: Callable[[bytes], object]) -> None:
        super().__init__(COLUMNS, ROWS)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        """Send an answer to the program."""
        self._answer(data.encode())


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._file, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._screen = Screen(self.write)
        self._stream = pyte.ByteStream(self._screen)
        self._unread = b""

    def write(self, data: bytes) -> None:
        """Send bytes to the program."""
        os.write(self._file, data)

    def read_screen(self) -> list[str]:
        """Return the lines of the screen."""
        return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip() for line in self._screen.display]

    def receive(self, seconds: float) -> bool:
        """Wait for output and display it; return False at the end of the output."""
        if not select.select([self._file], [], [], seconds)[0]:
            raise SessionFailed("timeout")
        try:
            data = os.read(self._file, 65536)
        except OSError:  # how Linux reports the end of a pseudo-terminal
            return False
        data = self._unread + data
        unfinished = UNFINISHED.search(data)
        self._unread = unfinished[0] if unfinished else b""
        self._stream.feed(UNSUPPORTED.sub(b"", data.removesuffix(self._unread)))
        return bool(data)

    def wait_for(self, text: str, limit: float) -> None:
        """Wait until a line of the screen begins with a text."""
        end = time.monotonic() + limit
        while not any(line.lstrip().startswith(text) for line in self.read_screen()):
            if not self.receive(max(0, end - time.monotonic())):
                raise SessionFailed(f"it ended before {text!r}")

    def type(self, prompt: str, text: str, limit: float) -> None:
        """Paste a line at the prompt and send it once it is shown, because programs ignore an early key."""
        self.wait_for(prompt, limit)
        self.write(b"\x1b[200~" + text.encode() + b"\x1b[201~")
        self.wait_for(f"{prompt} {text}", limit)
        self.write(b"\r")

    def close(self, limit: float) -> int:
        """Wait for the end of the program and return its exit code."""
        while self.receive(limit):
            pass
        return self.process.wait(limit)


def accept_first_questions(home: Path, folder: Path) -> None:
    """Write what Codex and Claude Code store at their first start: trust in the folder, and the key."""
    codex = home / ".codex" / "config.toml"
    if codex.exists():
        trust = f'\n[projects."{folder}"]\ntrust_level = "trusted"\n'
        codex.write_text(codex.read_text() + trust)
    path = home / ".claude.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= {
        "hasCompletedOnboarding": True,
        "customApiKeyResponses": {"approved": ["any"], "rejected": []},
        "projects": {str(folder): {"hasTrustDialogAccepted": True}},
    }
    path.write_text(json.dumps(settings))


def run_session(
    session: str, home: Path, environment: Mapping[str, str], exports: str, limit: float
) -> str:
    """Run a session in ``home/work``; return a description of the failure, or an empty string."""
    folder = (home / "work").resolve()
    accept_first_questions(home, folder)
    command, *lines = session.splitlines()
    terminal = Terminal(
        f"{exports}\nexec {command.removeprefix('$ ')}",
        folder,
        {**environment, "TERM": "xterm-256color"},
    )
    try:
        for line in lines:
            prompt, _, text = line.partition(" ")
            if prompt in PROMPTS:
                terminal.type(prompt, text, limit)
            else:
                terminal.wait_for(line, limit)
        code = terminal.close(limit)
    except SessionFailed as error:
        terminal.process.kill()
        terminal.process.wait()
        screen = "\n".join(filter(None, terminal.read_screen()))
        return f"{error}; the screen:\n{screen}"
    return f"exit code {code}" if code else ""
