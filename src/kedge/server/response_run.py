"""Writing one response: written by the model, and settled in the database at once.

A ``Run`` ends in exactly one way: completed or incomplete with its output stored, or failed or
cancelled without. ``stop`` ends it from outside (the client went away, the server shuts down).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from kedge.observe import count
from kedge.server import errors, response_object
from kedge.server.compaction import build_compaction_item
from kedge.server.deadline import Deadline
from kedge.server.json_codec import Item, encode, join_response
from kedge.server.models import OutputEvent, stream_output
from kedge.server.output_writer import OutputWriter, StreamEvent, count_usage, precount_output
from kedge.server.prepare import ResponseDraft, add_summary
from kedge.server.request_log import RecordedRequest, log_failure
from kedge.server.state import ServerState
from kedge.server.storage.context import EMPTY_CONTEXT, Context, extend_context
from kedge.server.storage.ids import parse_node_number
from kedge.server.storage.items import has_compaction, slice_from_compaction
from kedge.server.storage.responses import ResponseEntry, ResponseResult
from kedge.server.token_counting import count_items
from kedge.server.websocket.memory import LaneMemory

MAX_QUEUE_SECONDS = 24 * 3600.0
"""Seconds for which a response may wait for its turn."""

Emit = Callable[[Sequence[StreamEvent]], Awaitable[None]]
"""Sends events on their way to the client."""


class ResponseRun:
    """One response while it is written."""

    def __init__(
        self, service: ServerState, draft: ResponseDraft, lane_memory: LaneMemory | None = None
    ) -> None:
        self.draft = draft
        self._lane_memory = lane_memory
        self._service = service
        self._exit_stack = ExitStack()
        if draft.history.conversation is not None:
            self._exit_stack.enter_context(service.conversations.lock(draft.history.conversation))
        self._request_json = encode(draft.request_fields)
        self._state: Literal["unwritten", "in_progress", "settled"] = "unwritten"
        self._failure_status = "failed"
        self._failure_message: str | None = None
        self._deadline = Deadline(service.settings.limits.answer_seconds, self._handle_wait)
        self._on_wait: Callable[[], None] | None = None
        self._result_fields: Mapping[str, Any] = response_object.IN_PROGRESS_FIELDS
        self._writer = _build_writer(service, draft)
        self.error: errors.ApiError | None = None
        """Why the model would not answer, where it said so."""
        self.recorded_request: RecordedRequest | None = None
        """The record of the request, where somebody wants one."""
        service.running.add(self)

    async def generate(self, on_wait: Callable[[], None]) -> bytes | None:
        """Write the response and return it as JSON; None where nobody is left to read it.

        Until its client has the id nobody can ask for the response, so it is only written down
        as in progress once its model makes us wait. That is when ``watch`` is called, too.
        """
        self._on_wait = on_wait
        written = None
        try:
            with self._deadline:
                await self._summarize()
                self._add_compaction()
                async for piece in self._iter_output():
                    self._writer.consume(piece)
                await precount_output(self._writer)
                if not self._deadline.cancelled:
                    written = self._complete()
        except errors.ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            log_failure("the model failed", error)
        finally:
            self.end()
        if written is None and self._failure_status != "cancelled":
            raise self.error or errors.INTERNAL_ERROR()
        return written

    async def stream(self, emit: Emit, on_wait: Callable[[], None]) -> None:
        """Write the response and tell every event of it."""
        self._on_wait = on_wait
        await self._generate_events(emit, self._start)
        if (
            self._is_finished or self._failure_status != "cancelled"
        ):  # else nobody is left to be told
            await emit(self._build_final_events())

    def enqueue(self) -> list[StreamEvent]:
        """Write the response down as one that waits for its turn; tell so."""
        self._result_fields = response_object.QUEUED_FIELDS
        self._store_in_progress()
        return [self._build_event("created"), self._build_event("queued")]

    async def run_queued(self, slots: asyncio.Semaphore, emit: Emit) -> None:
        """Write the response, which was queued, when its turn has come."""
        answering, self._deadline = self._deadline, Deadline(MAX_QUEUE_SECONDS)
        has_turn = False
        if answering.cancelled:  # before anything could begin
            self._deadline.cancel()
        with self._deadline:
            has_turn = await slots.acquire()
        if has_turn:
            self._deadline = answering
            try:
                await self._generate_events(emit, self._start_queued)
            finally:
                slots.release()
        self.end()
        await emit(self._build_final_events())

    async def _generate_events(self, emit: Emit, start: Callable[[], list[StreamEvent]]) -> None:
        try:
            with self._deadline:
                await emit(start())
                await self._emit_events(emit)
        except errors.ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            log_failure("the model failed", error)
        finally:
            self.end()

    def _start(self) -> list[StreamEvent]:
        self._store_in_progress()
        return [self._build_event("created"), self._build_event("in_progress")]

    def _start_queued(self) -> list[StreamEvent]:
        self._result_fields = response_object.IN_PROGRESS_FIELDS
        self._service.responses.mark_in_progress(parse_node_number(self.draft.key))
        return [self._build_event("in_progress")]

    def _build_event(self, name: str) -> StreamEvent:
        return {"type": f"response.{name}", "response": self._build_response([])}

    @property
    def _failure_cause(self) -> errors.ApiError | str | None:
        """Why the response came to nothing."""
        return self._failure_message or self.error

    @property
    def _is_finished(self) -> bool:
        return self._result_fields["status"] not in response_object.UNFINISHED_STATUSES

    def snapshot(self) -> bytes:
        """Show a response that is yet to be written, as it stands."""
        return encode(self._build_response([]))

    def stop(self, status: str) -> None:
        """End the response from outside: ``failed`` by a server that stops, or ``cancelled``."""
        self._failure_status = status
        self._failure_message = response_object.STOPPED_MESSAGE
        self._deadline.cancel()

    def cancel(self) -> None:
        """End the response for its client's sake: it is cancelled when this returns."""
        self.stop("cancelled")
        self.end()

    def end(self) -> None:
        """Let go of everything; a response that is not settled by now has failed."""
        self._record_metrics()
        self._service.running.discard(self)
        self._exit_stack.close()
        if self._state == "in_progress":
            self._state = "settled"
            self._service.responses.fail(
                parse_node_number(self.draft.key), self._failure_status, self._failure_cause
            )

    def _record_metrics(self) -> None:
        if self in self._service.running:
            past = self.draft.history
            on = "nothing" if past.node is None else "response"
            status = self._result_fields["status"] if self._is_finished else None
            count(
                "server_responses_total",
                memory=on if past.conversation is None else "conversation",
                status=status or self._failure_status,
            )

    def _handle_wait(self) -> None:
        if self._state == "unwritten":
            self._store_in_progress()
        if self._on_wait is not None:
            self._on_wait()

    async def _emit_events(self, emit: Emit) -> None:
        await self._summarize()
        events = self._add_compaction()
        if events:
            await emit(events)
        async for piece in self._iter_output():
            events = list(self._writer.feed(piece))
            if events:
                await emit(events)
        await precount_output(self._writer)
        if not self._deadline.cancelled:
            self._complete()

    async def _iter_output(self) -> AsyncIterator[OutputEvent]:
        if not self.draft.skip_model:
            async with stream_output(self.draft.model, self.draft.prompt) as pieces:
                async for piece in pieces:
                    yield piece

    async def _summarize(self) -> None:
        self.draft = await add_summary(self.draft)
        if self.recorded_request is not None:
            self.recorded_request.context = tuple(self.draft.prompt.ask.items)

    def _add_compaction(self) -> list[StreamEvent]:
        draft, writer = self.draft, self._writer
        if draft.compacted is None:
            return []
        id = writer.next_id("compaction")
        item = build_compaction_item(self._service.cipher, id, draft.compacted.items)
        return list(writer.add_item(item, progress_event="response.compaction.compacting"))

    def _build_entry(self) -> ResponseEntry:
        draft, past = self.draft, self.draft.history
        return ResponseEntry(
            key=draft.key,
            parent=past.node,
            conversation=past.conversation,
            request_json=self._request_json,
            input=encode(self._build_input()),
        )

    def _build_input(self) -> list[Item]:
        """What is stored as input: whoever builds on what is not stored brings it along."""
        draft = self.draft
        return (
            [*draft.history.context.list_items(), *draft.input]
            if draft.history.in_memory
            else draft.input
        )

    def _store_in_progress(self) -> None:
        if self.draft.store:
            entry, barrier = self._build_entry(), has_compaction(self.draft.input)
            queued = self._result_fields is response_object.QUEUED_FIELDS
            self._service.responses.begin(entry, barrier=barrier, queued=queued)
            self._state = "in_progress"

    def _complete(self) -> bytes:
        draft, writer = self.draft, self._writer
        counted = count_usage(writer, draft.input_tokens, draft.cached_tokens)
        self._result_fields = response_object.build_finished_fields(
            reason=writer.incomplete_reason,
            now=int(self._service.clock()),
            usage=response_object.build_usage(
                input=counted.input,
                cached=counted.cached,
                output=counted.output,
                reasoning=counted.reasoning,
            ),
        )
        became, written = encode(self._result_fields), encode(writer.items)
        if draft.store:
            self._store_result(became, written)
        if self._lane_memory is not None:
            id: str = draft.request_fields["id"]
            self._lane_memory.store(id, None if draft.store else self._build_context(len(written)))
        return join_response(self._request_json, became, written)

    def _store_result(self, result_json: bytes, output: bytes) -> None:
        entry = self._build_entry()
        context = self._build_context(len(entry.input) + len(output))
        barrier = has_compaction(context.items)
        status = self._result_fields["status"]
        outcome = ResponseResult(status, result_json, output, barrier, context.own_tokens)
        stored = self._service.responses
        save = stored.finish if self._state == "in_progress" else stored.record
        kept = save(entry, outcome)
        self._state = "settled"
        if kept:
            self._service.nodes.cache_context(
                parse_node_number(self.draft.key), self.draft.history.node, context
            )

    def _build_context(self, size: int) -> Context:
        """Everything up to and including this response; ``size`` is that of what it adds."""
        draft, past = self.draft, self.draft.history.context
        items = [*draft.input, *self._writer.items]
        if has_compaction(items):
            return self._build_compacted_context(items, size)
        tokens = draft.new_tokens + count_items(self._writer.items)
        if not (draft.history.in_memory and draft.store):
            return extend_context(past, items, items, tokens, size)
        whole, seen = past.list_items(), past.list_model_items()
        return extend_context(
            EMPTY_CONTEXT, [*whole, *items], [*seen, *items], past.tokens + tokens, size
        )

    def _build_compacted_context(self, items: Sequence[Item], size: int) -> Context:
        kept = slice_from_compaction(items)
        seen = self._service.expand_items(kept)
        return extend_context(EMPTY_CONTEXT, kept, seen, count_items(seen), size)

    def _build_response(self, output: list[Any]) -> dict[str, Any]:
        return {**self.draft.request_fields, **self._result_fields, "output": output}

    def _build_final_events(self) -> list[StreamEvent]:
        if self._is_finished:
            response = self._build_response(self._writer.items)
            return [{"type": f"response.{response['status']}", "response": response}]
        self._result_fields = response_object.build_failed_fields(
            self._failure_status, self._failure_cause
        )
        if self._failure_status == "cancelled":
            return [self._build_event("failed")]  # the API has no event of its own for this
        error = {"type": "error", **self._result_fields["error"], "param": None}
        return [error, self._build_event("failed")]


def _build_writer(service: ServerState, draft: ResponseDraft) -> OutputWriter:
    body = draft.prompt.body
    sealed = "reasoning.encrypted_content" in (body.get("include") or ())
    reasoning: Mapping[str, Any] = body.get("reasoning") or {}
    return OutputWriter(
        draft.key,
        len(draft.input),
        encrypt=service.cipher.encrypt,
        encrypt_reasoning=sealed,
        show_summary=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
    )
