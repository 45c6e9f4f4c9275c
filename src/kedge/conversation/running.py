"""One turn of a conversation: asked, saved, sent, answered, saved, and only then told.

What goes out is durable before it goes: the question as an ``asked`` node, later the results of
tools. Every finished answer is a node before anything follows from it. The head moves once, at the
end, if it is still where it was; whatever happens before that, everything reached so far is in the
tree, and ``resume`` goes on from there.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from kedge.compaction import TurnCompacted
from kedge.conversation.recall import TurnSending
from kedge.conversation.reply import Reply
from kedge.conversation.saving import Place, is_same
from kedge.conversation.taking import Watch
from kedge.engines import Engine, Stream, innermost
from kedge.errors import EngineError, KedgeError, StoreError
from kedge.events import Event
from kedge.events.run import AnswerFinished, Healed, TurnFinished
from kedge.observe import bound
from kedge.store import Claim
from kedge.turns import Turn

if TYPE_CHECKING:
    from kedge.conversation.conversation import Conversation
    from kedge.store.rows import Kind

LEASE = 30.0
"""Seconds for which a claim holds unless it is renewed; a third of it is the time between renewals."""
POLL = (0.02, 0.5)
"""Seconds between looks at a turn that somebody else is running: at first, and at most."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be run: a Turn from a place in the tree."""

    place: Place
    turn: Turn
    head: int
    """Where the head is expected to be when the answer comes."""
    key: str = ""
    resumed: bool = False
    """Whether the question is in the tree already."""


class ConversationStream(AbstractAsyncContextManager["ConversationStream"]):
    """The events of one turn, and at its end the reply. It is in the store by then."""

    def __init__(self, events: AsyncGenerator[Event | Reply]) -> None:
        self._events = events
        self._reply: Reply | None = None

    @property
    def reply(self) -> Reply:
        """The reply; only once the stream has ended."""
        if self._reply is None:
            raise KedgeError(
                "the stream has not ended: iterate over it to the end before asking for its reply; "
                "what was reached so far is in the store, see Conversation.resume"
            )
        return self._reply

    async def finish(self) -> Reply:
        """Watch to the end, and return the reply."""
        async for _ in self:
            pass
        return self.reply

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._events:
            if isinstance(event, Reply):
                self._reply = event
            else:
                yield event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._events.aclose()


class Run:
    """One run of the engine, saved as it goes."""

    def __init__(self, conversation: "Conversation", task: Task, options: dict[str, Any]) -> None:
        self.task = task
        self.place = task.place
        self.store = task.place.store
        self.engine: Engine = conversation.engine
        self.options = options
        self.price = conversation.price
        inner = innermost(self.engine)
        model = options.get("model") or getattr(inner, "model", "")
        self.watch = Watch(inner.name, model, self.store.clock)
        if self.store.keep_bodies:
            self.options = {**options, "tap": self.watch.tap}
        self.finished: AnswerFinished | None = None
        self.compacted = False
        self.asked = task.resumed

    async def events(self) -> AsyncGenerator[Event | Reply]:
        """The engine's events, and the reply."""
        with bound(conversation_id=self.place.row.id):
            stream = self.engine.stream(self.task.turn, **self.options)
        try:
            async with stream:
                async for event in stream:
                    if isinstance(event, TurnSending):
                        await self._sending(event.turn)
                        continue
                    if isinstance(event, TurnFinished):
                        reply = await self._end(stream)
                        yield event
                        yield reply
                        return
                    await self._note(event)
                    yield event
        except StoreError:
            raise
        except EngineError as error:
            await self._failed(error)
            raise
        finally:
            if self.finished:  # left early, or failed elsewhere: the answer that was given is kept
                with anyio.CancelScope(shield=True):
                    await self._flush()

    async def _note(self, event: Event) -> None:
        self.watch.note(event)
        match event:
            case AnswerFinished():
                self.finished = event
            case Healed(reason, lost) if lost and self.watch.plan and self.watch.plan.anchor:
                await self.store.mark_lost(self.watch.plan.anchor, reason)
            case TurnCompacted():
                self.compacted = True
            case _:
                if self.finished:
                    await self._flush()

    async def _sending(self, turn: Turn) -> None:
        """Make durable what is about to be sent."""
        await self._flush()
        kind: Kind = "results" if self.asked else "asked"
        key = "" if self.asked else self.task.key
        self.asked = True
        if not self.place.holds(turn):
            accounts = self.watch.take_accounts()
            await self.place.save(turn, kind, accounts=accounts, asked_for=key)

    async def _flush(self, head: int | None = None, answers: str = "") -> None:
        """Save the answer that was given last."""
        event, self.finished = self.finished, None
        if event is None:
            return
        row = self.watch.answered(event, self.price)
        accounts = self.watch.take_accounts()
        await self.place.save(
            event.turn, "answered", response=row, accounts=accounts, head=head, answers=answers
        )

    async def _end(self, stream: Stream) -> Reply:
        """Save what is left, and move the head."""
        turn, head, key = stream.turn, self.task.head, self.task.key
        last = self.finished.turn if self.finished else self.place.turn
        simple = self.finished is not None and is_same(last, turn)
        if not simple:
            await self._flush()
        if simple:
            await self._flush(head, key)
        elif self.place.holds(turn):
            if key:
                await self.store.settle(self.place.row, key, self.place.node.id)
            await self.store.move_head(self.place.row, self.place.node, head=head)
        else:
            kind: Kind = "compacted" if self.compacted else "edited"
            await self.place.save(turn, kind, head=head, answers=key)
        return Reply(
            text=stream.text,
            turn=turn,
            node=self.place.node.id,
            conversation=self.place.row.id,
            usage=stream.usage,
            plan=stream.plan,
        )

    async def _failed(self, error: EngineError) -> None:
        """Write down a request that came to nothing, with what came of it nevertheless."""
        await self._flush()
        row = self.watch.failed(error)
        if row is None:
            return
        turn = error.turn or self.place.turn
        place = replace(self.place)  # the failure stands beside; the run goes on from where it was
        await place.save(turn, "failed", response=row, accounts=self.watch.take_accounts())


async def claimed(conversation: "Conversation", key: str, about: bytes, owner: str) -> Claim:
    """The claim on a turn: ours to run, or done by somebody else, for whom we waited."""
    pause, most = POLL
    while True:
        claim = await conversation.store.claim(
            conversation.row, key, about=about, owner=owner, lease=conversation.lease
        )
        if claim.mine or claim.answer:
            return claim
        await anyio.sleep(pause)
        pause = min(most, pause * 1.5)


@asynccontextmanager
async def kept_alive(conversation: "Conversation", key: str, owner: str) -> AsyncGenerator[None]:
    """Renew a claim for as long as the turn runs; let it go if it fails."""
    store, row, lease = conversation.store, conversation.row, conversation.lease

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease / 3)
            with suppress(StoreError):  # the next renewal may succeed, and there is time for it
                await store.renew(row, key, owner=owner, lease=lease)

    renewing = asyncio.create_task(renew())
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await store.renew(row, key, owner=owner, lease=0)
        raise
    finally:
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing
