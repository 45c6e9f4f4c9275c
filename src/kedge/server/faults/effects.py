"""The kinds of faults, with their effects on requests, on responses, and on the order of events.

The docstring of an effect is the description of its fault. Faults of the connection are in ``middleware``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, TypeVar, cast

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Scope

from kedge._internal.json_text import decode, encode
from kedge.server import errors
from kedge.server.coherence import CALL_TYPES, OUTPUT_TYPES
from kedge.server.http import JSON_HEADERS, build_error_response
from kedge.server.object_forms import list_input
from kedge.server.request_log import RECORD_KEY, RecordedRequest
from kedge.server.routes.message_errors import INVALID_SIGNATURE
from kedge.server.routes.message_schema import THINKING_TYPES
from kedge.server.sse import DONE_FRAME, FRAME_END, encode_data, encode_event
from kedge.usage.tokens import count_items


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


class FaultArgument(Struct, frozen=True):
    """The value of a fault or of an option: its placeholder in the docs, what it must be, parser, bounds, default."""

    placeholder: str
    expected: str
    parse: Callable[[str], Any]
    minimum: float = 0
    maximum: float = inf
    default: Any = None


class FaultKind(Struct, frozen=True):
    """One kind of fault: its description, its value, its options and its effects.

    The effects may be another response than the server's (``override``), a change of a response or of each event
    of its stream (``edit``), or a change of the order of events (``step``). ``middleware`` has the effects on the
    connection and on the history that the model sees.
    """

    description: str
    value: FaultArgument | None = None
    options: Mapping[str, FaultArgument] = {}
    effects: Mapping[str, Callable[..., Any]] = {}
    is_memory: bool = False
    """Whether it is a fault of memory: while one is active, the server does not identify itself."""


Effect = TypeVar("Effect", bound=Callable[..., Any])

KINDS: dict[str, FaultKind] = {}
"""Every kind of fault, by name."""


def register(
    name: str,
    effect: str,
    value: FaultArgument | None = None,
    options: Mapping[str, FaultArgument] | None = None,
    **more: Any,
) -> Callable[[Effect], Effect]:
    """Register a kind of fault with the decorated effect, whose docstring describes it."""

    def decorate(function: Effect) -> Effect:
        description = " ".join((function.__doc__ or "").split())
        KINDS[name] = FaultKind(description, value, options or {}, {effect: function}, **more)
        return function

    return decorate


def _choice_argument(*choices: str, default: str | None = None) -> FaultArgument:
    return FaultArgument(
        placeholder="|".join(choices),
        expected=f"one of {', '.join(choices)}",
        parse={choice: choice for choice in choices}.__getitem__,
        default=default,
    )


def _parse_integer(text: str) -> int:
    return int(text) if text.isdecimal() else -1


COUNT_ARGUMENT = FaultArgument("N", "an integer, 0 or more", _parse_integer)
STATUS_ARGUMENT = FaultArgument("CODE", "an HTTP status from 400 to 599", _parse_integer, 400, 599)
TIMES_ARGUMENT = FaultArgument("K", "an integer, 1 or more", _parse_integer, 1)
SECONDS_ARGUMENT = FaultArgument("SECONDS", "a number of seconds up to 3600", float, 0, 3600)
ONLY_OPTION: Mapping[str, FaultArgument] = {"only": FaultArgument("TYPE", "a type", str)}

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
"""A change to a stream: returns the events that replace an event; for None, at the end, the delayed events."""


def _is_selected(event: StreamEvent, fault: Fault) -> bool:
    """Return whether a fault applies to an event of this type; chunks of a chat completion have an object instead."""
    event_type = str(event.get("type") or event.get("object") or "")
    return fault.options["only"] in (None, event_type)


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
        steps = self._steps
        self._steps = ()
        for number, step in enumerate(steps, start=1):
            later_steps = steps[number:]
            yield from map(encode_frame, self._apply_steps(step(None), later_steps))

    def _apply_steps(
        self, events: Iterable[StreamEvent], steps: Sequence[StreamStep]
    ) -> Iterable[StreamEvent]:
        for step in steps:
            events = [changed for event in events for changed in step(event)]
        return events


def encode_frame(event: StreamEvent) -> bytes:
    """Encode one event as the server does."""
    if "type" in event:
        return encode_event(event)
    return encode_data(event)


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

    @property
    def input_items(self) -> list[Body]:
        """The input of a Responses request; a text is one message."""
        return _select_dicts(list_input(self.body.get("input", [])))

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
            record.raw = self.raw
            record.body = self.body

    def build_request_body(self) -> bytes:
        """Return the body for the server, with the call ids of outputs that name an item id."""
        input_items = self.body.get("input")
        reused = self.withheld_call_ids.get(str(self.body.get("previous_response_id")))
        if reused is not None:
            return encode(self.body | {"previous_response_id": reused})
        if not self.withheld_call_ids or not isinstance(input_items, list):
            return self.raw
        # A call that the client replays with the item's id needs no change.
        replayed = {str(item.get("call_id")) for item in self.input_items if _is_call(item)}
        items = [self._restore_call_id(item, replayed) for item in cast("list[Any]", input_items)]
        with suppress(ValueError):  # the server rejects the original body itself
            return encode(self.body | {"input": items})
        return self.raw

    def _restore_call_id(self, item: Any, replayed: set[str]) -> Any:
        if not isinstance(item, dict):
            return item
        members = cast("Body", item)
        item_type = str(members.get("type"))
        if item_type not in OUTPUT_TYPES:
            return members
        _, key = OUTPUT_TYPES[item_type]
        item_id = str(members.get(key))
        if item_id in replayed or item_id not in self.withheld_call_ids:
            return members
        return members | {key: self.withheld_call_ids[item_id]}


def _select_dicts(value: object) -> list[Body]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _is_call(item: Body) -> bool:
    return str(item.get("type")) in CALL_TYPES


KINDS["cut_after_events"] = FaultKind(
    "The connection breaks after N events of a stream.", COUNT_ARGUMENT
)
KINDS["cut_in_event"] = FaultKind(
    "The connection breaks in the middle of an event, after N complete ones.", COUNT_ARGUMENT
)
KINDS["fail_after_events"] = FaultKind(
    "The stream ends with an error event after N events; the server was overloaded.", COUNT_ARGUMENT
)


@register("status", "override", STATUS_ARGUMENT, {"retry_after": SECONDS_ARGUMENT})
def reject_with_status(fault: Fault, request: FaultedRequest) -> Response:
    """The request is rejected with this HTTP status; retry_after sends the header of that name."""
    retry_after = fault.options["retry_after"]
    match fault.value:
        case 429:
            error = errors.RATE_LIMITED(seconds=f"{retry_after or 0:g}")
        case 500:
            error = errors.INTERNAL_ERROR()
        case status:
            message = "The server rejects this request because a fault is active."
            error = errors.ApiError(message, status=status)
    if retry_after is not None:
        error.headers["retry-after"] = f"{retry_after:g}"
    return build_error_response(request.scope, error)


KINDS["slow_first_byte"] = FaultKind("Nothing is sent for this time.", SECONDS_ARGUMENT)


@register("forget_all", "override", is_memory=True)
def forget_all(fault: Fault, request: FaultedRequest) -> None:
    """All stored responses are deleted before the request is handled."""
    if request.is_stateful:
        request.record_fault(fault)
        request.scope["app"].state.service.forget()


ECHO_OPTION = {"echo": _choice_argument("yes", "no", "late", "missing", default="yes")}


@register("forget_silently", "edit", options=ECHO_OPTION, is_memory=True)
def omit_echo(fault: Fault, _: FaultedRequest, event: Body) -> None:
    """The model sees no earlier response, yet the status is 200; with echo=no the response does
    not name the previous response or conversation either, with echo=late it does at its start
    only, with echo=missing the member is absent.
    """  # noqa: D205 - one sentence
    echo = fault.options["echo"]
    response = event.get("response", {})
    is_past_start = response.get("status") != "in_progress"
    for name in ("previous_response_id", "conversation"):
        if not response.get(name):
            continue
        if echo == "missing":
            del response[name]
        elif echo == "no" or (echo == "late" and is_past_start):
            response[name] = None


KINDS["remember"] = FaultKind(
    "The model sees only the last N responses of the chain; the status is 200.",
    COUNT_ARGUMENT,
    is_memory=True,
)
KINDS["anonymous"] = FaultKind(
    "The server does not identify itself to its clients.", is_memory=True
)
CONSTANT_USAGE = 10
USAGE_ARGUMENT = _choice_argument("none", "constant", "new", "uncached", "trimmed")


@register("report_usage", "edit", USAGE_ARGUMENT, is_memory=True)
def change_usage(fault: Fault, request: FaultedRequest, event: Body) -> None:
    """The usage is left out, is always the same, counts only the tokens of the request itself,
    counts cached tokens apart from the others, or does not count whitespace in the request.
    """  # noqa: D205 - one sentence
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
            tokens = count_items(request.input_items)
        case "trimmed":
            trimmed = _map_texts(request.input_items, str.strip)
            tokens = usage["input_tokens"] - count_items(request.input_items) + count_items(trimmed)
        case _:
            tokens = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    usage["input_tokens"] = tokens
    usage["total_tokens"] = tokens + usage["output_tokens"]


TEXT_MEMBERS = frozenset({"text", "delta", "content"})


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each text of a message changed."""
    if isinstance(value, list):
        return [_map_texts(element, change) for element in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    changed: Body = {}
    for name, member in cast("Body", value).items():
        if name in TEXT_MEMBERS and isinstance(member, str):
            changed[name] = change(member)
        else:
            changed[name] = _map_texts(member, change)
    return changed


@register("report_unstored", "edit", is_memory=True)
def report_unstored(_: Fault, __: FaultedRequest, event: Body) -> None:
    """The response has store: false, whatever was requested."""
    if "store" in event.get("response", {}):
        event["response"]["store"] = False


REUSED_ID = "resp_reused"


@register("reuse_response_id", "edit", is_memory=True)
def reuse_response_id(_: Fault, request: FaultedRequest, event: Body) -> None:
    """Every response has the same id, which continues the newest of them."""
    response = event.get("response", {})
    if request.is_stateful and response.get("id"):
        request.withheld_call_ids[REUSED_ID] = response["id"]
        response["id"] = REUSED_ID


KINDS["hide_stored"] = FaultKind(
    "A stored response cannot be fetched: GET is answered with 404.", is_memory=True
)


@register("change_completed", "edit", _choice_argument("text", "arguments", "missing"))
def change_completed(fault: Fault, _: FaultedRequest, event: Body) -> None:
    """The completed event of a stream has another text, other arguments of calls, or one output
    item less than the events before it.
    """  # noqa: D205 - one sentence
    if event.get("type") != "response.completed":
        return
    output = cast("list[Body]", event["response"]["output"])
    if fault.value == "missing":
        del output[-1:]
    for item in output:
        if fault.value == "arguments" and "arguments" in item:
            item["arguments"] = '{"changed":true}'
        if fault.value == "text":
            for part in _select_dicts(item.get("content")):
                if "text" in part:
                    part["text"] += " (changed)"


@register("omit_output_index", "edit")
def omit_output_index(_: Fault, __: FaultedRequest, event: Body) -> None:
    """The events of a stream have no output_index."""
    event.pop("output_index", None)


KINDS["stream_content_type"] = FaultKind(
    "A stream is sent without a content type, or as text/plain.", _choice_argument("none", "plain")
)


@register("repeat_after_finish", "step")
def repeat_deltas(_: Fault) -> StreamStep:
    """The deltas of a chat completion are sent again after its finish_reason."""
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


LONE_SURROGATE = "\ud83d"
_SENTENCE_END = re.compile(r"[.!?]")


@register("lone_surrogate", "edit")
def break_surrogates(_: Fault, __: FaultedRequest, event: Body) -> None:
    """The text of the answer has half of a surrogate pair in place of each '.', '!' and '?'."""
    if "arguments" not in str(event.get("type")):
        event.update(_map_texts(event, lambda text: _SENTENCE_END.sub(LONE_SURROGATE, text)))


@register("duplicate_events", "step", options=ONLY_OPTION)
def duplicate_events(fault: Fault) -> StreamStep:
    """Every event is sent twice, or those of one type only."""

    def process(event: StreamEvent | None) -> Iterable[StreamEvent]:
        if event is None:
            return ()
        if _is_selected(event, fault):
            return (event, event)
        return (event,)

    return process


@register("reorder_events", "step", options=ONLY_OPTION)
def reorder_events(fault: Fault) -> StreamStep:
    """Every event is swapped with the next, or those of one type only."""
    pending: list[StreamEvent] = []

    def process(event: StreamEvent | None) -> Iterable[StreamEvent]:
        if event is not None and not pending and _is_selected(event, fault):
            pending.append(event)
            return ()
        delayed = tuple(pending)
        pending.clear()
        if event is None:
            return delayed
        return (event, *delayed)

    return process


@register("omit_call_id", "edit")
def omit_call_ids(_: Fault, request: FaultedRequest, event: Body) -> None:
    """Calls have no call_id; outputs may name the call's item id instead."""
    _withhold_call_ids(request, event)


@register("empty_call_id", "edit")
def empty_call_ids(_: Fault, request: FaultedRequest, event: Body) -> None:
    """Calls have an empty call_id; outputs may name the call's item id instead."""
    for call, key in _withhold_call_ids(request, event):
        call[key] = ""


def _withhold_call_ids(request: FaultedRequest, event: Body) -> list[tuple[Body, str]]:
    """Remove the id of every call, and return the calls, each with the key of its id."""
    calls = [(call, key) for call, key in _iter_calls(event) if call.get(key)]
    for call, key in calls:
        if request.is_stateful:
            request.withheld_call_ids[call["id"]] = call[key]
            if len(request.withheld_call_ids) > MAX_WITHHELD_CALL_IDS:
                del request.withheld_call_ids[next(iter(request.withheld_call_ids))]
        del call[key]
    return calls


def _iter_calls(event: Body) -> Iterable[tuple[Body, str]]:
    """Yield the calls of an event or a complete response, each with the key of its id."""
    response: Body = event.get("response", event)
    for item in _select_dicts([event.get("item"), *_select_dicts(response.get("output"))]):
        if _is_call(item):
            yield item, "call_id"
    for choice in _select_dicts(response.get("choices")):
        for message in _select_dicts([choice.get("delta"), choice.get("message")]):
            for call in _select_dicts(message.get("tool_calls")):
                yield call, "id"
    blocks = [event.get("content_block"), *_select_dicts(response.get("content"))]
    for block in _select_dicts(blocks):
        if block.get("type") == "tool_use":
            yield block, "id"


@register("omit_call_name", "edit")
def omit_call_names(_: Fault, __: FaultedRequest, event: Body) -> None:
    """Calls have no name."""
    for call, _key in _iter_calls(event):
        for holder in _select_dicts([call, call.get("function")]):
            holder.pop("name", None)


@register("omit_response_id", "edit")
def omit_response_id(_: Fault, __: FaultedRequest, event: Body) -> None:
    """The response has no id."""
    responses = [event.get("response"), event.get("message")]
    if "choices" in event:  # a chunk of a chat completion is the response itself
        responses = [event]
    for response in _select_dicts(responses):
        response.pop("id", None)


@register("refuse_encrypted_reasoning", "override")
def reject_encrypted_reasoning(_: Fault, request: FaultedRequest) -> Response | None:
    """A request with encrypted reasoning is rejected."""
    for item in request.input_items:
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


@register("refuse_previous_response_id", "override", _choice_argument(*UNSUPPORTED), is_memory=True)
def reject_previous_response(fault: Fault, request: FaultedRequest) -> Response | None:
    """A request with a previous_response_id is rejected with the message of this server."""
    if not request.is_stateful or request.body.get("previous_response_id") is None:
        return None
    return _reject(UNSUPPORTED[fault.value])


@register("refuse_empty_input", "override")
def reject_empty_input(_: Fault, request: FaultedRequest) -> Response | None:
    """A request with empty input is rejected, also if it continues a response."""
    if not request.is_stateful or request.body.get("input") not in ([], ""):
        return None
    return build_error_response(request.scope, errors.INPUT_REQUIRED())


@register("refuse_output_format", "override")
def reject_output_format(_: Fault, request: FaultedRequest) -> Response | None:
    """A request for an answer that matches a JSON schema is rejected: the model has no structured output."""
    for name, member in (("text", "format"), ("response_format", ""), ("output_config", "format")):
        for container in _select_dicts([request.body.get(name)]):
            forms = _select_dicts([container.get(member, container)])
            if any(form.get("type") == "json_schema" for form in forms):
                param = f"{name}.{member}" if member else name
                return build_error_response(request.scope, errors.FORMAT_NOT_SUPPORTED(param=param))
    return None


KINDS["not_found"] = FaultKind(
    "An unknown previous response is rejected with the message and body of this server.",
    _choice_argument(*NOT_FOUND),
)


def translate_not_found(
    fault: Fault | None, request: FaultedRequest, body: Body
) -> Response | None:
    """Replace the error of a missing previous response by the error of another server."""
    code = cast("Body", body.get("error") or {}).get("code")
    if fault is None or code != errors.PREVIOUS_RESPONSE_NOT_FOUND.code:
        return None
    rejection = NOT_FOUND[request.record_fault(fault).value]
    return _reject(rejection, request.body["previous_response_id"])
