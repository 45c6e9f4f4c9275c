"""The effects of faults on requests, on the history that the model sees, on responses, and on the order of events.

Faults of the connection are in ``middleware``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Scope

from kedge.server import errors
from kedge.server.coherence import CALL_TYPES, OUTPUT_TYPES
from kedge.server.http import JSON_HEADERS, build_error_response
from kedge.server.request_log import RECORD_KEY, RecordedRequest
from kedge.server.routes.message_errors import INVALID_SIGNATURE
from kedge.server.routes.message_schema import THINKING_TYPES
from kedge.server.sse import DONE_FRAME, FRAME_END, encode_data, encode_event
from kedge.text.json_text import decode, encode
from kedge.tokens import count_items


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        name: Its kind.
        value: Its value, if its kind has one.
        options: Its options by name.
        times: The number of requests that it applies to; None for all.
    """

    name: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    times: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))


Rejections = Mapping[str, tuple[int, Mapping[str, Any]]]
"""The status and the body with which servers reject a request; ``{id}`` is the requested id."""


def _error_body(
    message: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    return errors.ApiError(message, param=param, code=code).body()


NOT_FOUND: Rejections = {
    "openai": (400, errors.PREVIOUS_RESPONSE_NOT_FOUND(id="{id}").body()),
    "vllm": (404, _error_body("Response with id '{id}' not found.", "response_id", 404)),
    "ogx": (404, {"detail": "Response '{id}' not found."}),
    "smg": (
        400,
        _error_body(
            "Previous response with id '{id}' not found.", code="previous_response_not_found"
        ),
    ),
    "xai": (404, {"code": "not-found", "error": errors.ZERO_DATA_RETENTION().message}),
    # No real server uses this message, so only the code can be recognized.
    "code": (
        400,
        _error_body("We have no recollection of that.", code="previous_response_not_found"),
    ),
}
"""The rejection of an unknown previous response, by server."""

UNSUPPORTED: Rejections = {
    "llama.cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "llama.cpp does not support 'previous_response_id'.",
                "type": "invalid_request_error",
            }
        },
    ),
    "zdr": (400, errors.ZERO_DATA_RETENTION().body()),
}
"""The rejection of any previous response, by servers that support none."""


def _reject(rejection: tuple[int, Mapping[str, Any]], id: str = "") -> Response:
    """Build the response for this id, which is a valid identifier."""
    status, body = rejection
    return Response(encode(body).replace(b"{id}", id.encode()), status, JSON_HEADERS)


StreamEvent = dict[str, Any]


StreamStep = Callable[[StreamEvent | None], Iterable[StreamEvent]]
"""A change to a stream: returns the events that replace one, and those that are delayed for None, at its end."""


def _is_selected(event: StreamEvent, only: str | None) -> bool:
    """Return whether an event has this type; for chunks of a chat completion, that of their object."""
    return only in (None, str(event.get("type") or event.get("object") or ""))


def duplicate_events(only: str | None) -> StreamStep:
    """Return a step that sends events twice."""

    def process(event: StreamEvent | None) -> Iterable[StreamEvent]:
        return () if event is None else (event,) * (2 if _is_selected(event, only) else 1)

    return process


def reorder_events(only: str | None) -> StreamStep:
    """Return a step that swaps an event with the next one."""
    pending: list[StreamEvent] = []

    def process(event: StreamEvent | None) -> Iterable[StreamEvent]:
        if event is not None and not pending and _is_selected(event, only):
            pending.append(event)
            return ()
        delayed = tuple(pending)
        pending.clear()
        return delayed if event is None else (event, *delayed)

    return process


def repeat_deltas() -> StreamStep:
    """Return a step that sends the deltas of a chat completion again after its finish reason."""
    deltas: list[StreamEvent] = []

    def process(event: StreamEvent | None) -> Iterable[StreamEvent]:
        if event is None:
            return ()
        choices: list[StreamEvent] = event.get("choices") or []
        if any(choice.get("finish_reason") for choice in choices):
            repeated = tuple(deltas)
            deltas.clear()
            return (event, *repeated)
        if any(choice["delta"].get("content") for choice in choices):
            deltas.append(event)
        return (event,)

    return process


class FrameRewriter:
    """A parser of frames that changes each event in place, and applies steps to the events."""

    def __init__(
        self, steps: Sequence[StreamStep], edit: Callable[[StreamEvent], None] | None = None
    ) -> None:
        self._steps = steps
        self._edit = edit
        self._buffer = b""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Yield the frames that are complete after these bytes."""
        *complete, self._buffer = (self._buffer + data).split(FRAME_END)
        for block in complete:
            frame = block + FRAME_END
            if frame == DONE_FRAME:
                yield from self.flush()
                yield frame
            elif not self._steps and self._edit is None:
                yield frame
            else:
                event = decode(block.partition(b"data: ")[2])
                if self._edit is not None:
                    self._edit(event)
                yield from map(encode_frame, self._apply_steps([event], self._steps))

    def flush(self) -> Iterable[bytes]:
        """Yield the events that the steps delayed, once, at the end."""
        steps, self._steps = self._steps, ()
        for number, step in enumerate(steps):
            yield from map(encode_frame, self._apply_steps(step(None), steps[number + 1 :]))

    def _apply_steps(
        self, events: Iterable[StreamEvent], steps: Sequence[StreamStep]
    ) -> Iterable[StreamEvent]:
        for step in steps:
            events = [out for event in events for out in step(event)]
        return events


def encode_frame(event: StreamEvent) -> bytes:
    """Encode one event as the server does."""
    return encode_event(event) if "type" in event else encode_data(event)


Body = dict[str, Any]

MAX_WITHHELD_CALL_IDS = 10_000


RESPONSES_PATH = "/v1/responses"
"""The endpoint that stores responses."""


class FaultedRequest(Struct):
    """A request that faults may change: its bytes, its JSON, and the faults applied so far.

    ``withheld_call_ids`` are the call ids that responses omitted, by the ids of their items.
    """

    scope: Scope
    raw: bytes
    body: Body
    consume: Callable[[Fault], None]
    withheld_call_ids: dict[str, str]
    applied_faults: set[str] = set()

    @property
    def is_stateful(self) -> bool:
        """Whether the endpoint stores responses."""
        return self.scope["path"] == RESPONSES_PATH

    def record_fault(self, fault: Fault) -> Fault:
        """Record, once, that a fault changes this request or its response."""
        if fault.name not in self.applied_faults:
            self.applied_faults.add(fault.name)
            self.consume(fault)
        return fault

    def update_access_record(self) -> None:
        """Set the body that the client sent in the record of this request."""
        record: RecordedRequest | None = self.scope.get(RECORD_KEY)
        if record is not None:
            record.raw, record.body = self.raw, self.body

    def build_request_body(self) -> bytes:
        """Return the body for the server, with the call ids of outputs that name an item id."""
        input_items = self.body.get("input")
        if not self.withheld_call_ids or not isinstance(input_items, list):
            return self.raw
        reused = self.withheld_call_ids.get(str(self.body.get("previous_response_id")))
        if reused is not None:
            return encode(self.body | {"previous_response_id": reused})
        # A call that the client replays with the item's id needs no change.
        replayed = {
            str(item.get("call_id")) for item in _select_dicts(self.body["input"]) if _is_call(item)
        }
        items = [self._restore_call_id(item, replayed) for item in cast("list[Any]", input_items)]
        with suppress(ValueError):  # the server rejects the original body itself
            return encode(self.body | {"input": items})
        return self.raw

    def _restore_call_id(self, item: Any, replayed: set[str]) -> Any:
        if not isinstance(item, dict):
            return item
        members = cast("Body", item)
        output = OUTPUT_TYPES.get(str(members.get("type")))
        call_id = str(output and members.get(output.key))
        name = None if call_id in replayed else self.withheld_call_ids.get(call_id)
        return members if output is None or name is None else members | {output.key: name}


def reject_with_status(fault: Fault, request: FaultedRequest) -> Response:
    """Reject a request with the status of the fault."""
    after = fault.options["retry_after"]
    templates = {
        429: errors.RATE_LIMITED(seconds=f"{after or 0:g}"),
        500: errors.INTERNAL_ERROR(),
    }
    error = templates.get(fault.value) or errors.ApiError(
        "The server rejects this request because a fault is active.",
        status=fault.value,
    )
    if after is not None:
        error.headers["retry-after"] = f"{after:g}"
    return build_error_response(request.scope, error)


def forget_all(fault: Fault, request: FaultedRequest) -> None:
    """Delete all stored responses, and do not replace the response."""
    if request.is_stateful:
        request.record_fault(fault)
        request.scope["app"].state.service.forget()


def reject_previous_response(fault: Fault, request: FaultedRequest) -> Response | None:
    """Reject a request that continues a response."""
    if not request.is_stateful or request.body.get("previous_response_id") is None:
        return None
    return _reject(UNSUPPORTED[fault.value])


def reject_empty_input(_: Fault, request: FaultedRequest) -> Response | None:
    """Reject a request with empty input."""
    if not request.is_stateful or request.body.get("input") not in ([], ""):
        return None
    return build_error_response(request.scope, errors.INPUT_REQUIRED())


def reject_encrypted_reasoning(_: Fault, request: FaultedRequest) -> Response | None:
    """Reject a request with encrypted reasoning."""
    for item in _select_dicts(request.body.get("input")):
        if item.get("type") == "reasoning" and item.get("encrypted_content"):
            content = f"{item['encrypted_content'][:4]}..."
            return build_error_response(
                request.scope, errors.INVALID_ENCRYPTED_CONTENT(content=content)
            )
    for index, message in enumerate(_select_dicts(request.body.get("messages"))):
        for part, block in enumerate(_select_dicts(message.get("content"))):
            if block.get("type") in THINKING_TYPES:
                return build_error_response(
                    request.scope, INVALID_SIGNATURE(index=index, part=part)
                )
    return None


def reject_output_format(_: Fault, request: FaultedRequest) -> Response | None:
    """Reject a request for structured output."""
    for name, member in (("text", "format"), ("response_format", ""), ("output_config", "format")):
        for container in _select_dicts([request.body.get(name)]):
            forms = _select_dicts([container.get(member, container)])
            if any(form.get("type") == "json_schema" for form in forms):
                param = f"{name}.{member}" if member else name
                return build_error_response(request.scope, errors.FORMAT_NOT_SUPPORTED(param=param))
    return None


def _select_dicts(value: object) -> list[Body]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _is_call(item: Body) -> bool:
    return str(item.get("type")) in CALL_TYPES


def remove_call_ids(fault: Fault, request: FaultedRequest, event: Body) -> None:
    """Remove the id of every call, under the key of its API, or empty it."""
    for call, key in _iter_calls(event):
        if not call.get(key):
            continue
        if request.is_stateful:
            request.withheld_call_ids[call["id"]] = call[key]
            if len(request.withheld_call_ids) > MAX_WITHHELD_CALL_IDS:
                del request.withheld_call_ids[next(iter(request.withheld_call_ids))]
        del call[key]
        if fault.name == "empty_call_id":
            call[key] = ""


def _iter_calls(event: Body) -> Iterable[tuple[Body, str]]:
    """Yield the calls of an event or a complete response, each with the key of its id."""
    response: Body = event.get("response", event)
    for item in _select_dicts([event.get("item"), *_select_dicts(response.get("output"))]):
        if _is_call(item):
            yield item, "call_id"
    for choice in _select_dicts(response.get("choices")):
        for message in _select_dicts([choice.get("delta"), choice.get("message")]):
            yield from ((call, "id") for call in _select_dicts(message.get("tool_calls")))
    for block in _select_dicts(
        [event.get("content_block"), *_select_dicts(response.get("content"))]
    ):
        if block.get("type") == "tool_use":
            yield block, "id"


def omit_call_names(_: Fault, __: FaultedRequest, event: Body) -> None:
    """Remove the names of calls."""
    for call, _key in _iter_calls(event):
        for holder in _select_dicts([call, call.get("function")]):
            holder.pop("name", None)


def omit_response_id(_: Fault, __: FaultedRequest, event: Body) -> None:
    """Remove the id of the response."""
    is_chunk = "choices" in event  # a chunk of a chat completion is the response itself
    members = [event] if is_chunk else [event.get("response"), event.get("message")]
    for holder in _select_dicts(members):
        holder.pop("id", None)


def omit_output_index(_: Fault, __: FaultedRequest, event: Body) -> None:
    """Remove the index of the output item."""
    event.pop("output_index", None)


def omit_echo(fault: Fault, _: FaultedRequest, event: Body) -> None:
    """Remove the response or conversation that the response continues."""
    echo, response = fault.options["echo"], event.get("response", {})
    for name in ("previous_response_id", "conversation"):
        if echo == "missing" and response.get(name):
            del response[name]
        elif echo == "no" or (echo == "late" and response.get("status") != "in_progress"):
            response |= {name: None} if name in response else {}


CONSTANT_USAGE = 10


def change_usage(fault: Fault, request: FaultedRequest, event: Body) -> None:
    """Change the reported usage."""
    response = event.get("response", event)
    usage = cast("Body | None", response.get("usage"))
    if not request.is_stateful or not usage:
        return
    match fault.value:
        case "none":
            response["usage"] = None
            return
        case "constant":
            tokens = CONSTANT_USAGE
        case "new":
            tokens = count_items(_select_dicts(request.body.get("input")))
        case "trimmed":
            input_items = _select_dicts(request.body.get("input"))
            tokens = (
                usage["input_tokens"]
                - count_items(input_items)
                + count_items(_map_texts(input_items, str.strip))
            )
        case _:
            tokens = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    usage["input_tokens"] = tokens
    usage["total_tokens"] = tokens + usage["output_tokens"]


TEXT_MEMBERS = frozenset({"text", "delta", "content"})


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each text of a message changed."""
    if isinstance(value, list):
        return [_map_texts(each, change) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    return {
        name: change(each)
        if name in TEXT_MEMBERS and isinstance(each, str)
        else _map_texts(each, change)
        for name, each in cast("Body", value).items()
    }


def change_completed(fault: Fault, _: FaultedRequest, event: Body) -> None:
    """Change the completed event so that it contradicts the events before it."""
    if event.get("type") != "response.completed":
        return
    output = cast("list[Body]", event["response"]["output"])
    if fault.value == "missing":
        del output[-1:]
    for item in output:
        if fault.value == "arguments" and "arguments" in item:
            item["arguments"] = '{"changed":true}'
        for part in _select_dicts(item.get("content")) if fault.value == "text" else ():
            if "text" in part:
                part["text"] += " (changed)"


LONE_SURROGATE = "\ud83d"
_SENTENCE_END = re.compile(r"[.!?]")


def break_surrogates(_: Fault, __: FaultedRequest, event: Body) -> None:
    """Put half of a surrogate pair at the end of each sentence of the answer."""
    if "arguments" not in str(event.get("type")):
        event.update(_map_texts(event, lambda text: _SENTENCE_END.sub(LONE_SURROGATE, text)))


def report_unstored(_: Fault, __: FaultedRequest, event: Body) -> None:
    """Report that the response is not stored."""
    if "store" in event.get("response", {}):
        event["response"]["store"] = False


REUSED_ID = "resp_reused"


def reuse_response_id(_: Fault, request: FaultedRequest, event: Body) -> None:
    """Give the response the id of every other."""
    response = event.get("response", {})
    if request.is_stateful and response.get("id"):
        request.withheld_call_ids[REUSED_ID] = response["id"]
        response["id"] = REUSED_ID


def translate_not_found(
    fault: Fault | None, request: FaultedRequest, body: Body
) -> Response | None:
    """Replace the error of a missing previous response by that of another server."""
    code = cast("Body", body.get("error") or {}).get("code")
    if fault is None or code != errors.PREVIOUS_RESPONSE_NOT_FOUND.code:
        return None
    rejection = NOT_FOUND[request.record_fault(fault).value]
    return _reject(rejection, request.body["previous_response_id"])
