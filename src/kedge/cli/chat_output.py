"""Output of a chat: text in a pipe, JSON for scripts, and the choice between these and Markdown on a terminal."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import (
    describe_error,
    dim,
    echo,
    echo_error,
    find_hint,
    format_error,
    format_json,
    wrap_text,
)
from kedge.conversation import Reply
from kedge.errors import KedgeError
from kedge.events import Event, ReasoningDelta, RefusalDelta, TextDelta
from kedge.events.request_record import RequestRecord
from kedge.events.run import FellBack, Healed, OutputRejected, ServerForgot, ToolFinished
from kedge.text.display import (
    HEALING_TEXTS,
    MAX_MARKDOWN_WORK,
    estimate_markdown_work,
    first_line,
    format_size,
    pluralize,
    sanitize_text,
    shorten_id,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

MAX_RESULT_CHARS = 60
Records = Sequence[RequestRecord]
"""The records of the requests of a turn."""


class TextOutput:
    """Prints plain text; everything except the answer is a line in brackets."""

    err = False
    """Whether everything except the answer is printed on standard error."""

    def __init__(self) -> None:
        self._reasoning_words = 0
        self._is_line_open = False

    def show_event(self, event: Event) -> None:
        """Print the answer; fold reasoning and tool calls."""
        if isinstance(event, ReasoningDelta):
            self._reasoning_words += len(event.delta.split())
            return
        if self._reasoning_words and isinstance(event, TextDelta | RefusalDelta | ToolFinished):
            self.write_note(f"[reasoning: about {pluralize(self._reasoning_words, 'word')}]")
            self._reasoning_words = 0
        if isinstance(event, TextDelta | RefusalDelta):
            self.write_text(event.delta)
        elif line := format_event(event):
            self.write_note(line, warn=not isinstance(event, ToolFinished))

    def write_text(self, delta: str) -> None:
        """Print a piece of the answer."""
        echo(sanitize_text(delta), nl=False)
        self._is_line_open = not delta.endswith("\n")

    def write_note(self, line: str, *, warn: bool = False) -> None:
        """Print a line that is not part of the answer."""
        self.stop()
        line = wrap_text(line, err=self.err)
        echo(click.style(line, fg="yellow") if warn else dim(line), err=self.err)

    def stop(self) -> None:
        """End the current line."""
        if self._is_line_open:
            echo()
        self._is_line_open, self._reasoning_words = False, 0

    def show_end(self, reply: Reply[Any], records: Records) -> None:
        """Print what was sent."""
        self.write_note(format_status(records))

    def show_output(self, command: str, text: str) -> None:
        """Print the output; the lines of a tree or of a list are not wrapped."""
        is_list = command in ("/tree", "/show")
        echo(text if is_list else wrap_text(text, err=self.err), err=self.err)

    def show_error(self, error: KedgeError) -> None:
        """Print one line and a hint on standard error."""
        echo_error(format_error(error), find_hint(error))

    def show_interrupt(self, message: str) -> None:
        """Print a line in parentheses."""
        echo(wrap_text(f"({message})", err=self.err), err=self.err)


class ValueOutput(TextOutput):
    """Prints only the values of typed answers, as JSON; everything else is printed on standard error."""

    err = True

    def write_text(self, delta: str) -> None:
        """Print nothing: an answer is printed when it is complete and valid."""

    def show_end(self, reply: Reply[Any], records: Records) -> None:
        """Print the value."""
        echo(format_json(reply.output))
        super().show_end(reply, records)


class JsonOutput:
    """Prints one JSON object per turn, command or error; a typed answer with its value."""

    def __init__(self, *, is_typed: bool) -> None:
        self._is_typed = is_typed

    def show_event(self, event: Event) -> None:
        """Print nothing: a turn is printed when it is complete."""

    def stop(self) -> None:
        """Do nothing."""

    def show_end(self, reply: Reply[Any], records: Records) -> None:
        """Print the turn."""
        from kedge.web.shapes import shape_reply, shape_request

        report = shape_reply(reply).model_dump(mode="json", exclude={"plan"})
        report["requests"] = [shape_request(each).model_dump(mode="json") for each in records]
        if self._is_typed:
            report["output"] = reply.output
        echo(format_json(report))

    def show_output(self, command: str, text: str) -> None:
        """Print the output of a command."""
        echo(format_json({"command": command, "output": click.unstyle(text)}))

    def show_error(self, error: KedgeError) -> None:
        """Print the error."""
        echo(format_json(describe_error(error, str(error), find_hint(error))))

    def show_interrupt(self, message: str) -> None:
        """Print the interruption as an error."""
        echo(format_json({"error": message, "kind": "KeyboardInterrupt", "hint": ""}))


def format_event(event: Event) -> str:
    """Format an event as one line in brackets; empty for events that are not shown."""
    match event:
        case ToolFinished():
            call = event.call
            text = first_line(event.result.text, MAX_RESULT_CHARS)
            return sanitize_text(f"[{call.name} {call.arguments} -> {text}]")
        case Healed():
            return f"[{HEALING_TEXTS.get(event.reason, f'resent: {event.reason}')}]"
        case FellBack():
            return f"[sent in full: {event.reason}]"
        case OutputRejected():
            return f"[answer {event.attempt} does not match the schema; requested again]"
        case ServerForgot():
            return "[the server answered without the earlier context]"
        case _:
            return ""


def format_status(records: Records) -> str:
    """Format how the last request was sent, its anchor, and the blocks and bytes sent compared with a full request."""
    if not records:
        return "[nothing sent]"
    last = records[-1]
    anchor = f" on {shorten_id(last.anchor)}" if last.anchor else ""
    sent = sum(each.sent_blocks for each in records)
    full = sum(each.full_blocks for each in records)
    sent_bytes = sum(each.sent_bytes for each in records)
    full_bytes = sum(each.full_bytes for each in records)
    count = f", {len(records)} requests" if len(records) > 1 else ""
    blocks = f"sent {sent} of {pluralize(full, 'block')}"
    saved = f"{format_size(sent_bytes)} of {format_size(full_bytes)}"
    return f"[{last.send_name}{anchor}, {blocks}, {saved}{count}]"


ChatOutput = TextOutput | JsonOutput
"""Shows the events of a turn and its result."""


def create_output(*, as_json: bool, is_typed: bool = False) -> ChatOutput:
    """Return the output for scripts, for typed answers, for a terminal or for a pipe."""
    if as_json:
        return JsonOutput(is_typed=is_typed)
    if is_typed:
        return ValueOutput()
    if sys.stdout.isatty():
        return MarkdownOutput()
    return TextOutput()


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


def to_renderable(text: str, max_work: int = MAX_MARKDOWN_WORK) -> "Markdown | Text":
    """Return a text for a console: as Markdown, or as plain text if parsing it takes too much work."""
    from rich.markdown import Markdown
    from rich.text import Text

    if estimate_markdown_work(text) <= max_work:
        return Markdown(text)
    return Text(text if max_work == MAX_MARKDOWN_WORK else text[-MAX_LIVE_CHARS:])


class MarkdownOutput(TextOutput):
    """Draws answers as Markdown, and a line while only reasoning arrives."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console

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
            from rich.live import Live

            options: dict[str, Any] = {"transient": True, "refresh_per_second": 12}
            self._live = Live(console=self._console, vertical_overflow="ellipsis", **options)
            self._live.start()
        self._live.update(to_renderable(text, MAX_LIVE_WORK), refresh=fresh)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
