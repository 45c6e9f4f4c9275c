"""One way to print a result: JSON for scripts, or text and tables for people."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

GAP = "  "


def say(text: str = "") -> None:
    """Print a line; colours only reach a terminal."""
    click.echo(text)


def say_json(value: Any) -> None:
    """Print a value as JSON: indented on a terminal, one line in a pipe."""
    indent = 2 if sys.stdout.isatty() else None
    click.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def dim(text: str) -> str:
    """What matters less."""
    return click.style(text, dim=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, width: int = 0) -> None:
    """Print columns; on a terminal the last one is cut to what fits."""
    listed = [[_cell(cell) for cell in row] for row in rows]
    plain = [[click.unstyle(cell) for cell in row] for row in listed]
    widths = [
        max(len(header), *(len(row[i]) for row in plain)) if plain else len(header)
        for i, header in enumerate(headers)
    ]
    say(dim(_line(headers, headers, widths)))
    room = width or _room()
    for row, bare in zip(listed, plain, strict=True):
        say(_line(_cut(row, bare, widths, room), bare, widths))


def _cell(value: object) -> str:
    return "" if value is None else " ".join(str(value).split())


def _line(cells: Sequence[str], bare: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell + " " * (width - len(text))
        for cell, text, width in zip(cells, bare, widths, strict=True)
    ]
    return GAP.join(padded).rstrip()


def _room() -> int:
    """How wide the terminal is; anything else is as wide as need be."""
    if not sys.stdout.isatty():
        return 0
    from shutil import get_terminal_size

    return get_terminal_size().columns


def _cut(row: list[str], bare: list[str], widths: list[int], room: int) -> list[str]:
    before = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    left = room - before
    if not room or left >= len(bare[-1]) or left < 8:
        return row
    return [*row[:-1], bare[-1][: left - 1] + "…"]
