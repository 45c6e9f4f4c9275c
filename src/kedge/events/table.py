"""Which function reads which event of the Responses API.

``TABLE`` is the whole of it: a type of event and the function that reads it. ``OPAQUE`` lists the types
that are known and passed on unread; a type in neither is new to us and passed on as well. A function
takes the state of the stream, the event as a dict and the list to which it adds what it found; it
raises ``Malformed`` for an event it cannot read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kedge.events import reading
from kedge.events.call import ToolCall
from kedge.events.calls import ToolCallState
from kedge.events.reading import CALL_ARGUMENTS, Malformed, Members
from kedge.events.surrogates import SplitCharacters
from kedge.events.types import (
    AnomalyNoted,
    ItemCompleted,
    ItemStarted,
    OpaqueEvent,
    PartCompleted,
    PartKind,
    ReasoningDelta,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
    TextDelta,
)

Found = list[StreamEvent]
Ending = Literal["completed", "incomplete", "failed"]


@dataclass(slots=True)
class StreamState:
    """What has to be remembered from one event to the next."""

    calls: ToolCallState = field(default_factory=ToolCallState)
    halves: SplitCharacters = field(default_factory=SplitCharacters)
    started: bool = False
    ended: bool = False


Reader = Callable[[StreamState, Members, Found], None]


def _began(state: StreamState, message: Members, found: Found) -> None:
    """The first word about the response counts; ``queued`` and ``in_progress`` may repeat it."""
    if state.started:
        found.append(OpaqueEvent(message["type"], message))
        return
    state.started = True
    found.append(ResponseStarted(**reading.facts(_response(message))))


def _item_added(state: StreamState, message: Members, found: Found) -> None:
    item, output_index = reading.members(message, "item"), reading.index(message)
    if reading.is_call(item):
        found += state.calls.started(reading.call_seen(item, output_index))
    else:
        kind, item_id = reading.word(item, "type"), reading.word(item, "id")
        found.append(ItemStarted(kind, item_id, output_index))


def _item_done(state: StreamState, message: Members, found: Found) -> None:
    item, output_index = reading.members(message, "item"), reading.index(message)
    if reading.is_call(item):
        call, events = state.calls.finished(reading.call_seen(item, output_index))
        found += events
        if not call.name:
            raise Malformed("a tool call without a name")
        item = _filled(item, call)
    found.append(ItemCompleted(item, output_index))


def _text_delta(state: StreamState, message: Members, found: Found) -> None:
    item_id, at = reading.word(message, "item_id"), reading.place(message, "content_index")
    delta = state.halves.take(("text", item_id, at), reading.text(message, "delta"))
    if delta:
        found.append(TextDelta(delta, item_id, reading.index(message), at))


def _refusal_delta(state: StreamState, message: Members, found: Found) -> None:
    item_id, at = reading.word(message, "item_id"), reading.place(message, "content_index")
    delta = state.halves.take(("refusal", item_id, at), reading.text(message, "delta"))
    if delta:
        found.append(RefusalDelta(delta, item_id, reading.index(message), at))


def _reasoning_delta(kind: Literal["summary", "reasoning"], index: str) -> Reader:
    def read(state: StreamState, message: Members, found: Found) -> None:
        item_id, at = reading.word(message, "item_id"), reading.place(message, index)
        delta = state.halves.take((kind, item_id, at), reading.text(message, "delta"))
        if delta:
            found.append(ReasoningDelta(delta, kind, item_id, reading.index(message), at))

    return read


def _part_done(kind: PartKind, member: str, index: str) -> Reader:
    def read(state: StreamState, message: Members, found: Found) -> None:
        item_id, at = reading.word(message, "item_id"), reading.place(message, index)
        state.halves.forget((kind, item_id, at))
        whole = reading.text(message, member)
        found.append(PartCompleted(kind, whole, item_id, reading.index(message), at))

    return read


def _arguments_delta(state: StreamState, message: Members, found: Found) -> None:
    item_id, output_index = reading.word(message, "item_id"), reading.index(message)
    key = ("arguments", item_id or output_index)
    delta = state.halves.take(key, reading.text(message, "delta"))
    if delta:
        found += state.calls.wrote(item_id, output_index, delta)


def _arguments_done(member: str) -> Reader:
    def read(state: StreamState, message: Members, _: Found) -> None:
        item_id, output_index = reading.word(message, "item_id"), reading.index(message)
        state.halves.forget(("arguments", item_id or output_index))
        state.calls.wrote_all(item_id, output_index, reading.text(message, member))

    return read


def _failed(_: StreamState, message: Members, found: Found) -> None:
    found.append(StreamFailed(**reading.error(message)))


# The end of a response. Its type and its own status must agree: the worse of the two counts.

_BY_STATUS: dict[str, Ending] = {
    "completed": "completed",
    "": "completed",  # a server that does not say
    "incomplete": "incomplete",
}


def _worse(one: Ending, other: Ending) -> Ending:
    return "failed" if "failed" in (one, other) else one if other == "completed" else other


def _ended(ending: Ending, code: str = "") -> Reader:
    def read(state: StreamState, message: Members, found: Found) -> None:
        response = _response(message)
        facts, usage = reading.facts(response), reading.usage(response)
        by_status = _BY_STATUS.get(facts["status"], "failed")
        state.started = state.ended = True
        match _worse(ending, by_status):
            case "completed":
                output = _output(state, response, found)
                _settle(state, found)
                found.append(ResponseCompleted(**facts, usage=usage, output=output))
            case "incomplete":
                output = _output(state, response, found)
                reason = reading.word(_object(response, "incomplete_details"), "reason")
                found.append(ResponseIncomplete(**facts, reason=reason, usage=usage, output=output))
            case "failed":
                found.append(ResponseFailed(**facts, **_failure(response, code), usage=usage))
        state.calls.log_summary()

    return read


def _failure(response: Members, code: str) -> Members:
    given = reading.error({"error": response.get("error") or {}})
    status = reading.word(response, "status")
    if status not in ("failed", "cancelled", ""):
        code = code or "status_mismatch"
        message = "the response was said to have ended, but its status says otherwise"
    else:
        code = code or status
        message = ""
    return {"code": given["code"] or code, "message": given["message"] or message}


def _output(state: StreamState, response: Members, found: Found) -> tuple[Members, ...] | None:
    """The items that a finished response lists; calls among them settle what is still open."""
    if not isinstance(response.get("output"), list):
        return None
    listed = cast("list[Any]", response["output"])
    items = [cast("Members", item) for item in listed if isinstance(item, dict)]
    if len(items) < len(listed):
        found.append(AnomalyNoted("malformed", "the finished response lists what is no item"))
    places = [at for at, item in enumerate(items) if reading.is_call(item)]
    calls = state.calls.listed([reading.call_seen(items[at], at) for at in places])
    for at, (call, events) in zip(places, calls, strict=True):
        found += events
        items[at] = _filled(items[at], call)
    return tuple(items)


def _settle(state: StreamState, found: Found) -> None:
    events, unresolved = state.calls.settle()
    found += events
    found += [AnomalyNoted("unresolved_call", name) for name in unresolved]


def _filled(item: Members, call: ToolCall) -> Members:
    """The item with what it should say about its call, where it does not."""
    member = CALL_ARGUMENTS[item["type"]]
    known = {"call_id": call.call_id, "name": call.name, member: call.arguments}
    if all(item.get(name) == value for name, value in known.items()):
        return item
    return {**item, **known}


def _response(message: Members) -> Members:
    return _object(message, "response")


def _object(message: Members, name: str) -> Members:
    value = message.get(name)
    return cast("Members", value) if isinstance(value, dict) else {}


TABLE: dict[str, Reader] = {
    "response.created": _began,
    "response.queued": _began,
    "response.in_progress": _began,
    "response.output_item.added": _item_added,
    "response.output_item.done": _item_done,
    "response.output_text.delta": _text_delta,
    "response.output_text.done": _part_done("text", "text", "content_index"),
    "response.refusal.delta": _refusal_delta,
    "response.refusal.done": _part_done("refusal", "refusal", "content_index"),
    "response.reasoning_summary_text.delta": _reasoning_delta("summary", "summary_index"),
    "response.reasoning_summary_text.done": _part_done("summary", "text", "summary_index"),
    "response.reasoning_text.delta": _reasoning_delta("reasoning", "content_index"),
    "response.reasoning_text.done": _part_done("reasoning", "text", "content_index"),
    "response.function_call_arguments.delta": _arguments_delta,
    "response.function_call_arguments.done": _arguments_done("arguments"),
    "response.custom_tool_call_input.delta": _arguments_delta,
    "response.custom_tool_call_input.done": _arguments_done("input"),
    "response.completed": _ended("completed"),
    "response.incomplete": _ended("incomplete"),
    "response.failed": _ended("failed"),
    "response.cancelled": _ended("failed", "cancelled"),
    "error": _failed,
}

DELTAS = frozenset(kind for kind in TABLE if kind.endswith(".delta"))
"""The deltas whose characters may be torn and are put together on the way."""

OPAQUE = frozenset(
    f"response.{kind}"
    for kind in (
        "content_part.added",
        "content_part.done",
        "output_text.annotation.added",
        "reasoning_summary_part.added",
        "reasoning_summary_part.done",
        "file_search_call.in_progress",
        "file_search_call.searching",
        "file_search_call.completed",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "code_interpreter_call.in_progress",
        "code_interpreter_call.interpreting",
        "code_interpreter_call.completed",
        "code_interpreter_call_code.delta",
        "code_interpreter_call_code.done",
        "image_generation_call.in_progress",
        "image_generation_call.generating",
        "image_generation_call.partial_image",
        "image_generation_call.completed",
        "mcp_call.in_progress",
        "mcp_call.completed",
        "mcp_call.failed",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "mcp_list_tools.failed",
        "shell_call_command.added",
        "shell_call_command.delta",
        "shell_call_command.done",
        "shell_call_output_content.delta",
        "shell_call_output_content.done",
        "compaction.compacting",
        "audio.delta",
        "audio.done",
        "audio.transcript.delta",
        "audio.transcript.done",
        "steer.accepted",
        "steer.pending",
        "steer.failed",
    )
)
