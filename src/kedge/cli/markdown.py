"""Markdown that streams onto a terminal.

What is settled (everything up to the last blank line outside of a code fence) is printed for good, so
that it scrolls like any other text; only the part that still grows is drawn again and again.
"""

import re
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from kedge.cli.telling import TextTeller
from kedge.cli.words import printable
from kedge.events import Event, ReasoningDelta

_FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})")


def settled(text: str) -> tuple[str, str]:
    """The part of a growing text that will not change any more, and the rest."""
    fence, end, place = "", 0, 0
    for line in text.splitlines(keepends=True):
        place += len(line)
        if found := _FENCE.match(line):
            mark = found[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence):
                fence = ""
        if not fence and line.endswith("\n") and not line.strip():
            end = place
    return text[:end], text[end:]


class MarkdownTeller(TextTeller):
    """Draws answers as Markdown; a line tells of thinking while there is nothing else to see."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(highlight=False)
        self._rest = ""
        self._live: Live | None = None

    def tell(self, event: Event) -> None:
        """Draw the answer; fold the rest."""
        super().tell(event)
        if isinstance(event, ReasoningDelta):
            self._draw(f"*thinking, about {self._thought} words*")

    def text(self, delta: str) -> None:
        """Take a piece of the answer."""
        done, self._rest = settled(self._rest + printable(delta))
        if done.strip():
            self._erase()
            self._console.print(Markdown(done))
        self._draw(self._rest)

    def stop(self) -> None:
        """Print what still grew, for good."""
        self._erase()
        if self._rest.strip():
            self._console.print(Markdown(self._rest))
        self._rest, self._thought = "", 0

    def _draw(self, text: str) -> None:
        fresh = self._live is None
        if self._live is None:
            self._live = self._make_live()
            self._live.start()
        self._live.update(Markdown(text), refresh=fresh)

    def _make_live(self) -> Live:
        options: dict[str, Any] = {"transient": True, "refresh_per_second": 12}
        return Live(console=self._console, vertical_overflow="ellipsis", **options)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
