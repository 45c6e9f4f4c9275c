"""The conversation behind ``kedge chat``: lines in, answers out, commands in between.

There is one way to talk, whether it is kept or not: a ``Conversation``, in the user's store or in memory.
So nothing is lost by a failure, a Ctrl-C, an ``/undo`` or an ``/edit``: what was said stays in the tree.
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
from kedge.cli.chat_output import ChatOutput, create_output, format_status, reply_to_json
from kedge.cli.chat_tools import load_tool
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
from kedge.middleware import system_prompt
from kedge.middleware import trace as tracing
from kedge.store import Store

if TYPE_CHECKING:
    from kedge.planning import RequestPlan


HISTORY_LENGTH = 1_000


def read_lines(*, echo: bool, completions: tuple[str, ...]) -> Iterator[str]:
    """Each line that is not empty; lines of a pipe are echoed, so that a record reads as a talk."""
    interactive = sys.stdin.isatty()
    keep = _setup_readline(completions) if interactive else None
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
            _save_history(keep)


def _setup_readline(completions: tuple[str, ...]) -> Any:
    """Arrow keys, history and completion of commands, where the platform has them."""
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
    """What readline asks for the n-th word that a text may become."""

    def complete(text: str, number: int) -> str | None:
        fitting = [word for word in completions if word.startswith(text)] if text else []
        return fitting[number] if number < len(fitting) else None

    return complete


def _save_history(readline: Any) -> None:
    """Keep the lines for the next time, for their writer's eyes only."""
    from kedge.cli.chat import history_file

    path = history_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to talk; ``chosen`` tells that the model was named for this very talk."""

    model: str
    is_model_given: bool = False
    name: str = ""
    store: str = ""
    system: str = ""
    tools: tuple[str, ...] = ()
    mode: str = ""
    trace: bool = False
    as_json: bool = False


INTERRUPTED_MESSAGE = (
    "interrupted: the conversation is as it was before your message; /resume asks it again"
)


class Quit(Exception):
    """The user wants to leave."""


def run_chat(options: ChatOptions) -> None:
    """Talk until the lines end."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            session = runner.run(_open_session(options, stack))
            if sys.stdin.isatty() and not options.as_json:
                click.echo(session.format_greeting())
            with suppress(Quit):
                for line in read_lines(echo=not options.as_json, completions=tuple(SLASH_COMMANDS)):
                    session.handle_line(line, runner)
            if session.failed and not sys.stdin.isatty():
                raise click.exceptions.Exit(1)
        finally:
            runner.run(stack.aclose())


async def _open_session(options: ChatOptions, stack: AsyncExitStack) -> "ChatSession":
    address = options.store if options.name else IN_MEMORY
    store = await stack.enter_async_context(use_store(address, make=True))
    row = await lookup_conversation(store, options.name) if options.name else None
    model = resolve_model(row, options.model if options.is_model_given else None)
    functions = [load_tool(path) for path in options.tools] or [*chat_tools.DEFAULT_TOOLS]
    settings: dict[str, Any] = {"tools": functions, "middleware": _build_middleware(options)}
    if row is None:
        data = model_data(model)
        talking = await Conversation.create(store, model, title=options.name, data=data, **settings)
    else:
        talking = await Conversation.open(store, row.id, model, **settings)
    session = ChatSession(store, talking, model, settings, options)
    stack.push_async_callback(session.aclose)
    return session


def _build_middleware(options: ChatOptions) -> Sequence[Middleware]:
    layers: list[Middleware] = [tracing(agent=options.name)] if options.trace else []
    return [*layers, *([system_prompt(options.system)] if options.system else [])]


class ChatSession:
    """One talk: the conversation, and what is shown of it."""

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
        """What a person reads first."""
        where = f", {len(self.conversation.turn)} blocks so far" if self.conversation.turn else ""
        return f"Talking with {mask_url(self.model)}{where}. /help tells more, Ctrl-D ends."

    def handle_line(self, line: str, runner: asyncio.Runner) -> None:
        """Take one line of the user's; whatever goes wrong, the next one can be taken."""
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
        """Let go of the engine."""
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
            self.output.show_output(name, f"no command {name}; /help lists those there are")
            return
        told = await found.run(self, rest.strip())
        if told:
            self.output.show_output(name, told)

    async def plan(self, text: str) -> str:
        """What the next request would send."""
        return self.conversation.plan(*([text] if text else []), **self.send_options).explain()

    async def show(self, _: str) -> str:
        """The conversation, a line a block."""
        return str(self.conversation.turn)

    async def tree(self, _: str) -> str:
        """The tree, as ``kedge tree`` draws it."""
        from kedge.cli.tree import load_tree, render_tree

        tree = await load_tree(self.store, self.conversation.row)
        return "\n".join(render_tree(tree, self.store.clock()))

    async def undo(self, _: str) -> str:
        """Back to before the last question."""
        await self.conversation.undo()
        return f"back at node {self.conversation.head}, {len(self.conversation.turn)} blocks"

    async def edit(self, text: str) -> str:
        """Ask the last question anew, in other words; the old one stays in the tree."""
        if not text:
            return "what instead? /edit and the new words for your last message"
        await self.conversation.undo()
        await self._send(text)
        return ""

    async def resume(self, _: str) -> str:
        """Get the answer to the message that got none, by a failure or a Ctrl-C."""
        here = self.conversation.head
        left = [node.id for node in await self.conversation.pending() if node.parent == here]
        if not left:
            return "no message waits here for its answer"
        reply = await self.conversation.resume(left[-1], **self.send_options)
        plans = [reply.plan] if reply.plan else []
        self.output.show_event(TextDelta(reply.text))
        self.output.stop()
        self.output.show_end(format_status(plans), reply_to_json(reply, plans))
        return ""

    async def fork(self, title: str) -> str:
        """Go on apart from here."""
        data = self.conversation.row.data
        forked = await self.conversation.fork(title=title)
        if data:
            await self.store.update(forked.id, data=data)
        self.conversation = forked
        return f"on a fork of its own now: {forked.id}"

    async def change_model(self, model: str) -> str:
        """Say the model, or talk with another one from here on."""
        if not model:
            return f"talking with {mask_url(self.model)}"
        remember(model_references(model))
        old = self.conversation
        self.conversation = await Conversation.open(self.store, old.id, model, **self.settings)
        await old.aclose()
        self.model = model
        if self.chat_options.name:
            data = {**self.conversation.row.data, **model_data(model)}
            await self.store.update(self.conversation.id, data=data)
        return f"talking with {mask_url(model)} from here on"

    async def help(self, _: str) -> str:
        """What there is."""
        return "\n".join(
            f"{each.usage:<15} {each.help}" for each in SLASH_COMMANDS.values() if each.help
        )

    async def quit(self, _: str) -> str:
        """Leave."""
        raise Quit


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command inside the chat."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], Any]


SLASH_COMMANDS: dict[str, SlashCommand] = {
    "/plan": SlashCommand(
        "/plan [TEXT]", "what the next request would send, and why", ChatSession.plan
    ),
    "/show": SlashCommand("/show", "the conversation, a line a block", ChatSession.show),
    "/tree": SlashCommand(
        "/tree", "everything that was said, undone and forked, as a graph", ChatSession.tree
    ),
    "/undo": SlashCommand("/undo", "back to before your last message", ChatSession.undo),
    "/edit": SlashCommand("/edit TEXT", "say your last message in other words", ChatSession.edit),
    "/resume": SlashCommand(
        "/resume", "answer your last message, if it got no answer", ChatSession.resume
    ),
    "/fork": SlashCommand("/fork [TITLE]", "go on apart from here", ChatSession.fork),
    "/model": SlashCommand(
        "/model [MODEL]", "with whom you talk, or with whom from here on", ChatSession.change_model
    ),
    "/help": SlashCommand("/help", "this", ChatSession.help),
    "/quit": SlashCommand("/quit", "leave (so does Ctrl-D)", ChatSession.quit),
    "/exit": SlashCommand("/exit", "", ChatSession.quit),
}
"""The commands inside the chat."""
