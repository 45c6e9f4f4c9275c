"""Store the steps of a run while it is in progress: what is sent, each answer, failures, and the final Turn."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import anyio
import msgspec
from msgspec.structs import replace

from kedge._internal.event_loops import run_to_end
from kedge._internal.wait_policy import WaitPolicy
from kedge.compaction import TurnCompacted
from kedge.conversation.checkpoint import (
    Checkpoint,
    RunRecorder,
    has_same_blocks,
    has_same_content,
    limit_retention,
)
from kedge.engines import Engine, Reply, Stream
from kedge.engines.reply import answer_text
from kedge.engines.request_log import CostFunction
from kedge.errors import EngineError, HeadConflict, StoreError
from kedge.events import Event, Outcome, RefusalDelta, ResponseStarted, TextDelta
from kedge.events.run import AnswerFinished, AttemptFailed, Healed, OutputAccepted, RequestPlanned
from kedge.observe import bind_fields, get_logger
from kedge.planning import AnchorRecord, find_problems, find_running, get_state, set_state
from kedge.store import Node, RequestRecord
from kedge.store.records import NodeKind
from kedge.turns import AssistantBlock, ToolResultBlock, Turn, assistant, snapshot_block_ids
from kedge.turns.turn import has_prefix

log = get_logger("kedge.conversation")

ANSWER_NOT_STORED = (
    "The answer was received and is in the attribute turn of this error. Conversation.append stores its "
    "blocks when the store is available again; Conversation.resume requests another answer."
)
REPLACED = (
    "another request was sent instead: the messages or the account differ from those of this one"
)
"""The error in the record of a response in the background that a later run did not wait for."""
SAVE_WAITS = WaitPolicy(
    "the write of an answer, if the store is busy or unreachable: another request would return another answer",
    first=0.1,
    longest=1.0,
    factor=10.0,
)
MAX_SAVE_REPETITIONS = 2


class TurnTask(msgspec.Struct, frozen=True):
    """A Turn to run from a node of the tree."""

    checkpoint: Checkpoint
    turn: Turn
    expected_head: int
    """The node at which the head must be when the answer is stored."""
    key: str = ""
    resumed: bool = False
    """Whether the question is in the tree already."""
    waits_at: int = 0
    """The node with the record of a response in the background that this task waits for, which the answer replaces."""


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


class RunWriter:
    """Stores the steps of one run, in the order in which they happen.

    Args:
        task: The Turn to run, and where it continues.
        engine: The engine with all its middleware.
        options: The options of the engine's ``stream``.
        price: A function that computes the cost of a response.
    """

    def __init__(
        self,
        task: TurnTask,
        engine: Engine,
        options: Mapping[str, Any],
        price: CostFunction | None,
    ) -> None:
        store = task.checkpoint.store
        recorder = RunRecorder(store.clock)
        stream_options: dict[str, Any] = {**options, "before_send": self._save_outgoing}
        if store.keep_bodies:
            stream_options["tap"] = recorder.record_exchange
        with bind_fields(conversation_id=task.checkpoint.row.id):
            stream: Stream[Any] = engine.stream(task.turn, **stream_options)
        recorder.filters = stream.filters
        request_log = stream.log
        request_log.clock = store.clock
        request_log.price = price
        request_log.is_shared = True
        self.task = task
        self.store = store
        self.checkpoint = task.checkpoint
        """Where the run is in the tree."""
        self.recorder = recorder
        self.stream = stream
        self.log = request_log
        self.pending_answer: PendingAnswer | None = None
        """The last finished answer, until it is stored."""
        self._is_question_saved = task.resumed
        self._is_compacted = False
        self._partial_text: list[str] | None = None
        """The text received since the last request; None while no answer is awaited."""
        self._waits_at = task.waits_at
        """The node of the response in the background that the first request of the run fetches; 0 after that."""
        self._running_node = 0
        """The node of the stored response in the background that the current request waits for; 0 if there is none."""

    async def store_event(self, event: Event) -> None:
        """Store what an event of the engine adds to the run."""
        if isinstance(event, AttemptFailed | Healed | RequestPlanned):
            await self._save_retried()
        self.recorder.record_event(event)
        if isinstance(event, Healed):
            await self._save_lost(event)
        match event:
            case AnswerFinished():
                record = cast("RequestRecord", self.log.pop_finished())
                self.pending_answer = PendingAnswer.of(event.turn, record)
                self._partial_text = None
            case ResponseStarted() if self._is_new_in_background(event):
                # Its id is stored at once: the run may be interrupted, and the answer is paid for.
                outcome = Outcome("running", response_id=event.response_id, model=event.model)
                turn = self.stream.reached
                record = self.log.complete(outcome, turn)
                self.pending_answer = PendingAnswer.of(turn, record)
                request = record.sent_request
                # The next event of a stream may come much later; without a stream it follows at once, with more facts.
                if request is not None and request.streaming:
                    await run_to_end(self.save_answer())
            case TurnCompacted():
                self._is_compacted = True
            case OutputAccepted():
                pass  # the next event is the end, where the answer is stored as the middleware has changed it
            case _:
                if self.pending_answer:
                    await run_to_end(self.save_answer())
        match event:
            case RequestPlanned():
                self._partial_text = []
                await self._update_running_node(event)
            case TextDelta() | RefusalDelta():
                if self._partial_text is not None:
                    self._partial_text.append(event.delta)
            case _:
                pass

    async def _update_running_node(self, event: RequestPlanned) -> None:
        """Set the node whose response is fetched; if another request is sent instead, nothing waits for it any more."""
        node = self._waits_at
        self._waits_at = 0
        self._running_node = node if event.running else 0
        if node and not event.running:
            await self._persist(partial(self.store.mark_unknown, node, REPLACED))

    async def _save_retried(self) -> None:
        """Store a finished request that is sent again, if there is one."""
        record = self.log.pop_finished()
        if record is not None:
            await run_to_end(self._save_attempt(record))

    async def _save_attempt(self, record: RequestRecord) -> None:
        await self.save_answer()
        await self._persist(lambda: self._save_unfinished(self.checkpoint.turn, (), record))

    async def _save_lost(self, healed: Healed) -> None:
        """Store which responses the server has lost, of those that the request could have continued."""
        plan = self.stream.plan
        if not healed.lost or plan is None or plan.anchor is None:
            return
        candidates = {plan.anchor, *get_state(cast("Turn", plan.source)).anchors}
        for anchor in candidates:
            if anchor.response_id in healed.lost:
                await self._persist(partial(self._mark_lost, anchor, healed.reason))

    async def _mark_lost(self, anchor: AnchorRecord, reason: str) -> None:
        """Store that a response is lost, and remember it: it is no change of the Turn that a node has to store."""
        if await self.store.mark_lost(anchor, reason):
            stored = self.checkpoint.turn
            state = get_state(stored).mark_lost({anchor.response_id}, anchor.scope)
            self.checkpoint.turn = set_state(stored, state)

    def _is_new_in_background(self, event: ResponseStarted) -> bool:
        """Return whether a response is generated in the background, and its id is not stored yet."""
        if not event.background or self._running_node:
            return False
        return find_running(self.stream.reached) is not None

    async def _save_outgoing(self, turn: Turn) -> None:
        """Store the blocks that are about to be sent.

        Raises:
            NotInStore: The conversation was deleted or is about to be deleted, so that nothing is sent.
        """
        await self.save_answer()
        is_question = not self._is_question_saved
        self._is_question_saved = True
        is_stored = has_same_blocks(self.checkpoint.turn, turn)
        if not is_stored:
            telemetry = self.recorder.drain_telemetry()
            if is_question:
                await self.checkpoint.save(turn, "asked", telemetry=telemetry, key=self.task.key)
            else:
                await self.checkpoint.save(turn, "results", telemetry=telemetry)
        if is_stored or not is_question:  # a new question would not have been stored
            await self.store.require_continuable(self.checkpoint.row)

    async def save_answer(self, head: int | None = None) -> None:
        """Store the last finished answer.

        Args:
            head: The node at which the head must be, to move it to the answer; None to leave the head.
        """
        pending = self.pending_answer
        self.pending_answer = None
        if pending is None:
            return
        record = pending.record
        is_running = record.status == "running"
        turn = self._filter_output(pending.turn)
        save = partial(
            self.checkpoint.save,
            turn,
            # A question whose answer is still generated in the background is pending: ``resume`` continues it.
            "results" if is_running else "answered",
            anchor=pending.anchor,
            response=record,
            telemetry=self.recorder.drain_telemetry(),
            head=head,
            replaces_node=self._running_node,
        )
        await self._persist(save, turn)
        self.log.settle_background(self.checkpoint.stored_record)
        self._running_node = self.checkpoint.node.id if is_running else 0

    def _filter_output(self, turn: Turn) -> Turn:
        """Return a Turn after the guards of answers, as it may be stored."""
        return self.stream.filters.apply_to_turn(turn, ("output",))

    async def _persist(self, save: Callable[[], Awaitable[Any]], turn: Turn | None = None) -> None:
        """Write to the store, in several attempts while it is busy or unreachable.

        The answers of the run have been paid for, and another request would return different ones.

        Args:
            save: Writes to the store.
            turn: The Turn with the answer, for the error of the last attempt.
        """
        for repetition in range(MAX_SAVE_REPETITIONS + 1):
            try:
                await save()
            except StoreError as error:
                if repetition == MAX_SAVE_REPETITIONS or not error.retryable:
                    if turn is not None and not isinstance(error, HeadConflict):
                        error.turn = turn
                        error.add_note(ANSWER_NOT_STORED)
                    raise
                log.warning("an answer could not be stored and is tried again: %s", error)
                await anyio.sleep(SAVE_WAITS.pause(repetition))
            else:
                return

    async def finish(self, on_finish: Callable[[Node, Turn], None]) -> Reply[Any]:
        """Store the remaining blocks, move the head, and then record the answer of the idempotency key.

        A key whose answer lost the race for the head has no answer: the exchange is not part of the
        conversation, so the same key may run again from the new head.

        Args:
            on_finish: A function that is called with the final node and Turn, unless the answer is still generated.
        """
        turn = self._filter_output(self.stream.turn)
        is_answer = self.update_pending_answer(turn)
        if find_running(turn):  # its question is pending, like one that was interrupted
            await self.save_answer()
            return self._build_reply(turn)
        if is_answer:
            await self.save_answer(self.task.expected_head)
        else:
            await self.save_answer()
            await self._persist(partial(self._save_final, turn), turn)
        row = self.checkpoint.row
        node = self.checkpoint.node
        key = self.task.key
        if key:
            await self._persist(lambda: self.store.settle(row, key, node.id), turn)
        turn = limit_retention(self.checkpoint.turn, row.retention)
        on_finish(node, turn)
        return self._build_reply(turn)

    async def _save_final(self, turn: Turn) -> None:
        """Store in what the final Turn differs from the stored one, and move the head."""
        checkpoint = self.checkpoint
        head = self.task.expected_head
        if has_same_content(checkpoint.turn, turn):
            await self.store.move_head(checkpoint.row, checkpoint.node, head=head)
        else:
            await checkpoint.save(turn, self._name_change(turn), head=head)

    def update_pending_answer(self, turn: Turn) -> bool:
        """Store the pending answer with the data, mode and anchors of a Turn that the middleware returned.

        Returns:
            Whether there is a pending answer with the same blocks; otherwise nothing was changed.
        """
        pending = self.pending_answer
        if pending is None or not has_same_blocks(pending.turn, turn):
            return False
        self.pending_answer = replace(pending, turn=turn)
        return True

    def _name_change(self, turn: Turn) -> NodeKind:
        """Return the kind of the node that stores in what the final Turn differs from the stored one."""
        stored = self.checkpoint.turn
        if not has_prefix(turn, stored):
            return "compacted" if self._is_compacted else "edited"
        added = turn[len(stored) :]
        # After the last round of tools, or beside calls that are left to the caller, results are not sent.
        if added and all(isinstance(block, ToolResultBlock) for block in added):
            return "results"
        return "added"

    def _build_reply(self, turn: Turn) -> Reply[Any]:
        return self.stream.build_reply(
            Reply,
            text=answer_text(turn, self.task.turn),
            turn=turn,
            node=self.checkpoint.node.id,
            conversation=self.checkpoint.row.id,
        )

    async def save_failure(self, error: EngineError) -> None:
        """Store a failed request, with the blocks and the text that arrived before the failure."""
        await self.save_answer()
        record = self.log.pop_finished()
        if record is None or record.status == "running":  # then it is stored already
            return
        if record.status == "unknown":
            await self._persist(
                partial(
                    self.store.mark_unknown, self._running_node, record.error, record.error_code
                )
            )
            return
        turn = error.turn or self.checkpoint.turn
        complete = snapshot_block_ids(turn)
        texts = [
            block.text or block.refusal
            for block in error.partial
            if isinstance(block, AssistantBlock) and block.id not in complete
        ]
        await self._save_unfinished(turn, texts, record)

    async def save_cancelled(self) -> None:
        """Store the partial answer of a run that was stopped, or a node without a request if a tool was running."""
        text = "".join(self._partial_text or ())
        self._partial_text = None
        with suppress(StoreError):  # for example, if the conversation was deleted meanwhile
            await self.save_answer()
            record = self.log.pop_finished()
            if record and record.status == "running":
                await self._save_running_bodies(record)
                return
            turn = self.checkpoint.turn
            if self._is_question_saved and (record or find_problems(turn)):
                await self._save_unfinished(turn, [text], record)

    async def _save_running_bodies(self, record: RequestRecord) -> None:
        """Store the bodies of a response that is still generated: they are known only at the end of its stream."""
        if self.recorder.recorded.exchanges:
            self.pending_answer = PendingAnswer.of(self.checkpoint.turn, record)
            await self.save_answer()

    async def _save_unfinished(
        self, turn: Turn, texts: Sequence[str], record: RequestRecord | None
    ) -> None:
        """Store a node beside the path, without moving the position of the run."""
        partial_blocks = [assistant(text, origin="engine") for text in texts if text]
        turn = self.stream.filters.apply_to_turn(turn.append(*partial_blocks))
        beside = replace(self.checkpoint)
        await beside.save(
            turn,
            "failed",
            response=record,
            telemetry=self.recorder.drain_telemetry(),
            replaces_node=self._running_node,
        )
        self.log.settle_background(beside.stored_record)
        self._running_node = 0
