"""Markdown output of a chat on a terminal, drawn while the answer arrives."""

import re
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from kedge.cli.chat_output import TextOutput
from kedge.events import Event, ReasoningDelta
from kedge.text.display import (
    MAX_MARKDOWN_WORK,
    estimate_markdown_work,
    pluralize,
    sanitize_text,
)

_FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})")


def split_settled(text: str) -> tuple[str, str]:
    """Split a growing text into the part that can no longer change and the rest."""
    fence, end, position = "", 0, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if found := _FENCE.match(line):
            mark = found[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence):
                fence = ""
        if not fence and line.endswith("\n") and not line.strip():
            end = position
    return text[:end], text[end:]


MAX_LIVE_WORK = MAX_MARKDOWN_WORK // 20
"""The work above which the growing part of an answer is drawn as plain text: it is parsed again for each delta."""
MAX_LIVE_CHARS = 4_000
"""The length of the end of a growing part that is drawn as plain text."""


def to_renderable(text: str) -> Markdown | Text:
    """Return a text for a console: as Markdown, or as plain text if parsing it takes too much work."""
    is_simple = estimate_markdown_work(text) <= MAX_MARKDOWN_WORK
    return Markdown(text) if is_simple else Text(text)


class MarkdownOutput(TextOutput):
    """Draws answers as Markdown, and a line while only reasoning arrives."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(highlight=False)
        self._rest = ""
        self._live: Live | None = None

    def show_event(self, event: Event) -> None:
        """Draw text, and fold other events into a line."""
        super().show_event(event)
        if isinstance(event, ReasoningDelta):
            self._draw(f"*reasoning, about {pluralize(self._reasoning_words, 'word')}*")

    def write_text(self, delta: str) -> None:
        """Draw a piece of the answer."""
        done, self._rest = split_settled(self._rest + sanitize_text(delta))
        if estimate_markdown_work(self._rest) > MAX_MARKDOWN_WORK:
            done, self._rest = done + self._rest, ""
        if done.strip():
            self._erase()
            self._console.print(to_renderable(done))
        self._draw(self._rest)

    def stop(self) -> None:
        """Print the rest of the answer."""
        self._erase()
        if self._rest.strip():
            self._console.print(to_renderable(self._rest))
        self._rest, self._reasoning_words = "", 0

    def _draw(self, text: str) -> None:
        fresh = self._live is None
        if self._live is None:
            self._live = self._make_live()
            self._live.start()
        is_simple = estimate_markdown_work(text) <= MAX_LIVE_WORK
        drawn = Markdown(text) if is_simple else Text(text[-MAX_LIVE_CHARS:])
        self._live.update(drawn, refresh=fresh)

    def _make_live(self) -> Live:
        options: dict[str, Any] = {"transient": True, "refresh_per_second": 12}
        return Live(console=self._console, vertical_overflow="ellipsis", **options)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
