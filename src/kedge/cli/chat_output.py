"""Output of a chat: text in a pipe, JSON for scripts, and the choice between these and Markdown on a terminal.

After an answer one line says what was sent. What happened on the way is collected in `TurnNotes`, which ``/why`` shows.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kedge._internal.display import (
    MAX_MARKDOWN_WORK,
    estimate_markdown_work,
    first_line,
    format_size,
    pluralize,
    sanitize_text,
    shorten_id,
)
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
from kedge.events.run import (
    FellBack,
    Healed,
    OutputRejected,
    RequestPlanned,
    ServerForgot,
    ToolFinished,
    ToolStarted,
)
from kedge.planning.plan import is_fallback_reason
from kedge.presentation.wording import HEALING_TEXTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

MAX_RESULT_CHARS = 60
FORGOTTEN_TEXT = "the server answered without the earlier context"
LOADING_TEXT = "the server is loading its model"
Records = Sequence[RequestRecord]
"""The records of the requests of a turn."""


class TurnNotes:
    """What happened during the last run besides its answer."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """One line in brackets for each tool call, healing, fallback and rejected answer."""
        self.has_forgotten = False
        """Whether the server answered without the earlier context."""
        self._reasoning_words = 0
        self._calls = 0
        self._rejected_answers = 0

    def record_event(self, event: Event) -> str:
        """Record an event; return its line, if it has one."""
        match event:
            case ReasoningDelta():
                self._reasoning_words += len(event.delta.split())
            case ToolFinished():
                self._calls += 1
            case OutputRejected():
                self._rejected_answers += 1
            case ServerForgot():
                self.has_forgotten = True
            case _:
                pass
        line = format_event(event)
        if line:
            self.lines.append(line)
        return line

    @property
    def reasoning(self) -> str:
        """How much the model reasoned, in words; empty if it did not show any."""
        if not self._reasoning_words:
            return ""
        return f"about {pluralize(self._reasoning_words, 'word')} of reasoning"

    def summarize(self) -> Iterator[str]:
        """Yield what the line after the answer says about the turn."""
        if self._calls:
            yield pluralize(self._calls, "tool call")
        if self._rejected_answers:
            yield f"{pluralize(self._rejected_answers, 'answer')} rejected"
        if self.reasoning:
            yield self.reasoning

    def explain(self, records: Records) -> str:
        """Return everything about the turn: its events, and for each request what was sent, and why."""
        from kedge.web.shapes import (  # with pydantic, which takes time to import
            format_headline,
            iter_notes,
        )

        lines = list(self.lines)
        if self.reasoning:
            lines.append(f"[{self.reasoning}]")
        for record in records:
            lines.append(format_headline(record))
            lines += [f"  {note}" for note in iter_notes(record)]
            lines += [f"  Not used: {rejected.words}" for rejected in record.rejected]
        return sanitize_text("\n".join(lines)) or "there is no answer to explain yet"


class TextOutput:
    """Prints plain text, and after an answer one line in brackets.

    Args:
        details: Whether each event of a run is printed as a line when it happens.
    """

    err = False
    """Whether everything except the answer is printed on standard error."""

    def __init__(self, *, details: bool = False) -> None:
        self.notes = TurnNotes()
        self._details = details
        self._is_line_open = False
        self._is_waiting = False

    def start(self) -> None:
        """Begin a turn."""
        self.notes = TurnNotes()
        self._is_waiting = False

    def show_event(self, event: Event) -> None:
        """Print the answer, and with details a line for each other event."""
        line = self.notes.record_event(event)
        if isinstance(event, TextDelta | RefusalDelta):
            self.write_text(event.delta)
        elif line and self._details:
            self.write_note(line, warn=not isinstance(event, ToolFinished))
        elif isinstance(event, RequestPlanned):
            self.stop()  # the text of another answer begins in a line of its own

    def show_wait(self, seconds: float) -> None:
        """Print once that the server is loading its model, if someone watches."""
        if sys.stderr.isatty() and not self._is_waiting:
            self._is_waiting = True
            echo(dim(f"[{LOADING_TEXT}]"), err=True)

    def write_text(self, delta: str) -> None:
        """Print a piece of the answer."""
        echo(sanitize_text(delta), nl=False)
        self._is_line_open = not delta.endswith("\n")

    def write_note(self, line: str, *, warn: bool = False) -> None:
        """Print a line that is not part of the answer."""
        self.stop()
        line = wrap_text(line, err=self.err)
        styled = click.style(line, fg="yellow") if warn else dim(line)
        echo(styled, err=self.err)

    def stop(self) -> None:
        """End the current line."""
        if self._is_line_open:
            echo()
        self._is_line_open = False

    def show_end(self, reply: Reply[Any], records: Records) -> None:
        """Print what was sent."""
        self.write_note(format_status(records, self.notes), warn=self.notes.has_forgotten)

    def show_output(self, command: str, text: str) -> None:
        """Print the output; the lines of a tree or of a list are not wrapped."""
        if command not in ("/tree", "/show"):
            text = wrap_text(text, err=self.err)
        echo(text, err=self.err)

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
        self.notes = TurnNotes()
        self._is_typed = is_typed

    def start(self) -> None:
        """Begin a turn."""
        self.notes = TurnNotes()

    def show_event(self, event: Event) -> None:
        """Print nothing: a run is printed when it is complete."""
        self.notes.record_event(event)

    def show_wait(self, seconds: float) -> None:
        """Print nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def show_end(self, reply: Reply[Any], records: Records) -> None:
        """Print the turn."""
        from kedge.web.shapes import shape_reply, shape_request

        report = shape_reply(reply).model_dump(mode="json", exclude={"plan"})
        report["requests"] = [shape_request(record).model_dump(mode="json") for record in records]
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
            return f"[{FORGOTTEN_TEXT}]"
        case _:
            return ""


def format_status(records: Records, notes: TurnNotes) -> str:
    """Format the line after an answer: how the last request was sent, the blocks and bytes of all, and the notes."""
    if not records:
        return "[nothing sent]"
    last = records[-1]
    sent = sum(record.sent_blocks for record in records)
    full = sum(record.full_blocks for record in records)
    sent_bytes = sum(record.sent_bytes for record in records)
    full_bytes = sum(record.full_bytes for record in records)
    parts = [
        _name_request(last),
        f"sent {sent} of {pluralize(full, 'block')}",
        f"{format_size(sent_bytes)} of {format_size(full_bytes)}",
    ]
    if len(records) > 1:
        parts.append(f"{len(records)} requests")
    parts += notes.summarize()
    if notes.has_forgotten:
        parts.insert(0, FORGOTTEN_TEXT)
    return f"[{', '.join(parts)}]"


def _name_request(record: RequestRecord) -> str:
    """Return how a request was sent, on which anchor, or why everything was sent again."""
    if record.anchor:
        return f"{record.send_label} on {shorten_id(record.anchor)}"
    if record.healed:
        reason = HEALING_TEXTS.get(record.healed, record.healed).partition(";")[0]
        return f"{record.send_label}: {reason}"
    if is_fallback_reason(record.reason):
        return f"{record.send_label}: {record.reason}"
    return record.send_label


ChatOutput = TextOutput | JsonOutput
"""Shows the events of a run and its result."""


def create_output(*, as_json: bool, is_typed: bool = False, details: bool = False) -> ChatOutput:
    """Return the output for scripts, for typed answers, for a terminal or for a pipe."""
    if as_json:
        return JsonOutput(is_typed=is_typed)
    if is_typed:
        return ValueOutput(details=details)
    if sys.stdout.isatty():
        return MarkdownOutput(details=details)
    return TextOutput(details=details)


_FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})")


def split_settled(text: str) -> tuple[str, str]:
    """Split a growing text into the part that can no longer change and the rest."""
    fence = ""
    end = 0
    position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        fence_match = _FENCE.match(line)
        if fence_match is not None:
            mark = fence_match[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence):
                fence = ""
        if not fence and line.endswith("\n") and not line.strip():
            end = position
    return text[:end], text[end:]


MAX_LIVE_WORK = MAX_MARKDOWN_WORK // 20
"""The work above which the growing part of an answer is drawn as plain text: it is parsed again for each delta."""
REFRESHES_PER_SECOND = 12
MAX_LIVE_CHARS = 4_000
"""The length of the end of a growing part that is drawn as plain text."""


def to_renderable(text: str, max_work: int = MAX_MARKDOWN_WORK) -> "Markdown | Text":
    """Return a text for a console: as Markdown, or as plain text if parsing it takes too much work."""
    from rich.markdown import Markdown
    from rich.text import Text

    if estimate_markdown_work(text) <= max_work:
        return Markdown(text)
    if max_work < MAX_MARKDOWN_WORK:
        return Text(text[-MAX_LIVE_CHARS:])
    return Text(text)


class MarkdownOutput(TextOutput):
    """Draws answers as Markdown, and a line that disappears while there is no text yet."""

    def __init__(self, console: "Console | None" = None, *, details: bool = False) -> None:
        from rich.console import Console

        super().__init__(details=details)
        self._console = console or Console(highlight=False)
        self._rest = ""
        self._live: Live | None = None

    def show_event(self, event: Event) -> None:
        """Draw text, and while there is none what the model or a tool is doing."""
        super().show_event(event)
        if isinstance(event, ReasoningDelta):
            self._draw(f"*{self.notes.reasoning}*")
        elif isinstance(event, ToolStarted):
            self.stop()
            self._draw(f"*{sanitize_text(event.call.name)} …*")

    def show_wait(self, seconds: float) -> None:
        """Draw how long the server has been loading its model."""
        self._draw(f"*{LOADING_TEXT}, {seconds:.0f} s*")

    def write_text(self, delta: str) -> None:
        """Draw a piece of the answer."""
        done, self._rest = split_settled(self._rest + sanitize_text(delta))
        if estimate_markdown_work(self._rest) > MAX_MARKDOWN_WORK:
            done += self._rest
            self._rest = ""
        if done.strip():
            self._erase()
            self._console.print(to_renderable(done))
        self._draw(self._rest)

    def stop(self) -> None:
        """Print the rest of the answer."""
        self._erase()
        if self._rest.strip():
            self._console.print(to_renderable(self._rest))
        self._rest = ""

    def _draw(self, text: str) -> None:
        fresh = self._live is None
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                console=self._console,
                vertical_overflow="ellipsis",
                transient=True,
                refresh_per_second=REFRESHES_PER_SECOND,
            )
            self._live.start()
        self._live.update(to_renderable(text, MAX_LIVE_WORK), refresh=fresh)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
