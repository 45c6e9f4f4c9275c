"""The endpoint ``POST /v1/chat/completions``, with the form of its completions, complete or in chunks.

Reasoning is sent as ``reasoning_content``, which is not part of OpenAI's API but common among open
servers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from kedge._internal.json_text import encode
from kedge.server import errors
from kedge.server.http import get_service, read_checked
from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, ModelUsage, OutputEvent
from kedge.server.output_writer import OutputWriter
from kedge.server.prepare import ResponseDraft, prepare_stateless
from kedge.server.request_log import RECORD_KEY
from kedge.server.response_run import Emit, Frames, Generation, respond_stateless
from kedge.server.routes.chat_requests import CONTEXT_LENGTH_EXCEEDED, parse_request
from kedge.server.schema.validators import get_object
from kedge.server.sse import DONE_FRAME, encode_data
from kedge.server.state import ServerState

DELTA_MEMBERS: Mapping[str, str] = {
    "text": "content",
    "refusal": "refusal",
    "reasoning": "reasoning_content",
}
"""The member of a delta or a message with the text of this kind of item."""

CALL_FORMS: Mapping[str, tuple[str, str]] = {
    "function_call": ("function", "arguments"),
    "custom_tool_call": ("custom", "input"),
}
"""For each type of call: its name in this API, and the member with its text."""

FINISH_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


class CompletionRun(Generation):
    """One completion while it is written; with ``include_usage`` a stream ends with its usage."""

    def __init__(self, request: Request, draft: ResponseDraft, *, include_usage: bool) -> None:
        id = f"chatcmpl-{draft.key}"
        writer = OutputWriter(draft.key, len(draft.input))
        super().__init__(get_service(request), draft, writer, id, request.scope.get(RECORD_KEY))
        self._header = {
            "id": id,
            "created": int(self.service.clock()),
            "model": draft.prompt.body["model"],
            "service_tier": "default",
            "system_fingerprint": None,
        }
        self._include_usage = include_usage
        self._kind = "text"
        self._call_index = -1

    async def _start(self, emit: Emit) -> None:
        if self.is_streamed:
            delta = {"role": "assistant", "content": "", "refusal": None}
            await emit([self._encode_delta(delta)])

    def _render(self, events: object, piece: OutputEvent) -> list[bytes]:
        match piece:
            case ItemOpened(kind=kind):
                self._kind = kind
                if kind in CALL_FORMS:
                    return [self._encode_call_start(self._writer.items[-1])]
            case ItemDelta(text=text, logprobs=logprobs) if text or logprobs:
                return [self._encode_delta(self._build_delta(text), logprobs=logprobs)]
            case ItemClosed(annotations=annotations):
                citations = list_citations(annotations)
                if citations:
                    return [self._encode_delta({"annotations": citations})]
            case _:
                pass
        return []

    def _encode_call_start(self, item: Mapping[str, Any]) -> bytes:
        self._call_index += 1
        kind, member = CALL_FORMS[item["type"]]
        call = {"index": self._call_index, "id": item["call_id"], "type": kind}
        call[kind] = {"name": item["name"], member: ""}
        return self._encode_delta({"tool_calls": [call]})

    def _build_delta(self, text: str) -> dict[str, Any]:
        if self._kind not in CALL_FORMS:
            return {DELTA_MEMBERS[self._kind]: text}
        kind, member = CALL_FORMS[self._kind]
        return {"tool_calls": [{"index": self._call_index, kind: {member: text}}]}

    def _finish(self) -> Frames:
        """Return the last chunks: the finish reason, and the usage if it was requested."""
        if self.failure is not None:
            return [encode_data(self.failure.body()), DONE_FRAME]
        frames = [self._encode_delta({}, finish_reason(self._writer))]
        if self._include_usage:
            usage = format_usage(self._count_usage())
            frames.append(self._encode_chunk({"choices": [], "usage": usage}))
        return [*frames, DONE_FRAME]

    def serialize(self) -> bytes:
        """Return the complete completion as JSON."""
        items = self._writer.items
        texts = [item["content"][0] for item in items if item["type"] == "message"]
        logprobs = [token for text in texts for token in text.get("logprobs", ())]
        choice = {
            "index": 0,
            "message": build_message(self._writer),
            "logprobs": format_logprobs(logprobs),
            "finish_reason": finish_reason(self._writer),
        }
        completion = {
            **self._header,
            "object": "chat.completion",
            "choices": [choice],
            "usage": format_usage(self._count_usage()),
        }
        return encode(completion)

    def _encode_delta(
        self,
        delta: Mapping[str, Any],
        reason: str | None = None,
        logprobs: Sequence[Mapping[str, Any]] = (),
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": format_logprobs(logprobs),
            "finish_reason": reason,
        }
        members: dict[str, Any] = {"choices": [choice]}
        if self._include_usage:
            members["usage"] = None
        return self._encode_chunk(members)

    def _encode_chunk(self, members: Mapping[str, Any]) -> bytes:
        chunk = {**self._header, "object": "chat.completion.chunk", **members}
        return encode_data(chunk)


def finish_reason(writer: OutputWriter) -> str:
    """Return the finish reason of the answer."""
    if writer.incomplete_reason is not None:
        return FINISH_REASONS[writer.incomplete_reason]
    if any(item["type"] in CALL_FORMS for item in writer.items):
        return "tool_calls"
    return "stop"


def build_message(writer: OutputWriter) -> dict[str, Any]:
    """Build one message from the output items."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
    }
    calls: list[dict[str, Any]] = []
    for item in writer.items:
        if item["type"] == "message":
            part = item["content"][0]
            if part["type"] == "refusal":
                message["refusal"] = (message["refusal"] or "") + part["refusal"]
            else:
                message["content"] = (message["content"] or "") + part["text"]
            message["annotations"] += list_citations(part.get("annotations", ()))
        elif item["type"] == "reasoning":
            text = "".join(part["text"] for part in item["summary"])
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif item["type"] in CALL_FORMS:
            kind, member = CALL_FORMS[item["type"]]
            call = {"id": item["call_id"], "type": kind}
            calls.append(call | {kind: {"name": item["name"], member: item[member]}})
    if calls:
        message["tool_calls"] = calls
    return message


def format_logprobs(logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Format log probabilities, which have the same members in this API and in the Responses API."""
    if not logprobs:
        return None
    return {"content": list(logprobs), "refusal": None}


def list_citations(annotations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the citations of web pages, the only annotations that this API has, in its form."""
    citations: list[dict[str, Any]] = []
    for annotation in annotations:
        if annotation.get("type") == "url_citation":
            members = {name: value for name, value in annotation.items() if name != "type"}
            citations.append({"type": "url_citation", "url_citation": members})
    return citations


def format_usage(usage: ModelUsage) -> dict[str, Any]:
    """Format the token usage."""
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def create(request: Request) -> Any:
    """Answer ``POST /v1/chat/completions``, complete or as a stream."""
    checked = await read_checked(request, parse_request)
    draft = await _prepare(get_service(request), checked.result, is_long=checked.is_long)
    include_usage = bool(get_object(checked.body, "stream_options").get("include_usage"))
    build_run = partial(CompletionRun, request, draft, include_usage=include_usage)
    return await respond_stateless(request, draft, build_run)


async def _prepare(
    service: ServerState, body: Mapping[str, Any], *, is_long: bool
) -> ResponseDraft:
    """Prepare the request; errors of all endpoints get the messages of this API."""
    model: str = body["model"]
    try:
        return await prepare_stateless(service, body, is_long=is_long, automatic_cache=True)
    except errors.ApiError as error:
        if error.template is errors.MODEL_NOT_FOUND and model:
            raise errors.MODEL_NOT_ACCESSIBLE(model=model) from None
        if error.template is not errors.CONTEXT_TOO_LONG:
            raise
        raise CONTEXT_LENGTH_EXCEEDED(window=service.find_model(model).window) from None
