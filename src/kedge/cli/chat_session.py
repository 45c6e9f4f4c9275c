"""The session behind ``kedge chat``: input lines, answers and slash commands.

Every chat is a ``Conversation``, in the user's store or in memory. So nothing is lost by an error, a Ctrl-C,
an ``/undo`` or an ``/edit``: earlier messages remain in the tree.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from kedge.cli import chat_tools
from kedge.cli.base import wrap_text
from kedge.cli.chat_output import ChatOutput, create_output, format_status, reply_to_json
from kedge.cli.chat_tools import ask_approval, load_tool, open_mcp_servers
from kedge.cli.confirmations import model_references, remember
from kedge.cli.store_options import (
    IN_MEMORY,
    lookup_conversation,
    model_data,
    resolve_model,
    use_store,
)
from kedge.config import mask_url
from kedge.conversation import Conversation
from kedge.engines import Middleware
from kedge.errors import HeadConflict, KedgeError
from kedge.events import TextDelta
from kedge.events.run import RequestPlanned
from kedge.formatting import pluralize
from kedge.middleware import system_prompt
from kedge.middleware import trace as tracing
from kedge.store import Store

if TYPE_CHECKING:
    from kedge.planning import RequestPlan


HISTORY_LENGTH = 1_000


def read_lines(*, echo: bool, completions: tuple[str, ...]) -> Iterator[str]:
    """Yield each non-empty line; lines of a pipe are echoed, so that the output is a transcript."""
    interactive = sys.stdin.isatty()
    readline = _setup_readline(completions) if interactive else None
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
        if readline:
            _save_history(readline)


def _setup_readline(completions: tuple[str, ...]) -> Any:
    """Set up history and completion, where the platform has readline."""
    from kedge.cli.chat import history_file

    try:
        readline: Any = import_module("readline")
    except ImportError:
        return None
    with suppress(OSError):
        readline.read_history_file(history_file())
    readline.set_history_length(HISTORY_LENGTH)
    readline.set_completer(make_completer(completions))
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    return readline


def make_completer(completions: tuple[str, ...]) -> Any:
    """Return a readline completer for these words."""

    def complete(text: str, number: int) -> str | None:
        fitting = [word for word in completions if word.startswith(text)] if text else []
        return fitting[number] if number < len(fitting) else None

    return complete


def _save_history(readline: Any) -> None:
    """Save the input history, readable by its owner only."""
    from kedge.cli.chat import history_file

    path = history_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat; ``is_model_given`` means that ``--model`` was given."""

    model: str
    is_model_given: bool = False
    name: str = ""
    store: str = ""
    system: str = ""
    tools: tuple[str, ...] = ()
    mcp: tuple[str, ...] = ()
    approve: bool = False
    mode: str = ""
    trace: bool = False
    as_json: bool = False


INTERRUPTED_MESSAGE = (
    "interrupted; the conversation is as it was before your message. /resume sends it again"
)


NO_EXPORTER_MESSAGE = (
    "Note: --trace has no effect: no OpenTelemetry SDK is set up in this process. Start the command with "
    "'opentelemetry-instrument' (package opentelemetry-distro) to export spans."
)


class Quit(Exception):
    """Raised by ``/quit``."""


def run_chat(options: ChatOptions) -> None:
    """Run a chat until the input ends."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            session = runner.run(_open_session(options, stack))
            if sys.stdin.isatty() and not options.as_json:
                click.echo(wrap_text(session.format_greeting()))
            with suppress(Quit):
                for line in read_lines(echo=not options.as_json, completions=tuple(SLASH_COMMANDS)):
                    session.handle_line(line, runner)
            if session.failed and not sys.stdin.isatty():
                raise click.exceptions.Exit(1)
        finally:
            runner.run(stack.aclose())


async def _open_session(options: ChatOptions, stack: AsyncExitStack) -> "ChatSession":
    address = options.store if options.name else IN_MEMORY
    store = await stack.enter_async_context(use_store(address, make=True, connects=True))
    row = await lookup_conversation(store, options.name) if options.name else None
    model = resolve_model(row, options.model if options.is_model_given else None)
    if options.trace and not options.as_json and not _has_exporter():
        click.echo(wrap_text(NO_EXPORTER_MESSAGE, err=True), err=True)
    functions = [load_tool(path) for path in options.tools]
    boxes = await open_mcp_servers(options.mcp, stack)
    settings: dict[str, Any] = {
        "tools": [*functions, *boxes] or chat_tools.DEFAULT_TOOLS,
        "approve": ask_approval if options.approve else None,
        "middleware": _build_middleware(options),
    }
    if row is None:
        data = model_data(model)
        conversation = await Conversation.create(
            store, model, title=options.name, data=data, **settings
        )
    else:
        conversation = await Conversation.open(store, row.id, model, **settings)
    session = ChatSession(store, conversation, model, settings, options)
    stack.push_async_callback(session.aclose)
    return session


def _has_exporter() -> bool:
    """Return whether spans go anywhere; without the extra ``otel`` the middleware reports it."""
    try:
        trace = import_module("opentelemetry.trace")
    except ImportError:
        return True
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _build_middleware(options: ChatOptions) -> Sequence[Middleware]:
    layers: list[Middleware] = [tracing(agent=options.name)] if options.trace else []
    return [*layers, *([system_prompt(options.system)] if options.system else [])]


class ChatSession:
    """One chat: the conversation and its output."""

    def __init__(
        self,
        store: Store,
        conversation: Conversation,
        model: str,
        settings: dict[str, Any],
        chat_options: ChatOptions,
    ) -> None:
        self.store = store
        self.conversation = conversation
        self.model = model
        self.settings = settings
        self.chat_options = chat_options
        self.send_options: dict[str, Any] = {"mode": chat_options.mode} if chat_options.mode else {}
        self.output: ChatOutput = create_output(as_json=chat_options.as_json)
        self.failed = False

    def format_greeting(self) -> str:
        """Return the first line on a terminal."""
        count = len(self.conversation.turn)
        blocks = f", {pluralize(count, 'block')} so far" if count else ""
        return f"Model: {mask_url(self.model)}{blocks}. /help lists commands, Ctrl-D ends the chat."

    def handle_line(self, line: str, runner: asyncio.Runner) -> None:
        """Handle one input line; errors are shown and do not end the chat."""
        try:
            if line.startswith("/"):
                runner.run(self._run_command(line))
            else:
                runner.run(self._send(line))
        except KeyboardInterrupt:
            self.output.stop()
            self.output.show_interrupt(INTERRUPTED_MESSAGE)
        except KedgeError as error:
            self.failed |= not line.startswith("/")
            self.output.stop()
            self.output.show_error(error)
            if isinstance(error, HeadConflict):
                runner.run(self._refresh())

    async def aclose(self) -> None:
        """Close the engine."""
        await self.conversation.aclose()

    async def _refresh(self) -> None:
        await self.conversation.refresh()

    async def _send(self, line: str) -> None:
        plans: list[RequestPlan] = []
        async with self.conversation.stream(line, **self.send_options) as stream:
            async for event in stream:
                if isinstance(event, RequestPlanned):
                    plans.append(event.plan)
                self.output.show_event(event)
        reply = stream.reply
        self.output.stop()
        self.output.show_end(format_status(plans), reply_to_json(reply, plans))

    async def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        found = SLASH_COMMANDS.get(name)
        if found is None:
            self.output.show_output(name, f"unknown command {name}; /help lists the commands")
            return
        text = await found.run(self, rest.strip())
        if text:
            self.output.show_output(name, text)

    async def plan(self, text: str) -> str:
        """Return the plan of the next request."""
        return self.conversation.plan(*([text] if text else []), **self.send_options).explain()

    async def show(self, _: str) -> str:
        """Return the conversation, one line per block."""
        return str(self.conversation.turn)

    async def tree(self, _: str) -> str:
        """Return the tree as ``kedge tree`` draws it."""
        from kedge.cli.tree import load_tree, render_tree

        tree = await load_tree(self.store, self.conversation.row)
        return "\n".join(render_tree(tree, self.store.clock()))

    async def undo(self, _: str) -> str:
        """Go back to before the last question."""
        await self.conversation.undo()
        return f"back at node {self.conversation.head}, {pluralize(len(self.conversation.turn), 'block')}"

    async def edit(self, text: str) -> str:
        """Replace the last question and ask again; the old one remains in the tree."""
        if not text:
            return "usage: /edit TEXT, with the new text of your last message"
        await self.conversation.undo()
        await self._send(text)
        return ""

    async def resume(self, _: str) -> str:
        """Request the answer to a message that has none after an error or a Ctrl-C."""
        head = self.conversation.head
        pending = [node.id for node in await self.conversation.pending() if node.parent == head]
        if not pending:
            return "there is no unanswered message here"
        reply = await self.conversation.resume(pending[-1], **self.send_options)
        plans = [reply.plan] if reply.plan else []
        self.output.show_event(TextDelta(reply.text))
        self.output.stop()
        self.output.show_end(format_status(plans), reply_to_json(reply, plans))
        return ""

    async def fork(self, title: str) -> str:
        """Continue in a new conversation from here."""
        data = self.conversation.row.data
        forked = await self.conversation.fork(title=title)
        if data:
            await self.store.update(forked.id, data=data)
        self.conversation = forked
        return f"now in the fork {forked.id}"

    async def change_model(self, model: str) -> str:
        """Return the current model, or switch to another."""
        if not model:
            return f"current model: {mask_url(self.model)}"
        remember(model_references(model))
        old = self.conversation
        self.conversation = await Conversation.open(self.store, old.id, model, **self.settings)
        await old.aclose()
        self.model = model
        if self.chat_options.name:
            data = {**self.conversation.row.data, **model_data(model)}
            await self.store.update(self.conversation.id, data=data)
        return f"current model: {mask_url(model)}"

    async def help(self, _: str) -> str:
        """Return the list of commands."""
        return "\n".join(
            f"{each.usage:<15} {each.help}" for each in SLASH_COMMANDS.values() if each.help
        )

    async def quit(self, _: str) -> str:
        """End the chat."""
        raise Quit


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A slash command."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], Any]


SLASH_COMMANDS: dict[str, SlashCommand] = {
    "/plan": SlashCommand(
        "/plan [TEXT]", "show what the next request would send, and why", ChatSession.plan
    ),
    "/show": SlashCommand("/show", "show the conversation, one line per block", ChatSession.show),
    "/tree": SlashCommand(
        "/tree", "show the tree, with undone and forked branches", ChatSession.tree
    ),
    "/undo": SlashCommand("/undo", "go back to before your last message", ChatSession.undo),
    "/edit": SlashCommand(
        "/edit TEXT", "replace your last message and ask again", ChatSession.edit
    ),
    "/resume": SlashCommand(
        "/resume", "answer your last message if it has no answer", ChatSession.resume
    ),
    "/fork": SlashCommand(
        "/fork [TITLE]", "continue in a new conversation from here", ChatSession.fork
    ),
    "/model": SlashCommand(
        "/model [MODEL]", "show the current model, or switch to another", ChatSession.change_model
    ),
    "/help": SlashCommand("/help", "list the commands", ChatSession.help),
    "/quit": SlashCommand("/quit", "end the chat (also Ctrl-D)", ChatSession.quit),
    "/exit": SlashCommand("/exit", "", ChatSession.quit),
}
"""The commands of a chat, by name."""
