"""Generate and store a response.

A run ends in exactly one way: completed or incomplete with its output stored, or failed or cancelled
without output.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from kedge.observe import count
from kedge.server import errors, response_object
from kedge.server.encrypted_content import build_compaction_item
from kedge.server.generation import Frames, Generation
from kedge.server.item_forms import Item, count_items
from kedge.server.models import ModelUsage, OutputEvent
from kedge.server.output_writer import OutputWriter, StreamEvent
from kedge.server.prepare import ResponseDraft, add_summary
from kedge.server.request_log import RecordedRequest
from kedge.server.response_object import join_response
from kedge.server.sse import SSEEncoder
from kedge.server.state import ServerState
from kedge.server.storage.context import (
    EMPTY_CONTEXT,
    Context,
    LaneMemory,
    extend_context,
)
from kedge.server.storage.items import has_compaction, slice_from_compaction
from kedge.server.storage.responses import ResponseEntry, ResponseResult
from kedge.text.json_text import encode


class ResponseRun(Generation):
    """One response while it is written.

    Args:
        service: The server.
        draft: The prepared request.
        unstored: The unstored responses of the connection, if it is a WebSocket.
        recorded_request: The record of the request, if there is a listener.
        first_event: The number of the first event, if another server did not finish the response. Its conversation is
            already locked.

    Raises:
        ApiError: If the conversation is locked for another response.
    """

    def __init__(
        self,
        service: ServerState,
        draft: ResponseDraft,
        unstored: LaneMemory | None = None,
        recorded_request: RecordedRequest | None = None,
        first_event: int | None = None,
    ) -> None:
        self._locked = draft.history.conversation
        if self._locked is not None and first_event is None:
            service.conversations.acquire(self._locked, draft.history.node)
        model = None if draft.skip_model else draft.model
        usage = ModelUsage(draft.input_tokens, 0, draft.cached_tokens)
        super().__init__(service, model, draft.prompt, _build_writer(service, draft), usage)
        self.grace = draft.model.grace
        self.draft = draft
        self._unstored = unstored
        self._recorded_request = recorded_request
        self._request_json = encode(draft.request_fields)
        self._state: Literal["unwritten", "in_progress", "settled"] = "unwritten"
        self._result_fields: Mapping[str, Any] = response_object.IN_PROGRESS_FIELDS
        if first_event is not None:
            self._state, self._result_fields = "in_progress", response_object.QUEUED_FIELDS
        self._response_json = b""
        self._encoder = SSEEncoder(first_event or 0)
        self.service = service
        self._is_lost = False
        self.before_settle: Callable[[], None] | None = None
        """Called before the result of the response is stored."""

    def enqueue(self) -> Frames:
        """Store the response as queued and return the first frames of its stream."""
        self._result_fields = response_object.QUEUED_FIELDS
        self.begin()
        return self._encode_states("created", "queued")

    async def _start(self) -> Frames:
        """Store the response before the client has its id.

        Until then the client cannot request the response, so a response that is not streamed is stored as in progress
        only if its model makes the server wait.
        """
        if self._result_fields is response_object.QUEUED_FIELDS:
            return await self._service.run(self._start_queued)
        return await self._service.run(self._start_stream) if self.is_streamed else []

    def _start_stream(self) -> Frames:
        if self._state == "unwritten":
            self.begin()
        return self._encode_states("created", "in_progress")

    def _start_queued(self) -> Frames:
        self._result_fields = response_object.IN_PROGRESS_FIELDS
        self._service.responses.mark_in_progress(self._service.nodes.parse_node(self.draft.key))
        return self._encode_states("in_progress")

    async def _prepare(self) -> Frames:
        self.draft = await add_summary(self.draft)
        self._prompt = self.draft.prompt
        if self._recorded_request is not None:
            self._recorded_request.context = tuple(self._prompt.ask.items)
        return self._encode(self._add_compaction())

    def _render(self, piece: OutputEvent) -> Frames:
        return self._encode(self._writer.feed(piece))

    def _encode(self, events: Iterable[StreamEvent]) -> Frames:
        return list(map(self._encoder, events)) if self.is_streamed else []

    def _encode_states(self, *names: str) -> Frames:
        response = self._build_response([])
        return self._encode({"type": f"response.{name}", "response": response} for name in names)

    def _serialize(self) -> bytes:
        return self._response_json

    @property
    def _failure_status(self) -> str:
        return self._stop_status or "failed"

    @property
    def _failure_cause(self) -> errors.ApiError | str | None:
        """The reason why the response failed."""
        return response_object.STOPPED_MESSAGE if self._stop_status else self.error

    def snapshot(self) -> bytes:
        """Return a response that has not been generated yet as JSON."""
        return encode(self._build_response([]))

    def cancel(self) -> None:
        """Cancel the response on request of its client: it is cancelled when this returns."""
        self.stop("cancelled")
        self.end()

    def end(self) -> None:
        """Release all resources; a response that is not settled by now has failed."""
        self._record_metrics()
        super().end()
        is_unsettled, self._state = self._state == "in_progress", "settled"
        if is_unsettled and self._is_left_to_others:
            self._locked = None  # the lock belongs to the response
            return
        if is_unsettled and self.before_settle is not None:
            self.before_settle()
        if is_unsettled or self._locked is not None:
            self._service.submit(self._release, self._failure_status if is_unsettled else None)

    def _release(self, status: str | None) -> None:
        """Store the failure of an unsettled response, and unlock its conversation."""
        if status is not None:
            node = self._service.nodes.parse_node(self.draft.key)
            self._service.responses.fail(node, status, self._failure_cause)
        self._unlock()

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another server continues this response, because this one is stopping or was too slow."""
        is_left = self._stop_status == "failed" or self._is_lost
        is_background: bool = self.draft.request_fields["background"]
        return is_left and is_background and self._service.claims is not None

    @property
    def _has_reader(self) -> bool:
        if self.draft.request_fields["background"]:
            return not self._is_left_to_others
        return super()._has_reader

    def _record_metrics(self) -> None:
        if self in self._service.running:
            history = self.draft.history
            stored_on = "nothing" if history.node is None else "response"
            count(
                "server_responses_total",
                memory=stored_on if history.conversation is None else "conversation",
                status=self._result_fields["status"] if self.is_complete else self._failure_status,
            )

    def _handle_wait(self) -> None:
        # On a database of several servers this would be a round trip, and useless for its client.
        if self._state == "unwritten" and self._service.claims is None:
            self.begin()
        super()._handle_wait()

    def _add_compaction(self) -> list[StreamEvent]:
        draft, writer = self.draft, self._writer
        if draft.compacted is None:
            return []
        id = writer.next_id("compaction")
        item = build_compaction_item(self._service.cipher, id, draft.compacted.items)
        return list(writer.add_item(item, progress_event="response.compaction.compacting"))

    def _build_entry(self) -> ResponseEntry:
        draft, history = self.draft, self.draft.history
        return ResponseEntry(
            key=draft.key,
            parent=history.node,
            conversation=history.conversation,
            request_json=self._request_json,
            input=encode(self._build_input()),
            body=encode(draft.prompt.body) if draft.is_body_stored else None,
            idempotency_key=draft.idempotency_key,
            background=bool(draft.request_fields["background"]),
        )

    def _build_input(self) -> list[Item]:
        """Return the input to store, including a history that is only in memory."""
        draft = self.draft
        return (
            [*draft.history.context.list_items(), *draft.input]
            if draft.history.in_memory
            else draft.input
        )

    def begin(self) -> None:
        """Store the response as in progress or queued, before its client receives the id."""
        if self.draft.store:
            entry, barrier = self._build_entry(), has_compaction(self.draft.input)
            queued = self._result_fields is response_object.QUEUED_FIELDS
            self._service.responses.begin(entry, barrier=barrier, queued=queued)
            self._state = "in_progress"

    async def _complete(self) -> None:
        draft, writer = self.draft, self._writer
        self._result_fields = response_object.build_finished_fields(
            reason=writer.incomplete_reason,
            now=int(self._service.clock()),
            usage=response_object.build_usage(self._count_usage()),
        )
        self._service.remember_reasoning(writer.items, writer.reasoning_texts)
        result, output = encode(self._result_fields), encode(writer.items)
        if draft.store:
            if self.before_settle is not None:
                self.before_settle()
            await self._service.run(self._store_result, result, output)
        if self._unstored is not None:
            id: str = draft.request_fields["id"]
            self._unstored.store(id, None if draft.store else self._build_context(len(output)))
        self._response_json = join_response(self._request_json, result, output)
        await super()._complete()

    def _store_result(self, result_json: bytes, output: bytes) -> None:
        """Store the result, and unlock the conversation before the client can continue it."""
        try:
            self._save_result(result_json, output)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        """Unlock the conversation, unless that was done before."""
        if self._locked is not None:
            self._service.conversations.release(self._locked)
            self._locked = None

    def _save_result(self, result_json: bytes, output: bytes) -> None:
        entry = self._build_entry()
        context = self._build_context(len(entry.input) + len(output))
        barrier = has_compaction(context.items)
        status = self._result_fields["status"]
        outcome = ResponseResult(status, result_json, output, barrier, context.own_tokens)
        stored = self._service.responses
        save = stored.finish if self._state == "in_progress" else stored.record
        is_stored = save(entry, outcome)
        self._state = "settled"
        if not is_stored and self._service.claims is not None:
            self._is_lost = True
            raise errors.RESPONSE_LOST()
        if is_stored:
            self._service.nodes.cache_context(
                self._service.nodes.parse_node(self.draft.key), self.draft.history.node, context
            )

    def _build_context(self, size: int) -> Context:
        """Return the context that ends with this response, which adds ``size`` bytes to it."""
        draft, before = self.draft, self.draft.history.context
        items = [*draft.input, *self._writer.items]
        if has_compaction(items):
            return self._build_compacted_context(items, size)
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

    def _build_compacted_context(self, items: Sequence[Item], size: int) -> Context:
        retained = slice_from_compaction(items)
        model_items = self._service.expand_items(retained)
        return extend_context(EMPTY_CONTEXT, retained, model_items, count_items(model_items), size)

    def _build_response(self, output: list[Any]) -> dict[str, Any]:
        return {**self.draft.request_fields, **self._result_fields, "output": output}

    def _finish(self) -> Frames:
        if self.is_complete:
            return self._encode(build_last_events(self._build_response(self._writer.items)))
        self._result_fields = response_object.build_failed_fields(
            self._failure_status, self._failure_cause
        )
        return self._encode(build_last_events(self._build_response([])))


def build_repeated_events(response: dict[str, Any]) -> list[StreamEvent]:
    """Return the events of a finished response whose request was repeated, with each item in one piece."""
    started: dict[str, Any] = {**response, **response_object.IN_PROGRESS_FIELDS, "output": []}
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


def _build_writer(service: ServerState, draft: ResponseDraft) -> OutputWriter:
    body = draft.prompt.body
    encrypted = "reasoning.encrypted_content" in (body.get("include") or ())
    reasoning: Mapping[str, Any] = body.get("reasoning") or {}
    return OutputWriter(
        draft.key,
        len(draft.input),
        encrypt=service.cipher.encrypt,
        encrypt_reasoning=encrypted,
        show_summary=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
    )
