"""Generate and store a response.

A run ends in exactly one way: completed or incomplete with its output stored, or failed or cancelled
without output.
"""

from typing import TYPE_CHECKING, Any, Literal

from kedge.database.responses import slice_from_compaction
from kedge.observe import count
from kedge.server import errors, object_forms
from kedge.server.encrypted_content import CompactedContext, build_compaction_item
from kedge.server.generation import Emit, Frames, Generation
from kedge.server.models import OutputEvent
from kedge.server.object_forms import count_items, join_response
from kedge.server.output_writer import OutputWriter, StreamEvent
from kedge.server.prepare import ResponseDraft, add_summary
from kedge.server.request_log import RecordedRequest
from kedge.server.sse import DONE_FRAME, SSEEncoder
from kedge.server.state import ServerState
from kedge.server.storage.context import (
    EMPTY_CONTEXT,
    Context,
    LaneMemory,
    extend_context,
)
from kedge.server.storage.items import has_compaction
from kedge.server.storage.responses import ResponseEntry, ResponseResult
from kedge.text.json_text import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ResponseRun(Generation):
    """One response while it is written.

    Args:
        service: The server.
        draft: The prepared request.
        unstored: The unstored responses of the connection, if it is a WebSocket.
        recorded: The record of the request, if there is a listener.
        first_event: The number of the first event, if another server did not finish the response. Its conversation is
            already locked.

    Raises:
        ApiError: If the conversation is locked for another response.
    """

    last_frame = DONE_FRAME

    def __init__(
        self,
        service: ServerState,
        draft: ResponseDraft,
        unstored: LaneMemory | None = None,
        recorded: RecordedRequest | None = None,
        first_event: int | None = None,
    ) -> None:
        history = draft.history
        self._locked = history.conversation
        if self._locked is not None and first_event is None:
            service.conversations.acquire(self._locked, history.node)
        self.id: str = draft.request_fields["id"]
        body = draft.prompt.body
        reasoning: Mapping[str, Any] = body.get("reasoning") or {}
        writer = OutputWriter(
            draft.key,
            len(draft.input),
            encrypt=service.cipher.encrypt,
            encrypt_reasoning="reasoning.encrypted_content" in (body.get("include") or ()),
            show_summary=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
        )
        super().__init__(service, draft, writer, self.id, recorded)
        self.is_background = bool(draft.request_fields["background"])
        self.node = service.nodes.parse_node(draft.key)
        self._unstored = unstored
        is_body_stored = self.is_background or draft.idempotency_key is not None
        earlier = history.context.list_items() if history.in_memory else []
        self._entry = ResponseEntry(
            key=draft.key,
            parent=history.node,
            conversation=history.conversation,
            request_json=encode(draft.request_fields),
            input=encode([*earlier, *draft.input]) if draft.store else b"",
            # Another server may need the body, or a repeated request.
            body=encode(body) if is_body_stored else None,
            idempotency_key=draft.idempotency_key,
            background=self.is_background,
        )
        self._state: Literal["unwritten", "in_progress", "settled"] = "unwritten"
        self._result_fields: Mapping[str, Any] = object_forms.IN_PROGRESS_FIELDS
        if first_event is not None:
            self._state, self._result_fields = "in_progress", object_forms.QUEUED_FIELDS
        self._response_json = b""
        self._encoder = SSEEncoder(first_event or 0)
        self._is_lost = False
        self.before_settle: Callable[[], None] | None = None
        """Called before the result of the response is stored."""

    def enqueue(self) -> Frames:
        """Store the response as queued and return the first frames of its stream."""
        self._result_fields = object_forms.QUEUED_FIELDS
        self.begin()
        return self._encode_states("created", "queued")

    async def _start(self, emit: Emit) -> None:
        """Store the response before the client has its id.

        Until then the client cannot request the response, so a response that is not streamed is stored as in progress
        only if its model makes the server wait.
        """
        if self._result_fields is object_forms.QUEUED_FIELDS:
            await emit(await self.service.run(self._start_queued))
        elif self.is_streamed:
            if self._state == "unwritten":
                await self.service.run(self.begin)
            await emit(self._encode_states("created", "in_progress"))
        if self._draft.compacted is not None:
            await emit(await self._compact(self._draft.compacted))

    def _start_queued(self) -> Frames:
        self._result_fields = object_forms.IN_PROGRESS_FIELDS
        self.service.responses.mark_in_progress(self.node)
        return self._encode_states("in_progress")

    async def _compact(self, compacted: CompactedContext) -> Frames:
        """Add the compaction of the context to the output, with the model's summary."""
        self._draft = draft = await add_summary(self._draft, compacted)
        if self._recorded is not None:
            self._recorded.model_items = draft.prompt.ask.items
        id, items = self._writer.next_id("compaction"), (draft.compacted or compacted).items
        item = build_compaction_item(self.service.cipher, id, items)
        events = self._writer.add_item(item, "response.compaction.compacting")
        return list(map(self._encoder, events)) if self.is_streamed else []

    def _render(self, piece: OutputEvent, events: list[StreamEvent]) -> Frames:
        return list(map(self._encoder, events))

    def _encode_states(self, *names: str) -> Frames:
        if not self.is_streamed:
            return []
        response = self._build_response([])
        return [self._encoder({"type": f"response.{name}", "response": response}) for name in names]

    def serialize(self) -> bytes:
        """Return the complete response as JSON."""
        return self._response_json

    @property
    def _failure_status(self) -> str:
        return self._stop_status or "failed"

    @property
    def _failure_cause(self) -> errors.ApiError | str | None:
        """The reason why the response failed."""
        return object_forms.STOPPED_MESSAGE if self._stop_status else self.error

    def snapshot(self) -> bytes:
        """Return a response that has not been generated yet as JSON."""
        return encode(self._build_response([]))

    def cancel(self) -> None:
        """Cancel the response on request of its client: it is cancelled when this returns."""
        self.stop("cancelled")
        self.end()

    def end(self) -> None:
        """Release all resources; a response that is not settled by now has failed."""
        if self in self.service.running:
            history = self._draft.history
            stored_on = "nothing" if history.node is None else "response"
            count(
                "server_responses_total",
                memory=stored_on if history.conversation is None else "conversation",
                status=self._result_fields["status"] if self.is_complete else self._failure_status,
            )
        super().end()
        is_unsettled, self._state = self._state == "in_progress", "settled"
        if is_unsettled and self._is_left_to_others:
            self._locked = None  # the lock belongs to the response
            return
        if is_unsettled and self.before_settle is not None:
            self.before_settle()
        if is_unsettled or self._locked is not None:
            self.service.submit(self._release, self._failure_status if is_unsettled else None)

    def _release(self, status: str | None) -> None:
        """Store the failure of an unsettled response, and unlock its conversation."""
        if status is not None:
            self.service.responses.fail(self.node, status, self._failure_cause)
        self._unlock()

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another server continues this response, because this one is stopping or was too slow."""
        is_left = self._stop_status == "failed" or self._is_lost
        return is_left and self.is_background and self.service.claims is not None

    def _handle_wait(self) -> None:
        # On a database of several servers this would be a round trip, and useless for its client.
        if self._state == "unwritten" and self.service.claims is None:
            self.begin()
        super()._handle_wait()

    def begin(self) -> None:
        """Store the response as in progress or queued, before its client receives the id."""
        if self._draft.store:
            barrier = has_compaction(self._draft.input)
            queued = self._result_fields is object_forms.QUEUED_FIELDS
            self.service.responses.begin(self._entry, barrier=barrier, queued=queued)
            self._state = "in_progress"

    async def _complete(self) -> None:
        draft, writer = self._draft, self._writer
        self._result_fields = object_forms.build_finished_fields(
            reason=writer.incomplete_reason,
            now=int(self.service.clock()),
            usage=object_forms.build_usage(self._count_usage()),
        )
        if writer.reasoning_texts:
            self.service.remember_reasoning(writer.items, writer.reasoning_texts)
        result, output = encode(self._result_fields), encode(writer.items)
        if draft.store:
            if self.before_settle is not None:
                self.before_settle()
            await self.service.run(self._store_result, result, output)
        if self._unstored is not None:
            context = None if draft.store else self._build_context(len(output))
            self._unstored.store(self.id, context)
        self._response_json = join_response(self._entry.request_json, result, output)

    def _store_result(self, result_json: bytes, output: bytes) -> None:
        """Store the result, and unlock the conversation before the client can continue it."""
        entry, stored = self._entry, self.service.responses
        try:
            context = self._build_context(len(entry.input) + len(output))
            barrier, status = has_compaction(context.items), self._result_fields["status"]
            outcome = ResponseResult(status, result_json, output, barrier, context.own_tokens)
            save = stored.finish if self._state == "in_progress" else stored.record
            is_stored = save(entry, outcome)
            self._state = "settled"
            if is_stored:
                self.service.nodes.cache_context(self.node, entry.parent, context)
            elif self.service.claims is not None:
                self._is_lost = True
                raise errors.RESPONSE_LOST()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        """Unlock the conversation, unless that was done before."""
        if self._locked is not None:
            self.service.conversations.release(self._locked)
            self._locked = None

    def _build_context(self, size: int) -> Context:
        """Return the context that ends with this response, which adds ``size`` bytes to it."""
        draft, before = self._draft, self._draft.history.context
        items = [*draft.input, *self._writer.items]
        if has_compaction(items):
            retained = slice_from_compaction(items)
            seen = self.service.expand_items(retained)
            return extend_context(EMPTY_CONTEXT, retained, seen, count_items(seen), size)
        tokens = draft.new_tokens + sum(self._writer.count_each())
        if not (draft.history.in_memory and draft.store):
            return extend_context(before, items, items, tokens, size)
        return extend_context(
            EMPTY_CONTEXT,
            [*before.list_items(), *items],
            [*before.list_model_items(), *items],
            before.tokens + tokens,
            size,
        )

    def _build_response(self, output: list[Any]) -> dict[str, Any]:
        return {**self._draft.request_fields, **self._result_fields, "output": output}

    def _finish(self) -> Frames:
        output: list[Any] = self._writer.items
        if not self.is_complete:
            output, self._result_fields = (
                [],
                object_forms.build_failed_fields(self._failure_status, self._failure_cause),
            )
        return list(map(self._encoder, build_last_events(self._build_response(output))))


def build_repeated_events(response: dict[str, Any]) -> list[StreamEvent]:
    """Return the events of a finished response whose request was repeated, with each item in one piece."""
    started: dict[str, Any] = {**response, **object_forms.IN_PROGRESS_FIELDS, "output": []}
    events: list[StreamEvent] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(response["output"]):
        event: StreamEvent = {"output_index": index, "item": item}
        events.append({"type": "response.output_item.added", **event})
        events.append({"type": "response.output_item.done", **event})
    return events + build_last_events(response)


def build_last_events(response: dict[str, Any]) -> list[StreamEvent]:
    """Return the events that end the stream of a response."""
    if response["status"] not in {"failed", "cancelled"}:
        return [{"type": f"response.{response['status']}", "response": response}]
    failed: StreamEvent = {"type": "response.failed", "response": response}
    if response["status"] == "cancelled":
        return [failed]  # the API has no event for a cancelled response
    return [{"type": "error", **response["error"], "param": None}, failed]
