"""The conversation behind ``kedge chat``: lines in, answers out, commands in between.

There is one way to talk, whether it is kept or not: a ``Conversation``, in the user's store or in memory.
So nothing is lost by a failure, a Ctrl-C, an ``/undo`` or an ``/edit``: what was said stays in the tree.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kedge.cli import chat_tools
from kedge.cli.lines import read_lines
from kedge.cli.stored import IN_MEMORY, MODEL, kept_model, look_for, opened
from kedge.cli.telling import Teller, as_object, status_line, teller_for
from kedge.cli.tool_paths import load_tool
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


@dataclass(frozen=True, slots=True)
class Terms:
    """How to talk; ``chosen`` tells that the model was named for this very talk."""

    model: str
    chosen: bool = False
    name: str = ""
    store: str = ""
    system: str = ""
    tools: tuple[str, ...] = ()
    mode: str = ""
    trace: bool = False
    as_json: bool = False


INTERRUPTED = (
    "interrupted: the conversation is as it was before your message; /resume asks it again"
)


class Quit(Exception):
    """The user wants to leave."""


def talk(terms: Terms) -> None:
    """Talk until the lines end."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            session = runner.run(_begin(terms, stack))
            if sys.stdin.isatty() and not terms.as_json:
                click.echo(session.greeting())
            with suppress(Quit):
                for line in read_lines(echo=not terms.as_json, words=tuple(COMMANDS)):
                    session.take(line, runner)
            if session.failed and not sys.stdin.isatty():
                raise click.exceptions.Exit(1)
        finally:
            runner.run(stack.aclose())


async def _begin(terms: Terms, stack: AsyncExitStack) -> "Session":
    address = terms.store if terms.name else IN_MEMORY
    store = await stack.enter_async_context(opened(address, make=True))
    row = await look_for(store, terms.name) if terms.name else None
    kept = row.data.get(MODEL) if row else None
    model = kept if isinstance(kept, str) and kept and not terms.chosen else terms.model
    functions = [load_tool(path) for path in terms.tools] or [*chat_tools.ALL]
    settings: dict[str, Any] = {"tools": functions, "middleware": _layers(terms)}
    if row is None:
        data = kept_model(model)
        talking = await Conversation.create(store, model, title=terms.name, data=data, **settings)
    else:
        talking = await Conversation.open(store, row.id, model, **settings)
    session = Session(store, talking, model, settings, terms)
    stack.push_async_callback(session.aclose)
    return session


def _layers(terms: Terms) -> Sequence[Middleware]:
    layers: list[Middleware] = [tracing(agent=terms.name)] if terms.trace else []
    return [*layers, *([system_prompt(terms.system)] if terms.system else [])]


class Session:
    """One talk: the conversation, and what is shown of it."""

    def __init__(
        self,
        store: Store,
        conversation: Conversation,
        model: str,
        settings: dict[str, Any],
        terms: Terms,
    ) -> None:
        self.store = store
        self.conversation = conversation
        self.model = model
        self.settings = settings
        self.terms = terms
        self.options: dict[str, Any] = {"mode": terms.mode} if terms.mode else {}
        self.teller: Teller = teller_for(as_json=terms.as_json)
        self.failed = False

    def greeting(self) -> str:
        """What a person reads first."""
        where = f", {len(self.conversation.turn)} blocks so far" if self.conversation.turn else ""
        return f"Talking with {mask_url(self.model)}{where}. /help tells more, Ctrl-D ends."

    def take(self, line: str, runner: asyncio.Runner) -> None:
        """Take one line of the user's; whatever goes wrong, the next one can be taken."""
        try:
            if line.startswith("/"):
                runner.run(self._command(line))
            else:
                runner.run(self._answer(line))
        except KeyboardInterrupt:
            self.teller.stop()
            self.teller.interrupted(INTERRUPTED)
        except KedgeError as error:
            self.failed |= not line.startswith("/")
            self.teller.stop()
            self.teller.failed(error)
            if isinstance(error, HeadConflict):
                runner.run(self._catch_up())

    async def aclose(self) -> None:
        """Let go of the engine."""
        await self.conversation.aclose()

    async def _catch_up(self) -> None:
        await self.conversation.refresh()

    async def _answer(self, line: str) -> None:
        plans: list[RequestPlan] = []
        async with self.conversation.stream(line, **self.options) as stream:
            async for event in stream:
                if isinstance(event, RequestPlanned):
                    plans.append(event.plan)
                self.teller.tell(event)
        reply = stream.reply
        self.teller.stop()
        self.teller.ended(status_line(plans), as_object(reply, plans))

    async def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        found = COMMANDS.get(name)
        if found is None:
            self.teller.answer(name, f"no command {name}; /help lists those there are")
            return
        told = await found.run(self, rest.strip())
        if told:
            self.teller.answer(name, told)

    async def plan(self, said: str) -> str:
        """What the next request would send."""
        return self.conversation.plan(*([said] if said else []), **self.options).explain()

    async def show(self, _: str) -> str:
        """The conversation, a line a block."""
        return str(self.conversation.turn)

    async def tree(self, _: str) -> str:
        """The tree, as ``kedge tree`` draws it."""
        from kedge.cli.tree import lines
        from kedge.cli.trees import load_tree

        tree = await load_tree(self.store, self.conversation.row)
        return "\n".join(lines(tree, self.store.clock()))

    async def undo(self, _: str) -> str:
        """Back to before the last question."""
        await self.conversation.undo()
        return f"back at node {self.conversation.head}, {len(self.conversation.turn)} blocks"

    async def edit(self, said: str) -> str:
        """Ask the last question anew, in other words; the old one stays in the tree."""
        if not said:
            return "what instead? /edit and the new words for your last message"
        await self.conversation.undo()
        await self._answer(said)
        return ""

    async def resume(self, _: str) -> str:
        """Get the answer to the message that got none, by a failure or a Ctrl-C."""
        here = self.conversation.head
        left = [node.id for node in await self.conversation.pending() if node.parent == here]
        if not left:
            return "no message waits here for its answer"
        reply = await self.conversation.resume(left[-1], **self.options)
        plans = [reply.plan] if reply.plan else []
        self.teller.tell(TextDelta(reply.text))
        self.teller.stop()
        self.teller.ended(status_line(plans), as_object(reply, plans))
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
        old = self.conversation
        self.conversation = await Conversation.open(self.store, old.id, model, **self.settings)
        await old.aclose()
        self.model = model
        if self.terms.name:
            data = {**self.conversation.row.data, **kept_model(model)}
            await self.store.update(self.conversation.id, data=data)
        return f"talking with {mask_url(model)} from here on"

    async def help(self, _: str) -> str:
        """What there is."""
        return "\n".join(f"{each.usage:<15} {each.help}" for each in COMMANDS.values() if each.help)

    async def quit(self, _: str) -> str:
        """Leave."""
        raise Quit


@dataclass(frozen=True, slots=True)
class Slash:
    """A command inside the chat."""

    usage: str
    help: str
    run: Callable[[Session, str], Any]


COMMANDS: dict[str, Slash] = {
    "/plan": Slash("/plan [TEXT]", "what the next request would send, and why", Session.plan),
    "/show": Slash("/show", "the conversation, a line a block", Session.show),
    "/tree": Slash(
        "/tree", "everything that was said, undone and forked, as a graph", Session.tree
    ),
    "/undo": Slash("/undo", "back to before your last message", Session.undo),
    "/edit": Slash("/edit TEXT", "say your last message in other words", Session.edit),
    "/resume": Slash("/resume", "answer your last message, if it got no answer", Session.resume),
    "/fork": Slash("/fork [TITLE]", "go on apart from here", Session.fork),
    "/model": Slash(
        "/model [MODEL]", "with whom you talk, or with whom from here on", Session.change_model
    ),
    "/help": Slash("/help", "this", Session.help),
    "/quit": Slash("/quit", "leave (so does Ctrl-D)", Session.quit),
    "/exit": Slash("/exit", "", Session.quit),
}
"""The commands inside the chat."""
