"""One turn of a conversation: store the question, send it, store the answer, and return the reply.

Blocks are stored before they are sent: the question as an ``asked`` node, later the results of tools. Every
finished answer is stored before the run continues. The head moves once, at the end, if no other process has
moved it. After a failure at any earlier point all completed steps are in the tree, and ``resume`` continues
from there. A run that is stopped early stores the partial answer beside the path, as a failed node whose
response is ``cancelled``: it is not an anchor, and is sent again only by a message that continues from it.
If tools were running, the node has no response, because no request was sent.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast

import anyio
import msgspec
from msgspec.structs import replace
from typing_extensions import TypeVar

from kedge._internal.event_loops import run_to_end
from kedge.compaction import TurnCompacted
from kedge.conversation.checkpoint import (
    Checkpoint,
    RunRecorder,
    has_same_blocks,
    has_same_content,
    limit_retention,
)
from kedge.engines import Engine, Reply, Request, RunStream, Stream
from kedge.engines.reply import answer_text
from kedge.engines.request_log import CostFunction
from kedge.errors import EngineError, HeadConflict, OutputError, StoreError
from kedge.events import Event, Outcome, RefusalDelta, ResponseStarted, TextDelta
from kedge.events.request_record import keep_request
from kedge.events.run import (
    AnswerFinished,
    AttemptFailed,
    Healed,
    OutputAccepted,
    RequestPlanned,
    TurnFinished,
)
from kedge.observe import bind_fields, get_logger
from kedge.planning import AnchorRecord, find_problems, find_running, get_state, set_state
from kedge.planning.digests import canonical_json
from kedge.store import Claim, ConversationRow, Node, RequestRecord, Store
from kedge.turns import (
    AssistantBlock,
    Block,
    ToolResultBlock,
    Turn,
    assistant,
    new_id,
    snapshot_block_ids,
)
from kedge.turns.frozen_json import to_encodable
from kedge.turns.turn import has_prefix

if TYPE_CHECKING:
    from kedge.store.records import NodeKind

log = get_logger("kedge.conversation")

T = TypeVar("T")
OutputT = TypeVar("OutputT", default=None)
ReplyEvents = AsyncGenerator[Event | Reply[Any]]
"""The events of a turn, and its reply."""

DEFAULT_LEASE = 30.0
"""Seconds after which a claim expires unless it is renewed; it is renewed after a third of this time."""
ANSWER_NOT_STORED = (
    "The answer was received and is in the attribute turn of this error. Conversation.append stores its "
    "blocks when the store is available again; Conversation.resume requests another answer."
)
SAVE_PAUSES = (0.1, 1.0)
"""Seconds before each further attempt to store an answer, if the store is busy or unreachable."""
QUEUE_KEY = ""
"""The key of the claim of the running turn of a queue; keys of callers are not empty."""
POLL_INTERVALS = (0.02, 0.5)
"""Seconds between polls for a turn that another process is running: the first delay, and the maximum."""


class TurnTask(msgspec.Struct, frozen=True):
    """A Turn to run from a node of the tree."""

    checkpoint: Checkpoint
    turn: Turn
    expected_head: int
    """The node at which the head must be when the answer is stored."""
    key: str = ""
    resumed: bool = False
    """Whether the question is in the tree already."""


class PendingAnswer(msgspec.Struct, frozen=True):
    """A finished answer that is not stored yet."""

    turn: Turn
    """The Turn to store, with the answer; at the end of the run, as the middleware has changed it."""
    record: RequestRecord
    anchor: AnchorRecord | None
    """The record of the answer as its engine made it."""

    @classmethod
    def of(cls, turn: Turn, record: RequestRecord) -> "PendingAnswer":
        """Return the answer at the end of a Turn that an engine returned."""
        anchor = get_state(turn).anchor(record.provider_response_id, record.scope)
        return cls(turn, record, anchor)


TaskBuilder = Callable[[], Awaitable[TurnTask | Reply[Any]]]


class ConversationStream(RunStream[Reply[OutputT]], Generic[OutputT]):
    """The events of one turn, and after the last event the reply, which is then stored.

    Example:
        ```python
        async with conversation.stream("Hello") as stream:
            async for event in stream:
                ...
        print(stream.reply.text)
        ```
    """

    _before_end = "its reply; completed steps are in the store, see Conversation.resume"

    @property
    def reply(self) -> Reply[OutputT]:
        """The reply; available once the stream has ended.

        Raises:
            KedgeError: The stream has not ended.
        """
        return self._result()

    async def text_deltas(self) -> AsyncGenerator[str]:
        """Consume the events and yield the text of the answer as it arrives; a stored answer in one piece."""
        async for delta in super().text_deltas():
            yield delta
        if self.reply.stored:
            yield self.reply.text

    async def __anext__(self) -> Event:
        event = await super().__anext__()
        while isinstance(event, Reply):
            self._value = cast("Reply[Any]", event)
            event = await super().__anext__()
        return event


@dataclass
class ConversationRun:
    """One run of an engine, stored step by step.

    Args:
        engine: The engine with all its middleware.
        build_task: Called when the first event is requested; returns the task, or the reply if it is stored.
        options: The options of the engine's ``stream``.
        price: A function that computes the cost of a response.
        on_finish: A function that is called with the final node and Turn of the run.
    """

    engine: Engine
    build_task: TaskBuilder
    options: dict[str, Any]
    price: CostFunction | None
    on_finish: Callable[[Node, Turn], None]
    pending_answer: PendingAnswer | None = None
    """The last finished answer, until it is stored."""
    partial_text: list[str] | None = None
    """The text received since the last request; None while no answer is awaited."""
    compacted: bool = False
    running_node: int = 0
    """The node of the stored response in the background that the current request waits for; 0 if there is none."""
    waits_at: int = 0
    """The node with the row of the response in the background that the task waits for, which an answer replaces."""

    async def events(self) -> ReplyEvents:
        """Yield the engine's events, and the reply."""
        task = await self.build_task()
        if isinstance(task, Reply):
            yield TurnFinished(task.turn)
            yield task
            return
        stream = self._start(await self._load_running(task))
        try:
            async with stream:
                async for event in stream:
                    if isinstance(event, TurnFinished):
                        reply = await run_to_end(self._finish(stream))
                        yield TurnFinished(reply.turn)
                        yield reply
                        return
                    await self._handle_event(event)
                    yield event
        except StoreError:
            raise
        except OutputError as error:
            if error.turn is not None:
                self._update_pending_answer(error.turn)
            raise
        except EngineError as error:
            try:
                await self._save_failure(error)
            except StoreError as problem:
                error.add_note(f"The failed request was not stored: {problem}")
            raise
        except (GeneratorExit, anyio.get_cancelled_exc_class()):
            with anyio.CancelScope(shield=True):
                await self._save_cancelled()
            raise
        finally:
            if self.pending_answer:  # stopped early, or failed elsewhere: store the finished answer
                with anyio.CancelScope(shield=True):
                    await self._save_answer()

    def _start(self, task: TurnTask) -> Stream[Any]:
        self.task = task
        self.checkpoint = task.checkpoint
        self.store = task.checkpoint.store
        self.question_saved = task.resumed
        self.recorder = RunRecorder(self.store.clock)
        options: dict[str, Any] = {**self.options, "before_send": self._save_outgoing}
        if self.store.keep_bodies:
            options["tap"] = self.recorder.record_exchange
        with bind_fields(conversation_id=self.checkpoint.row.id):
            stream = self.engine.stream(task.turn, **options)
        self.filters = self.recorder.filters = stream.filters
        self.stream, self.log = stream, stream.log
        self.log.clock, self.log.price, self.log.is_shared = self.store.clock, self.price, True
        return stream

    async def _load_running(self, task: TurnTask) -> TurnTask:
        """Return a task that waits for a response in the background with the stored record of its request."""
        running, row = find_running(task.turn), task.checkpoint.row
        if running is None:
            return task
        store, self.waits_at = task.checkpoint.store, task.checkpoint.node.id
        node = await store.node_of_response(row, running.response_id)
        found = await store.newest_response(row, node.id) if node else None
        if found is None:
            return task
        self.waits_at = found.node
        return replace(task, turn=keep_request(task.turn, found))

    async def _handle_event(self, event: Event) -> None:
        if isinstance(event, AttemptFailed | Healed | RequestPlanned) and (
            row := self.log.pop_finished()
        ):
            await run_to_end(self._save_retried(row))
        self.recorder.record_event(event)
        match event:
            case AnswerFinished():
                record = cast("RequestRecord", self.log.pop_finished())
                self.pending_answer = PendingAnswer.of(event.turn, record)
                self.partial_text = None
            case ResponseStarted() if self._is_new_in_background(event):
                # Its id is stored at once: the run may be interrupted, and the answer is paid for.
                outcome = Outcome("running", response_id=event.response_id, model=event.model)
                turn = self.stream.reached
                self.pending_answer = PendingAnswer.of(turn, self.log.complete(outcome, turn))
            case Healed(reason, lost) if lost and (plan := self.stream.plan) and plan.anchor:
                for each in {plan.anchor, *get_state(cast("Turn", plan.source)).anchors}:
                    if each.response_id in lost:
                        await self._persist(partial(self._mark_lost, each, reason))
            case TurnCompacted():
                self.compacted = True
            case OutputAccepted():
                pass  # the next event is the end, where the answer is stored as the middleware has changed it
            case _:
                if self.pending_answer:
                    await run_to_end(self._save_answer())
        if isinstance(event, RequestPlanned):
            self.partial_text = []
            self.running_node = self.waits_at if event.running else 0
        elif isinstance(event, TextDelta | RefusalDelta) and self.partial_text is not None:
            self.partial_text.append(event.delta)

    async def _mark_lost(self, anchor: AnchorRecord, reason: str) -> None:
        """Store that a response is lost, and remember it: it is no change of the Turn that a node has to store."""
        if await self.store.mark_lost(anchor, reason):
            known = self.checkpoint.turn
            state = get_state(known).mark_lost({anchor.response_id}, anchor.scope)
            self.checkpoint.turn = set_state(known, state)

    def _is_new_in_background(self, event: ResponseStarted) -> bool:
        """Return whether a response is generated in the background, and its id is not stored yet."""
        if not event.background or self.running_node:
            return False
        return find_running(self.stream.reached) is not None

    async def _save_outgoing(self, turn: Turn) -> None:
        """Store the blocks that are about to be sent.

        Raises:
            NotInStore: The conversation was deleted or is about to be deleted, so that nothing is sent.
        """
        await self._save_answer()
        kind: NodeKind = "results" if self.question_saved else "asked"
        key = "" if self.question_saved else self.task.key
        self.question_saved = True
        is_stored = has_same_blocks(self.checkpoint.turn, turn)
        if not is_stored:
            telemetry = self.recorder.drain_telemetry()
            await self.checkpoint.save(turn, kind, telemetry=telemetry, key=key)
        if is_stored or kind == "results":  # a new question would not have been stored
            await self.store.require_continuable(self.checkpoint.row)

    async def _save_answer(self, head: int | None = None) -> None:
        """Store the last finished answer."""
        pending, self.pending_answer = self.pending_answer, None
        if pending is None:
            return
        row = pending.record
        telemetry = self.recorder.drain_telemetry()
        turn = self.filters.apply_to_turn(pending.turn, ("output",))
        save = partial(
            self.checkpoint.save,
            anchor=pending.anchor,
            response=row,
            telemetry=telemetry,
            head=head,
            replaces_node=self.running_node,
        )
        # A question whose answer is still generated in the background is pending: it is continued by ``resume``.
        kind: NodeKind = "results" if row.status == "running" else "answered"
        await self._persist(lambda: save(turn, kind), turn)
        self.log.settle_background(self.checkpoint.found)
        self.running_node = self.checkpoint.node.id if row.status == "running" else 0

    async def _persist(self, save: Callable[[], Awaitable[Any]], turn: Turn | None = None) -> None:
        """Write to the store, in several attempts while it is busy or unreachable.

        The answers of the run have been paid for, and another request would return different ones.

        Args:
            save: Writes to the store.
            turn: The Turn with the answer, for the error of the last attempt.
        """
        for pause in (*SAVE_PAUSES, None):
            try:
                await save()
            except StoreError as error:
                if pause is None or not error.retryable:
                    if turn is not None and not isinstance(error, HeadConflict):
                        error.turn = turn
                        error.add_note(ANSWER_NOT_STORED)
                    raise
                log.warning("an answer could not be stored and is tried again: %s", error)
                await anyio.sleep(pause)
            else:
                return

    async def _finish(self, stream: Stream[Any]) -> Reply[Any]:
        """Store the remaining blocks, move the head, and then record the answer of the idempotency key.

        A key whose answer lost the race for the head has no answer: the exchange is not part of the
        conversation, so the same key may run again from the new head.
        """
        turn = self.filters.apply_to_turn(stream.turn, ("output",))
        head, key = self.task.expected_head, self.task.key
        is_answer = self._update_pending_answer(turn)
        if find_running(turn):  # its question is pending, as one that was interrupted
            await self._save_answer()
            return self._build_reply(stream, turn)
        if is_answer:
            await self._save_answer(head)
        else:
            await self._save_answer()
            if has_same_content(self.checkpoint.turn, turn):
                row, node = self.checkpoint.row, self.checkpoint.node
                await self._persist(lambda: self.store.move_head(row, node, head=head), turn)
            else:
                kind = self._name_change(turn)
                await self._persist(lambda: self.checkpoint.save(turn, kind, head=head), turn)
        node = self.checkpoint.node
        if key:
            await self._persist(lambda: self.store.settle(self.checkpoint.row, key, node.id), turn)
        turn = limit_retention(self.checkpoint.turn, self.checkpoint.row.retention)
        self.on_finish(node, turn)
        return self._build_reply(stream, turn)

    def _update_pending_answer(self, turn: Turn) -> bool:
        """Store the pending answer with the data, mode and anchors of a Turn that the middleware returned.

        Returns:
            Whether there is a pending answer with the same blocks; otherwise nothing was changed.
        """
        pending = self.pending_answer
        if pending is None or not has_same_blocks(pending.turn, turn):
            return False
        self.pending_answer = replace(pending, turn=turn)
        return True

    def _name_change(self, turn: Turn) -> "NodeKind":
        """Return the kind of the node for that in which the final Turn differs from what is stored."""
        stored = self.checkpoint.turn
        if not has_prefix(turn, stored):
            return "compacted" if self.compacted else "edited"
        added = turn[len(stored) :]
        # After the last round of tools, or beside calls that are left to the caller, results are not sent.
        is_results = bool(added) and all(isinstance(block, ToolResultBlock) for block in added)
        return "results" if is_results else "added"

    def _build_reply(self, stream: Stream[Any], turn: Turn) -> Reply[Any]:
        return stream.build_reply(
            Reply,
            text=answer_text(turn, self.task.turn),
            turn=turn,
            node=self.checkpoint.node.id,
            conversation=self.checkpoint.row.id,
        )

    async def _save_failure(self, error: EngineError) -> None:
        """Store a failed request, with the blocks and the text that arrived before the failure."""
        await self._save_answer()
        row = self.log.pop_finished()
        if row is None or row.status == "running":  # then it is stored already
            return
        turn = error.turn or self.checkpoint.turn
        complete = snapshot_block_ids(turn)
        texts = [
            block.text or block.refusal
            for block in error.partial
            if isinstance(block, AssistantBlock) and block.id not in complete
        ]
        await self._save_unfinished(turn, texts, row)

    async def _save_retried(self, row: RequestRecord) -> None:
        """Store a request that is sent again."""
        await self._save_answer()
        await self._persist(lambda: self._save_unfinished(self.checkpoint.turn, (), row))

    async def _save_cancelled(self) -> None:
        """Store the partial answer of a run that was stopped, or a node without a request if a tool was running."""
        received, self.partial_text = self.partial_text, None
        with suppress(StoreError):  # for example, if the conversation was deleted meanwhile
            await self._save_answer()
            row = self.log.pop_finished()
            if row and row.status == "running":
                if self.recorder.recorded.exchanges:  # they are known only at the end of the stream
                    self.pending_answer = PendingAnswer.of(self.checkpoint.turn, row)
                    await self._save_answer()
                return
            if self.question_saved and (row or find_problems(self.checkpoint.turn)):
                await self._save_unfinished(self.checkpoint.turn, ["".join(received or ())], row)

    async def _save_unfinished(
        self, turn: Turn, texts: Sequence[str], row: RequestRecord | None
    ) -> None:
        """Store a node beside the path, without moving the position of the run."""
        partial = [assistant(text, origin="engine") for text in texts if text]
        turn = self.filters.apply_to_turn(turn.append(*partial))
        checkpoint = replace(self.checkpoint)
        telemetry = self.recorder.drain_telemetry()
        await checkpoint.save(
            turn, "failed", response=row, telemetry=telemetry, replaces_node=self.running_node
        )
        self.log.settle_background(checkpoint.found)
        self.running_node = 0


class ClaimRequest(msgspec.Struct, frozen=True):
    """An idempotency key of a conversation, and the owner that claims it."""

    store: Store
    row: ConversationRow
    key: str
    owner: str
    lease: float

    async def acquire(self, blocks: Sequence[Block], options: Mapping[str, Any]) -> Claim:
        """Return the claim, acquired or answered; wait while another process runs the turn.

        Raises:
            KeyReused: The key belongs to another request.
        """
        request_hash = _hash_request(blocks, options)
        pause, max_pause = POLL_INTERVALS
        while True:
            acquired = self.store.claim(
                self.row, self.key, request_hash=request_hash, owner=self.owner, lease=self.lease
            )
            try:
                claim = await run_to_end(acquired)
            except anyio.get_cancelled_exc_class():
                await self.release()
                raise
            if claim.is_owner or claim.answer:
                return claim
            await anyio.sleep(pause)
            pause = min(max_pause, pause * 1.5)

    @asynccontextmanager
    async def maintain(self) -> AsyncGenerator[None]:
        """Renew the claim while the turn runs, and release it at the end: the turn may have no answer yet."""
        renewing = asyncio.create_task(self._renew_periodically())
        try:
            yield
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
            await self.release()

    async def release(self) -> None:
        """End the claim, so that another process may acquire it."""
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await self.store.renew(self.row, self.key, owner=self.owner, lease=0)

    async def _renew_periodically(self) -> None:
        while True:
            await asyncio.sleep(self.lease / 3)
            # The next renewal is before the claim expires, and may succeed.
            with suppress(StoreError):
                await self.store.renew(self.row, self.key, owner=self.owner, lease=self.lease)


@asynccontextmanager
async def hold_queue(store: Store, row: ConversationRow, lease: float) -> AsyncGenerator[None]:
    """Wait until no other process runs a turn of this conversation from its queue, and run one."""
    request = ClaimRequest(store, row, QUEUE_KEY, new_id("run"), lease)
    await request.acquire((), {})
    async with request.maintain():
        yield


_TRANSPORT_OPTIONS = frozenset({"streaming", "tap", "candidates", "before_send", "output_retries"})
"""Options of a run that are not part of the request's hash."""


def _hash_request(blocks: Sequence[Block], options: Mapping[str, Any]) -> bytes:
    """Return a hash of a request: the messages as a model reads them, the model and all settings."""
    settings = {name: value for name, value in options.items() if name not in _TRANSPORT_OPTIONS}
    if "tools" in settings:
        settings["tools"] = Request.of(tools=settings["tools"]).tools
    if "output" in settings:
        settings["output"] = settings["output"].request_options()
    described = json.dumps(settings, sort_keys=True, default=to_encodable).encode()
    messages = hashlib.sha256(b"\n".join(canonical_json(block) or b"" for block in blocks))
    return hashlib.sha256(b"request\n" + messages.digest() + described).digest()
