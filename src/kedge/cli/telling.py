"""How a chat tells what happens: as text in a pipe, as Markdown on a terminal, as JSON to scripts."""

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import click

from kedge.cli.hints import hint_for
from kedge.cli.words import printable, short_id
from kedge.conversation import Reply
from kedge.errors import KedgeError
from kedge.events import Event, ReasoningDelta, RefusalDelta, TextDelta
from kedge.events.run import FellBack, Healed, ServerForgot, ToolFinished
from kedge.planning import RequestPlan
from kedge.planning.explain import size

FOLDED = 60


class Teller(Protocol):
    """Tells a turn while it happens, and how it ended."""

    def tell(self, event: Event) -> None:
        """Tell an event."""
        ...

    def stop(self) -> None:
        """Leave the screen as it should stay."""
        ...

    def ended(self, status: str, report: dict[str, Any]) -> None:
        """Tell the end of a turn."""
        ...

    def answer(self, command: str, text: str) -> None:
        """Tell what a command of the chat found."""
        ...

    def failed(self, error: KedgeError) -> None:
        """Tell what went wrong."""
        ...

    def interrupted(self, words: str) -> None:
        """Tell that the user broke off."""
        ...


def teller_for(*, as_json: bool) -> Teller:
    """The teller that fits where the output goes."""
    if as_json:
        return JsonTeller()
    if sys.stdout.isatty():
        from kedge.cli.markdown import MarkdownTeller

        return MarkdownTeller()
    return TextTeller()


class TextTeller:
    """Plain text as it comes; what is not part of the answer is a line in brackets."""

    def __init__(self) -> None:
        self._thought = 0
        self._open = False

    def tell(self, event: Event) -> None:
        """Print the answer; fold reasoning and tool calls."""
        if isinstance(event, ReasoningDelta):
            self._thought += len(event.delta.split())
            return
        if self._thought and isinstance(event, TextDelta | RefusalDelta | ToolFinished):
            self.aside(f"[thought: about {self._thought} words]")
            self._thought = 0
        if isinstance(event, TextDelta | RefusalDelta):
            self.text(event.delta)
        elif line := folded(event):
            self.aside(line, warn=not isinstance(event, ToolFinished))

    def text(self, delta: str) -> None:
        """Print a piece of the answer."""
        click.echo(printable(delta), nl=False)
        self._open = not delta.endswith("\n")

    def aside(self, line: str, *, warn: bool = False) -> None:
        """Print a line that is no part of the answer."""
        self.stop()
        click.echo(click.style(line, fg="yellow") if warn else click.style(line, dim=True))

    def stop(self) -> None:
        """End the line that is being written."""
        if self._open:
            click.echo()
        self._open, self._thought = False, 0

    def ended(self, status: str, report: dict[str, Any]) -> None:
        """Tell what was sent."""
        click.echo(click.style(status, dim=True))

    def answer(self, command: str, text: str) -> None:
        """Print it."""
        click.echo(text)

    def failed(self, error: KedgeError) -> None:
        """One line and a hint, on the standard error."""
        click.echo(f"{click.style('error', fg='red')}: {error}", err=True)
        if hint := hint_for(error):
            click.echo(click.style(f"Hint: {hint}", dim=True), err=True)

    def interrupted(self, words: str) -> None:
        """A line in brackets."""
        click.echo(f"\n({words})")


class JsonTeller:
    """One object a turn, a command or a failure."""

    def tell(self, event: Event) -> None:
        """Nothing: a turn is told when it is whole."""

    def stop(self) -> None:
        """Nothing to end."""

    def ended(self, status: str, report: dict[str, Any]) -> None:
        """The turn."""
        click.echo(json.dumps(report, ensure_ascii=False))

    def answer(self, command: str, text: str) -> None:
        """What a command found."""
        click.echo(json.dumps({"command": command, "output": text}, ensure_ascii=False))

    def failed(self, error: KedgeError) -> None:
        """What went wrong."""
        told = {"error": str(error), "kind": type(error).__name__, "hint": hint_for(error)}
        click.echo(json.dumps(told, ensure_ascii=False))

    def interrupted(self, words: str) -> None:
        """That is an object, too."""
        click.echo(json.dumps({"error": words, "kind": "KeyboardInterrupt", "hint": ""}))


def folded(event: Event) -> str:
    """An event as one line in brackets, if a person should know of it."""
    match event:
        case ToolFinished():
            call = event.call
            text = _first_line(event.result.text)
            return printable(f"[{call.name} {call.arguments} -> {text}]")
        case Healed():
            return f"[healed: {event.reason}]"
        case FellBack():
            return f"[fell back: {event.reason}]"
        case ServerForgot():
            return "[the server forgot the conversation]"
        case _:
            return ""


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= FOLDED else line[: FOLDED - 1] + "…"


def status_line(plans: Sequence[RequestPlan]) -> str:
    """One line: mode, anchor, blocks and bytes sent against a full send."""
    if not plans:
        return "[nothing was sent]"
    last = plans[-1]
    anchor = f"on {short_id(last.previous_response_id, 14)}" if last.anchor else "no anchor"
    sent = sum(plan.delta_blocks for plan in plans)
    full = sum(plan.full_blocks for plan in plans)
    sent_bytes = sum(plan.delta_bytes for plan in plans)
    full_bytes = sum(plan.full_bytes for plan in plans)
    requests = f", {len(plans)} requests" if len(plans) > 1 else ""
    saved = f"sent {sent} of {full} blocks, {size(sent_bytes)} of {size(full_bytes)}"
    return f"[{last.mode}, {anchor}, {saved}{requests}]"


def as_object(reply: Reply, plans: Sequence[RequestPlan]) -> dict[str, Any]:
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
