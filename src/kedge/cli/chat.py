"""``kedge chat``: a conversation in the terminal that shows what was sent, and why.

Lines from a terminal or from a pipe; answers stream as they come. After each turn one line tells the
mode, the anchor, and how much was sent of what a full send would have taken. Ctrl-C during an answer
takes back the message; the conversation stays as it was before it.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

import click

from kedge.cli import chat_tools
from kedge.cli.frame import command as kedge_command
from kedge.cli.frame import setting
from kedge.cli.tool_paths import load_tool
from kedge.engines import Engine, Stream
from kedge.errors import KedgeError
from kedge.events import Event, TextDelta
from kedge.events.run import FellBack, Healed, ServerForgot, ToolFinished
from kedge.middleware import repair, system_prompt, tools, with_middleware
from kedge.middleware import trace as tracing
from kedge.planning import RequestPlan
from kedge.planning.explain import size
from kedge.providers import connect
from kedge.turns import AssistantBlock, Turn, user

HELP = """\
/plan   what the next request would send, and why
/show   the conversation, a line a block
/help   this
/quit   leave (so does Ctrl-D)"""


@kedge_command("chat", short_help="Talk with a model; see what was sent, and why.")
@setting("model")
@setting("system", "system_text")
@click.option(
    "--tool", "tool_paths", multiple=True, metavar="MODULE:FUNCTION", help="Offer a tool."
)
@setting("mode")
@setting("trace")
def command(
    model: str,
    system_text: str,
    tool_paths: tuple[str, ...],
    mode: str,
    trace: bool,
    as_json: bool,
) -> None:
    """Talk with a model. Type /help inside for what else there is."""
    engine = connect(model, **({"mode": mode} if mode else {}))
    functions = [load_tool(path) for path in tool_paths] or [*chat_tools.ALL]
    layers = [repair(), tools(*functions)]
    if system_text:
        layers.insert(0, system_prompt(system_text))
    if trace:
        layers.insert(0, tracing())
    talk = _Talk(with_middleware(engine, *layers), as_json)
    with asyncio.Runner() as runner:
        try:
            if not as_json and sys.stdin.isatty():
                click.echo(f"Talking with {model}. /help tells more, Ctrl-D ends.")
            for line in _lines(as_json):
                talk.take(line, runner)
        except _Quit:
            pass
        finally:
            runner.run(engine.aclose())


class _Quit(Exception):
    pass


class _Talk:
    """One conversation: the Turn so far, and what is shown of it."""

    def __init__(self, engine: Engine, as_json: bool) -> None:
        self.engine = engine
        self.turn = Turn()
        self.as_json = as_json

    def take(self, line: str, runner: asyncio.Runner) -> None:
        """Take one line of the user's."""
        if line.startswith("/"):
            self._command(line)
            return
        try:
            self.turn = runner.run(self._answer(line))
        except KeyboardInterrupt:
            click.echo("\n(interrupted: the conversation is as it was before your message)")
        except KedgeError as error:
            if self.as_json:
                click.echo(json.dumps({"error": str(error), "kind": type(error).__name__}))
            else:
                click.echo(f"\n{click.style('error', fg='red')}: {error}", err=True)

    def _command(self, line: str) -> None:
        match line.split(maxsplit=1)[0]:
            case "/quit" | "/exit":
                raise _Quit
            case "/plan":
                click.echo(self.engine.plan(self.turn).explain())
            case "/show":
                click.echo(str(self.turn))
            case "/help":
                click.echo(HELP)
            case other:
                click.echo(f"no command {other}; /help lists those there are")

    async def _answer(self, line: str) -> Turn:
        async with self.engine.stream(self.turn.append(user(line))) as stream:
            async for event in stream:
                if not self.as_json:
                    _show(event)
        if self.as_json:
            click.echo(json.dumps(_report(stream), ensure_ascii=False))
        else:
            click.echo(f"\n{click.style(_status(stream), dim=True)}")
        return stream.turn


def _lines(as_json: bool) -> Iterator[str]:
    """The user's lines, from a terminal or a pipe."""
    interactive = sys.stdin.isatty()
    if interactive:
        _remember_lines()
    while True:
        try:
            line = input("> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            if interactive:
                click.echo()
            return
        if not line.strip():
            continue
        if not interactive and not as_json:
            click.echo(f"> {line}")
        yield line.strip()


def _remember_lines() -> None:
    """Arrow keys and history, where the platform has them."""
    with suppress(ImportError):
        import_module("readline")


def _show(event: Event) -> None:
    match event:
        case TextDelta():
            click.echo(event.delta, nl=False)
        case ToolFinished():
            call, text = event.call, _first_line(event.result.text)
            line = f"[{call.name} {call.arguments} -> {text}]"
            click.echo(click.style(line, dim=True))
        case Healed() | FellBack():
            words = "healed" if isinstance(event, Healed) else "fell back"
            click.echo(click.style(f"[{words}: {event.reason}]", fg="yellow"))
        case ServerForgot():
            click.echo(click.style("[the server forgot the conversation]", fg="yellow"))
        case _:
            pass


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 60 else line[:59] + "…"


def _status(stream: Stream) -> str:
    """One line: mode, anchor, blocks and bytes sent against a full send."""
    plans = stream.plans
    last = plans[-1]
    anchor = f"on {_short(last.previous_response_id)}" if last.anchor else "no anchor"
    sent, full = _sum(plans, "delta_blocks"), _sum(plans, "full_blocks")
    sent_bytes, full_bytes = _sum(plans, "delta_bytes"), _sum(plans, "full_bytes")
    requests = f", {len(plans)} requests" if len(plans) > 1 else ""
    saved = f"sent {sent} of {full} blocks, {size(sent_bytes)} of {size(full_bytes)}"
    return f"[{last.mode}, {anchor}, {saved}{requests}]"


def _sum(plans: list[RequestPlan], name: str) -> int:
    return sum(cast("int", getattr(plan, name)) for plan in plans)


def _short(response_id: str) -> str:
    return response_id if len(response_id) <= 16 else f"{response_id[:13]}…"


def _report(stream: Stream) -> dict[str, Any]:
    answer = stream.turn.blocks[-1]
    usage = stream.usage
    return {
        "text": answer.text if isinstance(answer, AssistantBlock) else "",
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
            for plan in stream.plans
        ],
        "usage": {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
    }
