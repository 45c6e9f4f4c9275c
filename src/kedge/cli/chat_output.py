"""How a chat tells what happens: as text in a pipe, as Markdown on a terminal, as JSON to scripts."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from kedge.cli.base import find_hint
from kedge.conversation import Reply
from kedge.errors import KedgeError
from kedge.events import Event, ReasoningDelta, RefusalDelta, TextDelta
from kedge.events.run import FellBack, Healed, ServerForgot, ToolFinished
from kedge.formatting import sanitize_text, shorten_id
from kedge.planning import RequestPlan
from kedge.planning.explain import format_size

MAX_RESULT_CHARS = 60


class ChatOutput(Protocol):
    """Tells a turn while it happens, and how it ended."""

    def show_event(self, event: Event) -> None:
        """Tell an event."""
        ...

    def stop(self) -> None:
        """Leave the screen as it should stay."""
        ...

    def show_end(self, status: str, report: dict[str, Any]) -> None:
        """Tell the end of a turn."""
        ...

    def show_output(self, command: str, text: str) -> None:
        """Tell what a command of the chat found."""
        ...

    def show_error(self, error: KedgeError) -> None:
        """Tell what went wrong."""
        ...

    def show_interrupt(self, message: str) -> None:
        """Tell that the user broke off."""
        ...


def create_output(*, as_json: bool) -> ChatOutput:
    """The teller that fits where the output goes."""
    if as_json:
        return JsonOutput()
    if sys.stdout.isatty():
        return MarkdownOutput()
    return TextOutput()


class TextOutput:
    """Plain text as it comes; what is not part of the answer is a line in brackets."""

    def __init__(self) -> None:
        self._reasoning_words = 0
        self._is_line_open = False

    def show_event(self, event: Event) -> None:
        """Print the answer; fold reasoning and tool calls."""
        if isinstance(event, ReasoningDelta):
            self._reasoning_words += len(event.delta.split())
            return
        if self._reasoning_words and isinstance(event, TextDelta | RefusalDelta | ToolFinished):
            self.write_note(f"[thought: about {self._reasoning_words} words]")
            self._reasoning_words = 0
        if isinstance(event, TextDelta | RefusalDelta):
            self.write_text(event.delta)
        elif line := format_event(event):
            self.write_note(line, warn=not isinstance(event, ToolFinished))

    def write_text(self, delta: str) -> None:
        """Print a piece of the answer."""
        click.echo(sanitize_text(delta), nl=False)
        self._is_line_open = not delta.endswith("\n")

    def write_note(self, line: str, *, warn: bool = False) -> None:
        """Print a line that is no part of the answer."""
        self.stop()
        click.echo(click.style(line, fg="yellow") if warn else click.style(line, dim=True))

    def stop(self) -> None:
        """End the line that is being written."""
        if self._is_line_open:
            click.echo()
        self._is_line_open, self._reasoning_words = False, 0

    def show_end(self, status: str, report: dict[str, Any]) -> None:
        """Tell what was sent."""
        click.echo(click.style(status, dim=True))

    def show_output(self, command: str, text: str) -> None:
        """Print it."""
        click.echo(text)

    def show_error(self, error: KedgeError) -> None:
        """One line and a hint, on the standard error."""
        click.echo(f"{click.style('error', fg='red')}: {error}", err=True)
        if hint := find_hint(error):
            click.echo(click.style(f"Hint: {hint}", dim=True), err=True)

    def show_interrupt(self, message: str) -> None:
        """A line in brackets."""
        click.echo(f"\n({message})")


class JsonOutput:
    """One object a turn, a command or a failure."""

    def show_event(self, event: Event) -> None:
        """Nothing: a turn is told when it is whole."""

    def stop(self) -> None:
        """Nothing to end."""

    def show_end(self, status: str, report: dict[str, Any]) -> None:
        """The turn."""
        click.echo(json.dumps(report, ensure_ascii=False))

    def show_output(self, command: str, text: str) -> None:
        """What a command found."""
        click.echo(json.dumps({"command": command, "output": text}, ensure_ascii=False))

    def show_error(self, error: KedgeError) -> None:
        """What went wrong."""
        told = {"error": str(error), "kind": type(error).__name__, "hint": find_hint(error)}
        click.echo(json.dumps(told, ensure_ascii=False))

    def show_interrupt(self, message: str) -> None:
        """That is an object, too."""
        click.echo(json.dumps({"error": message, "kind": "KeyboardInterrupt", "hint": ""}))


def format_event(event: Event) -> str:
    """An event as one line in brackets, if a person should know of it."""
    match event:
        case ToolFinished():
            call = event.call
            text = _shorten_line(event.result.text)
            return sanitize_text(f"[{call.name} {call.arguments} -> {text}]")
        case Healed():
            return f"[healed: {event.reason}]"
        case FellBack():
            return f"[fell back: {event.reason}]"
        case ServerForgot():
            return "[the server forgot the conversation]"
        case _:
            return ""


def _shorten_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= MAX_RESULT_CHARS else line[: MAX_RESULT_CHARS - 1] + "…"


def format_status(plans: Sequence[RequestPlan]) -> str:
    """One line: mode, anchor, blocks and bytes sent against a full send."""
    if not plans:
        return "[nothing was sent]"
    last = plans[-1]
    anchor = f"on {shorten_id(last.previous_response_id)}" if last.anchor else "no anchor"
    sent = sum(plan.delta_blocks for plan in plans)
    full = sum(plan.full_blocks for plan in plans)
    sent_bytes = sum(plan.delta_bytes for plan in plans)
    full_bytes = sum(plan.full_bytes for plan in plans)
    requests = f", {len(plans)} requests" if len(plans) > 1 else ""
    saved = f"sent {sent} of {full} blocks, {format_size(sent_bytes)} of {format_size(full_bytes)}"
    return f"[{last.mode}, {anchor}, {saved}{requests}]"


def reply_to_json(reply: Reply, plans: Sequence[RequestPlan]) -> dict[str, Any]:
    """A turn as JSON."""
    usage = reply.usage
    return {
        "text": reply.text,
        "conversation": reply.conversation,
        "node": reply.node,
        "requests": [
            {
                "mode": plan.mode,
                "anchor": plan.previous_response_id or None,
                "blocks": plan.delta_blocks,
                "full_blocks": plan.full_blocks,
                "bytes": plan.delta_bytes,
                "full_bytes": plan.full_bytes,
                "fallback": plan.fallback,
            }
            for plan in plans
        ],
        "usage": {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
    }


_FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})")


def split_settled(text: str) -> tuple[str, str]:
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


class MarkdownOutput(TextOutput):
    """Draws answers as Markdown; a line tells of thinking while there is nothing else to see."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(highlight=False)
        self._rest = ""
        self._live: Live | None = None

    def show_event(self, event: Event) -> None:
        """Draw the answer; fold the rest."""
        super().show_event(event)
        if isinstance(event, ReasoningDelta):
            self._draw(f"*thinking, about {self._reasoning_words} words*")

    def write_text(self, delta: str) -> None:
        """Take a piece of the answer."""
        done, self._rest = split_settled(self._rest + sanitize_text(delta))
        if done.strip():
            self._erase()
            self._console.print(Markdown(done))
        self._draw(self._rest)

    def stop(self) -> None:
        """Print what still grew, for good."""
        self._erase()
        if self._rest.strip():
            self._console.print(Markdown(self._rest))
        self._rest, self._reasoning_words = "", 0

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
