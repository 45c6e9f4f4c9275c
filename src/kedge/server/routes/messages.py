"""The endpoints ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, with the form of messages and events.

A prompt is the tools, the system text and the messages, in this order, with ``cache_control`` breakpoints. A change in
a block changes the prefix at every later breakpoint; a change of ``tool_choice`` or ``thinking`` changes the messages
only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kedge._internal.json_text import encode
from kedge._internal.responsive import compute
from kedge.server import models
from kedge.server.http import get_service, read_checked, respond_json
from kedge.server.models import ModelUsage, OutputEvent
from kedge.server.object_forms import Item
from kedge.server.output_writer import OutputWriter
from kedge.server.prepare import ResponseDraft, prepare_stateless
from kedge.server.prompt_cache import EMPTY_DIGEST, Breakpoint, hash_items
from kedge.server.request_log import RECORD_KEY, REQUEST_ID_KEY
from kedge.server.response_run import Emit, Frames, Generation, respond_stateless
from kedge.server.routes import message_errors as errors
from kedge.server.routes import message_requests as requests
from kedge.server.routes.message_errors import error_body
from kedge.server.sse import encode_event
from kedge.server.state import ServerState
from kedge.server.token_counting import count_items, count_json, count_text
from kedge.usage.tokens import find_min_tokens

Body = Mapping[str, Any]

MAX_BREAKPOINTS = 4
LIFETIMES: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}


class _Segment(Struct, frozen=True):
    """One tool, system block or content block; a content block has the number of its message."""

    content: Mapping[str, Any]
    section: str
    number: int
    role: str = ""


def find_breakpoints(body: Body, segments: Sequence[_Segment]) -> list[tuple[int, float]]:
    """Return the index and the lifetime of each marked segment; ``cache_control`` of the request marks the last.

    Raises:
        ApiError: If there are too many breakpoints, or a longer lifetime follows a shorter one.
    """
    controls = [segment.content.get("cache_control") for segment in segments]
    if body.get("cache_control"):
        controls[-1] = controls[-1] or body["cache_control"]
    marked = [
        (index, LIFETIMES[control.get("ttl") or "5m"])
        for index, control in enumerate(controls)
        if control
    ]
    if len(marked) > MAX_BREAKPOINTS:
        raise errors.TOO_MANY_BREAKPOINTS(count=len(marked))
    lifetimes = [lifetime for _, lifetime in marked]
    if lifetimes != sorted(lifetimes, reverse=True):
        raise errors.BREAKPOINT_ORDER()
    return marked


def apply_breakpoints(
    service: ServerState,
    body: Body,
    draft: ResponseDraft,
    segments: Sequence[_Segment],
    marked: Sequence[tuple[int, float]],
) -> ResponseDraft:
    """Return a prepared request with the tokens that its breakpoints read from the cache and write to it."""
    tools = [requests.convert_tool(tool) for tool in body.get("tools") or ()]

    def count_prefix(index: int) -> int:
        """Count the tokens of the request up to one of its segments."""
        segment = segments[index]
        if segment.section == "tools":
            return count_json(tools[: segment.number + 1])
        if segment.section == "system":
            system = requests.normalize_content(body["system"])[: segment.number + 1]
            tool_tokens = count_json(tools) if tools else 0
            return tool_tokens + count_text(requests.join_system(system))
        return draft.usage.input - count_items(iter_items_after(index))

    def iter_items_after(index: int) -> Iterator[Item]:
        for segment in segments[index + 1 :]:
            message = requests.MergedMessage(segment.role, 0, [(0, 0, segment.content)])
            yield from requests.iter_items(message, service.cipher.decrypt)

    breakpoints = [Breakpoint(index, count_prefix(index), seconds) for index, seconds in marked]
    cached, written = service.prompt_cache.use_breakpoints(
        list(_hash_segments(body, segments)), breakpoints, find_min_tokens(body["model"])
    )
    return draft._replace(usage=replace(draft.usage, cached=cached, cache_write=written))


def _list_segments(body: Body) -> list[_Segment]:
    segments = [_Segment(tool, "tools", n) for n, tool in enumerate(body.get("tools") or ())]
    system = requests.normalize_content(body.get("system") or ())
    segments += [_Segment(block, "system", number) for number, block in enumerate(system)]
    for number, message in enumerate(body["messages"]):
        segments += [
            _Segment(block, "messages", number, message["role"])
            for block in requests.normalize_content(message["content"])
        ]
    return segments


def _hash_segments(body: Body, segments: Sequence[_Segment]) -> Iterator[bytes]:
    digest = next(hash_items(EMPTY_DIGEST, [{"model": body["model"]}]))
    section = ""
    for segment in segments:
        if segment.section != section:
            section = segment.section
            start: dict[str, Any] = {"section": section}
            if section == "messages":
                start["tool_choice"] = body.get("tool_choice")
                start["thinking"] = body.get("thinking")
            digest = next(hash_items(digest, [start]))
        digest = next(hash_items(digest, [{"role": segment.role, **segment.content}]))
        yield digest


MessageEvent = dict[str, Any]

STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}

BLOCK_STARTS: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "refusal": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTA_TYPES: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "function_call": ("input_json_delta", "partial_json"),
    "custom_tool_call": ("input_json_delta", "partial_json"),
}


class MessageRun(Generation):
    """One message while it is written."""

    def __init__(self, request: Request, draft: ResponseDraft, body: Body) -> None:
        id = f"msg_{draft.key}"
        service = get_service(request)
        self._show_thinking = requests.is_thinking_shown(body)
        self._include_thinking = requests.is_thinking_enabled(body)
        writer = OutputWriter(
            draft.key,
            len(draft.input),
            encrypt=service.cipher.encrypt if self._include_thinking else None,
            encrypt_reasoning=True,
            show_summary=self._show_thinking,
            call_prefix="toolu",
        )
        super().__init__(service, draft, writer, id, request.scope.get(RECORD_KEY))
        model: str = body["model"]
        self._header = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._request_id: str | None = request.scope.get(REQUEST_ID_KEY)
        self._kind = ""
        """The kind of the open item; empty if there is none, or if it is not part of the message."""
        self._index = -1

    async def _start(self, emit: Emit) -> None:
        """Emit the first events, with the empty message."""
        if not self.is_streamed:
            return
        empty: MessageEvent = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = format_usage(replace(self._draft.usage, output=1))
        start = {"type": "message_start", "message": {**self._header, **empty, "usage": usage}}
        await emit([encode_event(start), encode_event({"type": "ping"})])

    def _render(self, events: object, piece: OutputEvent) -> list[bytes]:
        return list(map(encode_event, self._iter_events(piece)))

    def _iter_events(self, piece: OutputEvent) -> Iterator[MessageEvent]:
        if isinstance(piece, models.ItemOpened):
            if piece.kind == "reasoning" and not self._include_thinking:
                self._kind = ""
                return
            self._kind = piece.kind
            self._index += 1
            block = _build_block_start(self._kind, self._writer.items[-1])
            yield self._block_event("content_block_start", content_block=block)
        elif self._kind and isinstance(piece, models.ItemDelta):
            if piece.text and (self._show_thinking or self._kind != "reasoning"):
                kind, member = DELTA_TYPES[self._kind]
                yield self._block_event(
                    "content_block_delta", delta={"type": kind, member: piece.text}
                )
        elif self._kind and isinstance(piece, models.ItemClosed | models.OutputTruncated):
            if self._kind == "reasoning":
                signature = self._writer.items[-1]["encrypted_content"]
                delta = {"type": "signature_delta", "signature": signature}
                yield self._block_event("content_block_delta", delta=delta)
            self._kind = ""
            yield self._block_event("content_block_stop")

    def _block_event(self, type: str, **members: Any) -> MessageEvent:
        return {"type": type, "index": self._index, **members}

    def _finish(self) -> Frames:
        """Return the last events, with the stop reason and the usage."""
        if self.failure is not None:
            return [encode_event(error_body(self.failure, self._request_id))]
        usage = format_usage(self._count_usage())
        delta = {"type": "message_delta", "delta": format_stop(self._writer), "usage": usage}
        return [encode_event(delta), encode_event({"type": "message_stop"})]

    def serialize(self) -> bytes:
        """Return the complete message as JSON."""
        content = [block for item in self._writer.items for block in self._iter_blocks(item)]
        end = {**format_stop(self._writer), "usage": format_usage(self._count_usage())}
        return encode({**self._header, "content": content, **end})

    def _iter_blocks(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        match item["type"]:
            case "message":
                part = item["content"][0]
                yield {"type": "text", "text": part.get("text") or part.get("refusal", "")}
            case "reasoning":
                if self._include_thinking:
                    text = "".join(part["text"] for part in item["summary"])
                    signature = item["encrypted_content"]
                    yield {"type": "thinking", "thinking": text, "signature": signature}
            case "function_call":
                yield {**_build_block_start(item["type"], item), "input": _parse_arguments(item)}
            case _:
                pass  # this API has no such block


def _build_block_start(kind: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    if kind in BLOCK_STARTS:
        return BLOCK_STARTS[kind]
    return {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": {}}


def _parse_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(item["arguments"] or "{}")
    except ValueError:
        raise errors.ARGUMENTS_NOT_OBJECT(name=item["name"]) from None
    if not isinstance(value, dict):
        raise errors.ARGUMENTS_NOT_OBJECT(name=item["name"])
    return cast("dict[str, Any]", value)


def format_stop(writer: OutputWriter) -> dict[str, Any]:
    """Return the stop reason and the stop sequence."""
    return {"stop_reason": _find_stop_reason(writer), "stop_sequence": writer.stop_sequence or None}


def _find_stop_reason(writer: OutputWriter) -> str:
    if writer.incomplete_reason is not None:
        return STOP_REASONS[writer.incomplete_reason]
    if any(item["type"] == "function_call" for item in writer.items):
        return "tool_use"
    parts = [part for item in writer.items for part in item.get("content", ())]
    if any(part["type"] == "refusal" for part in parts):
        return "refusal"
    if writer.stop_sequence:
        return "stop_sequence"
    return "end_turn"


def format_usage(usage: ModelUsage) -> dict[str, Any]:
    """Format the token usage; this API counts cached input separately."""
    return {
        "input_tokens": usage.input - usage.cached - usage.cache_write,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


class _ParsedMessages(NamedTuple):
    """A valid request: as one of the Responses API, its segments, and its breakpoints."""

    params: dict[str, Any]
    segments: Sequence[_Segment]
    marked: Sequence[tuple[int, float]]


def _parse_create(service: ServerState, version: str, body: dict[str, Any]) -> _ParsedMessages:
    """Validate and convert a request for a message, or raise the first ApiError."""
    params = requests.parse_request(body, service.cipher.decrypt, version)
    segments = _list_segments(body)
    return _ParsedMessages(params, segments, find_breakpoints(body, segments))


def _complete_draft(
    service: ServerState, body: Body, draft: ResponseDraft, parsed: _ParsedMessages
) -> ResponseDraft:
    """Return a prepared request with the tokens of its breakpoints, or raise the ApiError of its thinking."""
    if isinstance(draft.model, models.PracticeModel):  # other models may not have reasoned at all
        requests.check_thinking_blocks(body)
    if not parsed.marked:
        return draft
    return apply_breakpoints(service, body, draft, parsed.segments, parsed.marked)


async def create(request: Request) -> Any:
    """Answer ``POST /v1/messages``, complete or as a stream."""
    version = read_version(request)
    service = get_service(request)
    parse = partial(_parse_create, service, version)
    body, parsed, is_long = await read_checked(request, parse)
    if requests.is_thinking_enabled(body):
        service.cipher.require("thinking")
    draft = await prepare_stateless(service, parsed.params, is_long=is_long)
    complete = partial(_complete_draft, service, body, draft, parsed)
    draft = await compute(complete, is_long=is_long)
    return await respond_stateless(request, draft, partial(MessageRun, request, draft, body))


async def count_tokens(request: Request) -> Response:
    """Answer ``POST /v1/messages/count_tokens``."""
    read_version(request)
    service = get_service(request)
    parse = partial(requests.parse_count_request, decrypt=service.cipher.decrypt)
    checked = await read_checked(request, parse)
    draft = await prepare_stateless(service, checked.result, is_long=checked.is_long)
    return respond_json({"input_tokens": draft.usage.input})


def read_version(request: Request) -> str:
    """Return the API version of a request; reject a missing or unknown one."""
    version = request.headers.get("anthropic-version")
    if version is None:
        raise errors.VERSION_MISSING()
    if version not in requests.API_VERSIONS:
        raise errors.VERSION_UNKNOWN(version=version)
    return version
