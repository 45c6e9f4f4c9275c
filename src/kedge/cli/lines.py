"""The user's lines, from a terminal or a pipe; on a terminal with history and completion."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

REMEMBERED = 1_000


def read_lines(*, echo: bool, words: tuple[str, ...]) -> Iterator[str]:
    """Each line that is not empty; lines of a pipe are echoed, so that a record reads as a talk."""
    interactive = sys.stdin.isatty()
    keep = _prepare(words) if interactive else None
    try:
        while True:
            try:
                line = input("> " if interactive else "")
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    click.echo()
                return
            if not line.strip():
                continue
            if not interactive and echo:
                click.echo(f"> {line}")
            yield line.strip()
    finally:
        if keep:
            _save(keep)


def _prepare(words: tuple[str, ...]) -> Any:
    """Arrow keys, history and completion of commands, where the platform has them."""
    from kedge.cli.chat import history_file

    try:
        readline: Any = import_module("readline")
    except ImportError:
        return None
    with suppress(OSError):
        readline.read_history_file(history_file())
    readline.set_history_length(REMEMBERED)
    readline.set_completer(completer(words))
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    return readline


def completer(words: tuple[str, ...]) -> Any:
    """What readline asks for the n-th word that a text may become."""

    def complete(text: str, number: int) -> str | None:
        fitting = [word for word in words if word.startswith(text)] if text else []
        return fitting[number] if number < len(fitting) else None

    return complete


def _save(readline: Any) -> None:
    """Keep the lines for the next time, for their writer's eyes only."""
    from kedge.cli.chat import history_file

    path = history_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
