"""One turn of a conversation: asked, saved, sent, answered, saved, and only then told.

What goes out is durable before it goes: the question as an ``asked`` node, later the results of
tools. Every finished answer is a node before anything follows from it. The head moves once, at the
end, if it is still where it was; whatever happens before that, everything reached so far is in the
tree, and ``resume`` goes on from there.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from kedge.compaction import TurnCompacted
from kedge.conversation.anchor_index import TurnPrepared
from kedge.conversation.checkpoint import Checkpoint, has_same_blocks
from kedge.conversation.recorder import RunRecorder
from kedge.engines import Engine, Stream, unwrap
from kedge.errors import EngineError, KedgeError, StoreError
from kedge.events import Event, Usage
from kedge.events.run import AnswerFinished, Healed, TurnFinished
from kedge.observe import bind_fields
from kedge.planning import RequestPlan
from kedge.store import Claim
from kedge.turns import AssistantBlock, Turn

if TYPE_CHECKING:
    from kedge.conversation.conversation import Conversation
    from kedge.store.records import NodeKind


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one message.

    ``node`` is where it is kept in the tree. ``usage`` adds up all responses of this call, ``plan``
    is the newest request's; ``stored`` tells that nothing was sent, because the answer was there
    already.
    """

    text: str
    turn: Turn
    node: int
    conversation: str
    usage: Usage = field(default_factory=Usage)
    plan: RequestPlan | None = field(default=None, repr=False)
    stored: bool = False

    @property
    def refusal(self) -> str:
        """The words with which the model refused, if it did."""
        last = next((b for b in reversed(self.turn.blocks) if isinstance(b, AssistantBlock)), None)
        return last.refusal if last else ""


DEFAULT_LEASE = 30.0
"""Seconds for which a claim holds unless it is renewed; a third of it is the time between renewals."""
POLL_INTERVALS = (0.02, 0.5)
"""Seconds between looks at a turn that somebody else is running: at first, and at most."""


@dataclass(frozen=True, slots=True)
class TurnTask:
    """What is to be run: a Turn from a place in the tree."""

    checkpoint: Checkpoint
    turn: Turn
    expected_head: int
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


class ConversationRun:
    """One run of the engine, saved as it goes."""

    def __init__(
        self, conversation: "Conversation", task: TurnTask, options: dict[str, Any]
    ) -> None:
        self.task = task
        self.checkpoint = task.checkpoint
        self.store = task.checkpoint.store
        self.engine: Engine = conversation.engine
        self.options = options
        self.price = conversation.price
        inner = unwrap(self.engine)
        model = options.get("model") or getattr(inner, "model", "")
        self.recorder = RunRecorder(inner.name, model, self.store.clock)
        if self.store.keep_bodies:
            self.options = {**options, "tap": self.recorder.record_exchange}
        self.pending_answer: AnswerFinished | None = None
        self.compacted = False
        self.question_saved = task.resumed

    async def events(self) -> AsyncGenerator[Event | Reply]:
        """The engine's events, and the reply."""
        with bind_fields(conversation_id=self.checkpoint.row.id):
            stream = self.engine.stream(self.task.turn, **self.options)
        try:
            async with stream:
                async for event in stream:
                    if isinstance(event, TurnPrepared):
                        await self._save_outgoing(event.turn)
                        continue
                    if isinstance(event, TurnFinished):
                        reply = await self._finish(stream)
                        yield event
                        yield reply
                        return
                    await self._handle_event(event)
                    yield event
        except StoreError:
            raise
        except EngineError as error:
            await self._save_failure(error)
            raise
        finally:
            if (
                self.pending_answer
            ):  # left early, or failed elsewhere: the answer that was given is kept
                with anyio.CancelScope(shield=True):
                    await self._save_answer()

    async def _handle_event(self, event: Event) -> None:
        self.recorder.record_event(event)
        match event:
            case AnswerFinished():
                self.pending_answer = event
            case Healed(reason, lost) if lost and self.recorder.plan and self.recorder.plan.anchor:
                await self.store.mark_lost(self.recorder.plan.anchor, reason)
            case TurnCompacted():
                self.compacted = True
            case _:
                if self.pending_answer:
                    await self._save_answer()

    async def _save_outgoing(self, turn: Turn) -> None:
        """Make durable what is about to be sent."""
        await self._save_answer()
        kind: NodeKind = "results" if self.question_saved else "asked"
        key = "" if self.question_saved else self.task.key
        self.question_saved = True
        if not self.checkpoint.matches(turn):
            accounts = self.recorder.drain_telemetry()
            await self.checkpoint.save(turn, kind, telemetry=accounts, question_key=key)

    async def _save_answer(self, head: int | None = None, answer_key: str = "") -> None:
        """Save the answer that was given last."""
        event, self.pending_answer = self.pending_answer, None
        if event is None:
            return
        row = self.recorder.build_response_row(event, self.price)
        accounts = self.recorder.drain_telemetry()
        await self.checkpoint.save(
            event.turn,
            "answered",
            response=row,
            telemetry=accounts,
            head=head,
            answer_key=answer_key,
        )

    async def _finish(self, stream: Stream) -> Reply:
        """Save what is left, and move the head."""
        turn, head, key = stream.turn, self.task.expected_head, self.task.key
        last = self.pending_answer.turn if self.pending_answer else self.checkpoint.turn
        simple = self.pending_answer is not None and has_same_blocks(last, turn)
        if not simple:
            await self._save_answer()
        if simple:
            await self._save_answer(head, key)
        elif self.checkpoint.matches(turn):
            if key:
                await self.store.settle(self.checkpoint.row, key, self.checkpoint.node.id)
            await self.store.move_head(self.checkpoint.row, self.checkpoint.node, head=head)
        else:
            kind: NodeKind = "compacted" if self.compacted else "edited"
            await self.checkpoint.save(turn, kind, head=head, answer_key=key)
        return Reply(
            text=stream.text,
            turn=turn,
            node=self.checkpoint.node.id,
            conversation=self.checkpoint.row.id,
            usage=stream.usage,
            plan=stream.plan,
        )

    async def _save_failure(self, error: EngineError) -> None:
        """Write down a request that came to nothing, with what came of it nevertheless."""
        await self._save_answer()
        row = self.recorder.build_failure_row(error)
        if row is None:
            return
        turn = error.turn or self.checkpoint.turn
        place = replace(
            self.checkpoint
        )  # the failure stands beside; the run goes on from where it was
        await place.save(turn, "failed", response=row, telemetry=self.recorder.drain_telemetry())


async def acquire_claim(
    conversation: "Conversation", key: str, request_hash: bytes, owner: str
) -> Claim:
    """The claim on a turn: ours to run, or done by somebody else, for whom we waited."""
    pause, most = POLL_INTERVALS
    while True:
        claim = await conversation.store.claim(
            conversation.row, key, about=request_hash, owner=owner, lease=conversation.lease
        )
        if claim.is_owner or claim.answer:
            return claim
        await anyio.sleep(pause)
        pause = min(most, pause * 1.5)


@asynccontextmanager
async def maintain_claim(
    conversation: "Conversation", key: str, owner: str
) -> AsyncGenerator[None]:
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
