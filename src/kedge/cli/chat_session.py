"""The session behind ``kedge chat``: input lines, answers and slash commands.

Every chat is a ``Conversation``, in the user's store or in memory. So an error, a Ctrl-C, an ``/undo`` or an
``/edit`` loses nothing: earlier messages remain in the tree. On a terminal a chat is stored; from a pipe
only if it has a name.
"""

import asyncio
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import click

from kedge._internal.display import pluralize, sanitize_text, shorten_id
from kedge.cli.base import echo, echo_note, is_json, wrap_text
from kedge.cli.chat import attach_file, read_messages
from kedge.cli.chat_output import ChatOutput, Records, create_output
from kedge.cli.chat_tools import ask_approval, create_default_tools, load_tool, open_mcp_servers
from kedge.cli.commands import INTERRUPTED_EXIT_CODE
from kedge.cli.store_options import (
    IN_MEMORY,
    lookup_conversation,
    model_data,
    model_references,
    remember,
    resolve_model,
    use_store,
)
from kedge.config import mask_url
from kedge.conversation import Conversation, ConversationStream
from kedge.engines import OutputSchema, to_output_schema
from kedge.engines.loading import loading_listener
from kedge.errors import HeadConflict, InvalidTurn, KedgeError, StoreError
from kedge.middleware import trace as tracing
from kedge.providers.registry import list_configured_models
from kedge.store import Store
from kedge.turns import Part, UserBlock, user


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat."""

    model: str | None
    """The model that ``--model`` names."""
    message: str = ""
    """The only message of the chat; if it is empty, messages are read from the input."""
    attachments: tuple[str, ...] = ()
    """The files of the first message."""
    name: str = ""
    ttl: float | None = None
    system: str = ""
    tools: tuple[str, ...] = ()
    mcp_servers: tuple[str, ...] = ()
    schema_file: str | None = None
    approve: bool = False
    mode: str = ""
    trace: bool = False
    details: bool = False
    """Whether each event of a run is printed as a line."""
    save: bool = True

    @property
    def is_typed(self) -> bool:
        """Whether a person types the messages on a terminal."""
        return sys.stdin.isatty() and not is_json() and not self.message

    @property
    def is_saved(self) -> bool:
        """Whether the conversation is stored: if it has a name, or if its messages are typed."""
        return bool(self.name) or (self.save and self.is_typed)


INTERRUPTED_MESSAGE = (
    "interrupted; the partial answer is stored beside the conversation, which is as it was before "
    "your message"
)


NO_EXPORTER_MESSAGE = (
    "--trace has no effect: no OpenTelemetry SDK is set up in this process. Start the command with "
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
            if options.is_typed:
                echo(wrap_text(session.format_greeting()))
            with suppress(Quit):
                for line in session.read_lines(runner):
                    is_command = line.startswith("/") and not options.message
                    session.handle_line(line, runner, is_command=is_command)
            if options.is_typed and session.is_saved and len(session.conversation.turn):
                echo(wrap_text(session.format_farewell()))
            if session.failed and (options.message or not sys.stdin.isatty()):
                raise click.exceptions.Exit(1)
        finally:
            runner.run(stack.aclose())


async def _open_session(options: ChatOptions, stack: AsyncExitStack) -> "ChatSession":
    attached = [_load_attachment(source) for source in options.attachments]
    store, is_saved = await _open_store(options, stack)
    row = await lookup_conversation(store, options.name)
    model = await resolve_model(store, row, options.model)
    if options.trace and not _has_exporter():
        echo_note(NO_EXPORTER_MESSAGE)
    functions = [load_tool(path) for path in options.tools]
    boxes = await stack.enter_async_context(open_mcp_servers(options.mcp_servers))
    settings: dict[str, Any] = {
        "tools": [*functions, *boxes] or create_default_tools(),
        "system": options.system,
    }
    if options.approve:
        settings["approve"] = ask_approval
    if options.trace:
        settings["middleware"] = [tracing(agent=options.name)]
    is_new = row is None
    if row is None and options.name:
        row, is_new = await store.create_titled(options.name, data=model_data(model))
    row = row or await store.create(data=model_data(model))
    try:
        if options.ttl is not None:
            await store.update(row.id, ttl=options.ttl)
        conversation = await Conversation.open(model, store=store, id=row.id, **settings)
    except BaseException:
        if is_new:
            await store.delete(row)
        raise
    session = ChatSession(
        store, conversation, model, settings, options, attached, is_saved, is_new, stack
    )
    stack.push_async_callback(session.aclose)
    return session


async def _open_store(options: ChatOptions, stack: AsyncExitStack) -> tuple[Store, bool]:
    """Open the user's store or one in memory; return it and whether the conversation is stored."""
    if options.is_saved:
        try:
            opened = use_store(make=True, connects_models=True)
            return await stack.enter_async_context(opened), True
        except (OSError, StoreError) as error:
            if options.name:
                raise
            echo_note(f"this chat is not saved: {error}")
    opened = use_store(IN_MEMORY, make=True, connects_models=True)
    return await stack.enter_async_context(opened), False


def load_schema_file(file: str) -> OutputSchema[Any]:
    """Return the JSON schema in a file.

    Raises:
        BadParameter: The file is not a JSON schema.
    """
    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(schema, dict):
            return to_output_schema(cast("dict[str, Any]", schema), Path(file).stem)
    except (ValueError, RecursionError) as error:
        problem = f"{file} is not a JSON schema: {error}"
        raise click.BadParameter(problem, param_hint="--schema") from error
    raise click.BadParameter(f"{file} must contain a JSON object", param_hint="--schema")


def _load_attachment(source: str) -> Part:
    try:
        return attach_file(source)
    except InvalidTurn as error:
        raise click.BadParameter(str(error), param_hint="--attach") from error


def _has_exporter() -> bool:
    """Return whether spans are exported; the middleware reports a missing extra ``otel``."""
    try:
        trace = import_module("opentelemetry.trace")
    except ImportError:
        return True
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class SlashCommand(NamedTuple):
    """A slash command."""

    usage: str
    help: str
    run: "Callable[[ChatSession, str], Awaitable[str]]"


SLASH_COMMANDS: dict[str, SlashCommand] = {}
"""The commands of a chat, by name."""
F = TypeVar("F", bound=Callable[..., Any])


def slash_command(usage: str) -> Callable[[F], F]:
    """Return a decorator for a slash command, whose docstring is its line of help."""

    def add(method: F) -> F:
        line = (method.__doc__ or "").rstrip(".")
        name, _, _ = usage.partition(" ")
        SLASH_COMMANDS[name] = SlashCommand(usage, f"{line[:1].lower()}{line[1:]}", method)
        return method

    return add


@dataclass
class ChatSession:
    """One chat: the conversation and its output."""

    store: Store
    conversation: Conversation
    model: str
    settings: dict[str, Any]
    chat_options: ChatOptions
    attached: list[Part]
    """The attachments of the next message."""
    is_saved: bool
    is_new: bool
    stack: AsyncExitStack
    failed: bool = False

    def __post_init__(self) -> None:
        schema_file = self.chat_options.schema_file
        self.send_options: dict[str, Any] = {}
        if self.chat_options.mode:
            self.send_options["mode"] = self.chat_options.mode
        if schema_file:
            self.send_options["output"] = load_schema_file(schema_file)
        self.output: ChatOutput = create_output(
            as_json=is_json(), is_typed=bool(schema_file), details=self.chat_options.details
        )
        self.sent: Records = ()
        """The requests of the last run that was answered."""

    def format_greeting(self) -> str:
        """Return the first lines on a terminal."""
        model = f"Model: {mask_url(self.model)}"
        count = len(self.conversation.turn)
        if count:
            model += f", {pluralize(count, 'block')} so far"
        saved = "Not saved; /save NAME saves it."
        if self.is_saved:
            saved = f"Saved as {self._short_name()}; /save NAME renames it."
        lines = [
            f"{model}. {saved}",
            "/help lists commands, Alt+Enter starts a new line, Ctrl-D ends the chat.",
        ]
        if self.model.partition(":")[0] == "practice":
            configured = ", ".join(list_configured_models()) or "no key of a provider"
            models = "kedge chat --model openai:gpt-5.1, a local one: --model ollama:llama3.2"
            lines[1:1] = [
                'The practice model is a toy for trying Kedge; "help" lists what it understands.',
                f"A real model: {models}. Configured here: {configured}.",
            ]
        return "\n".join(lines)

    def format_farewell(self) -> str:
        """Return the last line on a terminal."""
        return f"Saved. Continue with: kedge chat -c {shlex.quote(self._short_name())}"

    def _short_name(self) -> str:
        return sanitize_text(self.conversation.title) or shorten_id(self.conversation.id)

    def read_lines(self, runner: asyncio.Runner) -> Iterable[str]:
        """Return the message of the options, or read lines until the input ends."""
        if self.chat_options.message:
            return [self.chat_options.message]
        is_transcript = not (is_json() or self.chat_options.schema_file)
        return read_messages(
            runner,
            show_lines=is_transcript,
            completions=tuple(SLASH_COMMANDS),
            remember=self.is_saved,
        )

    def handle_line(self, line: str, runner: asyncio.Runner, *, is_command: bool) -> None:
        """Handle one input line; errors are shown and do not end the chat."""
        handle = self._run_command if is_command else self._send
        try:
            runner.run(handle(line))
        except KeyboardInterrupt:
            self.output.stop()
            if self.chat_options.message:
                note = INTERRUPTED_MESSAGE if self.is_saved else "interrupted"
                self.output.show_interrupt(note)
                raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None
            self.output.show_interrupt(f"{INTERRUPTED_MESSAGE}. /resume asks again")
        except KedgeError as error:
            self.failed |= not is_command
            self.output.stop()
            self.output.show_error(error)
            if isinstance(error, HeadConflict):
                runner.run(self.conversation.refresh())

    async def aclose(self) -> None:
        """Close the engine; a conversation in which nothing was sent is not stored."""
        if self.is_saved and self.is_new and len(await self.conversation.tree()) == 1:
            await self.conversation.delete()
        await self.conversation.aclose()

    async def _send(self, text: str) -> None:
        message = user(text)
        if self.attached:
            message = user([text, *self.attached])
            self.attached = []
        await self._show_turn(self.conversation.stream(message, **self.send_options))

    async def _show_turn(self, turn: ConversationStream[Any]) -> None:
        self.output.start()
        self.sent = ()
        listener = loading_listener.set(self.output.show_wait)
        try:
            async with turn as stream:
                async for event in stream:
                    self.output.show_event(event)
        finally:
            loading_listener.reset(listener)
        self.output.stop()
        reply = stream.reply
        if not reply.stored:
            self.sent = reply.requests
        self.output.show_end(reply, self.sent)

    async def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = SLASH_COMMANDS.get(name)
        if command is None:
            self.output.show_output(name, f"unknown command {name}; /help lists the commands")
            return
        text = await command.run(self, rest.strip())
        if text:
            self.output.show_output(name, text)

    @slash_command("/plan [TEXT]")
    async def plan(self, text: str) -> str:
        """Show what the next request would send, and why."""
        messages: list[UserBlock] = []
        if text:
            messages.append(user([text, *self.attached]))
        options: dict[str, Any] = {"streaming": True, **self.send_options}
        plan = await self.conversation.probe_and_plan(*messages, **options)
        return plan.explain()

    @slash_command("/why")
    async def why(self, _: str) -> str:
        """Show what the last message sent, and why, with its tool calls."""
        return self.output.notes.explain(self.sent)

    @slash_command("/show")
    async def show(self, _: str) -> str:
        """Show the conversation, one line per block."""
        return str(self.conversation.turn)

    @slash_command("/tree")
    async def tree(self, _: str) -> str:
        """Show the tree, with undone branches and forks."""
        from kedge.cli.show import load_tree, render_tree

        tree = await load_tree(self.store, self.conversation.row)
        return "\n".join(render_tree(tree, self.store.clock()))

    @slash_command("/undo")
    async def undo(self, _: str) -> str:
        """Go back to before your last message."""
        await self.conversation.undo()
        return self._format_position("back at")

    @slash_command("/redo")
    async def redo(self, _: str) -> str:
        """Go forward again to what was undone."""
        await self.conversation.redo()
        return self._format_position("forward at")

    def _format_position(self, verb: str) -> str:
        blocks = pluralize(len(self.conversation.turn), "block")
        return f"{verb} node {self.conversation.head}, {blocks}"

    @slash_command("/save NAME")
    async def save(self, title: str) -> str:
        """Store the conversation under a name."""
        if not title:
            return f"usage: /save NAME; {self.format_greeting().splitlines()[0]}"
        if not self.is_saved:
            await self._move_to_store()
        titled = await lookup_conversation(self.store, title)
        if titled is not None and titled.id != self.conversation.id:
            return f"there is already a conversation {title!r}; choose another name"
        await self.conversation.rename(title)
        self.is_new = False
        return f"saved as {sanitize_text(title)}; continue with: kedge chat -c {shlex.quote(title)}"

    async def _move_to_store(self) -> None:
        """Copy a conversation in memory to the user's store and continue there."""
        lines = await self.conversation.export()
        store = use_store(make=True, connects_models=True)
        self.store = await self.stack.enter_async_context(store)
        (row,) = await self.store.import_(lines)
        await self._reopen(row.id, self.model)
        self.is_saved = True
        self.is_new = False

    async def _reopen(self, name: str, model: str) -> None:
        """Continue in a conversation of the store with a model."""
        closed = self.conversation
        self.conversation = await Conversation.open(
            model, store=self.store, id=name, **self.settings
        )
        self.model = model
        await closed.aclose()

    @slash_command("/editor [TEXT]")
    async def edit_message(self, text: str) -> str:
        """Write a message in $EDITOR."""
        message = (click.edit(text) or "").strip()
        if not message:
            return "nothing was sent: the text in the editor is empty or was not saved"
        await self._send(message)
        return ""

    @slash_command("/edit TEXT")
    async def edit(self, text: str) -> str:
        """Replace your last message and ask again."""
        if not text:
            return "usage: /edit TEXT, with the new text of your last message"
        messages = [b for b in self.conversation.turn.blocks if isinstance(b, UserBlock)]
        await self.conversation.undo()
        if messages:
            _, *attachments = messages[-1].parts
            self.attached = [*attachments, *self.attached]
        await self._send(text)
        return ""

    @slash_command("/attach FILE")
    async def attach(self, source: str) -> str:
        """Attach a file or a URL to your next message."""
        if source in ("", "-"):  # the standard input has the messages
            return "usage: /attach FILE, or /attach URL"
        self.attached.append(attach_file(source))
        return f"{pluralize(len(self.attached), 'file')} attached to your next message"

    @slash_command("/resume")
    async def resume(self, _: str) -> str:
        """Answer your last message if it has no answer."""
        head = self.conversation.head
        pending = [node.id for node in await self.conversation.pending() if node.parent == head]
        if not pending:
            return "there is no unanswered message here"
        await self._show_turn(self.conversation.stream_resume(pending[-1], **self.send_options))
        return ""

    @slash_command("/fork [TITLE]")
    async def fork(self, title: str) -> str:
        """Continue in a new conversation from here."""
        data = self.conversation.row.data
        forked = await self.conversation.fork(title=title)
        if data:
            await self.store.update(forked.id, data=data)
        self.conversation = forked
        return f"now in the fork {forked.id}"

    @slash_command("/model [MODEL]")
    async def change_model(self, model: str) -> str:
        """Show the current model, or switch to another."""
        if not model:
            return f"current model: {mask_url(self.model)}"
        remember(model_references(model))
        await self._reopen(self.conversation.id, model)
        await self.conversation.update_with(lambda row: {"data": {**row.data, **model_data(model)}})
        return f"current model: {mask_url(model)}"

    @slash_command("/help")
    async def help(self, _: str) -> str:
        """List the commands."""
        return "\n".join(
            f"{command.usage:<15} {command.help}"
            for command in SLASH_COMMANDS.values()
            if command.help
        )

    @slash_command("/quit")
    async def quit(self, _: str) -> str:
        """End the chat (also Ctrl-D)."""
        raise Quit


SLASH_COMMANDS["/exit"] = SLASH_COMMANDS["/quit"]._replace(help="")
