r"""Read fields of decoded events, and describe malformed events without their content.

JSON may write an emoji as two escapes, ``\ud83d\ude00``, and a server that streams token by token may
send the first half in one delta and the second in the next. Each half alone is a lone surrogate, which
cannot be encoded as UTF-8 and which blocks reject. ``SurrogateJoiner`` holds a first half back until its
second half arrives; ``repair_surrogates`` replaces lone halves in values that are complete.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from kedge.events.types import PartKind, Usage
from kedge.turns.frozen_json import wrap
from kedge.turns.json_codec import name_type

JsonObject = dict[str, Any]

CALL_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The item types of tool calls, with the field of the arguments."""

PART_FORMS: dict[PartKind, tuple[str, str, str]] = {
    "text": ("output_text", "text", "message"),
    "refusal": ("refusal", "refusal", "message"),
    "summary": ("summary_text", "text", "reasoning"),
    "reasoning": ("reasoning_text", "text", "reasoning"),
}
"""The type of the parts of each kind, the member with the text, and the type of their item."""

_NAME_PATTERN = re.compile(r"[A-Za-z_][\w.\-]{0,63}")
_MAX_NAMES = 12


class MalformedEvent(Exception):
    """A field of an event is missing or has the wrong type; the message names it."""


def require_text(message: JsonObject, name: str) -> str:
    """Return a required text field."""
    return check_text(message.get(name), name)


def check_text(value: object, name: str) -> str:
    """Return the value of a field that must be a text."""
    if type(value) is not str:
        raise MalformedEvent(f"{name} is {_type_name(value)}, not a string")
    return value


def get_text(message: Mapping[str, Any], name: str) -> str:
    """Return a text field, or an empty string."""
    value = message.get(name)
    if type(value) is str:
        return value
    return ""


def get_index(message: JsonObject, name: str = "output_index") -> int:
    """Return an index field, or -1."""
    value = message.get(name)
    if type(value) is int and value >= 0:
        return value
    return -1


def get_part_index(message: JsonObject, name: str) -> int:
    """Return the index of a part in its item, or 0."""
    return max(get_index(message, name), 0)


def require_object(message: JsonObject, name: str) -> JsonObject:
    """Return a required object field."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise MalformedEvent(f"{name} is {_type_name(value)}, not an object")
    return cast("JsonObject", value)


def get_object(message: JsonObject, name: str) -> JsonObject:
    """Return an object field, or an empty object."""
    value = message.get(name)
    if isinstance(value, dict):
        return cast("JsonObject", value)
    return {}


def list_objects(value: object) -> list[JsonObject]:
    """Return the objects in an array; none if it is not an array."""
    if not isinstance(value, list):
        return []
    elements = cast("list[Any]", value)
    return [cast("JsonObject", element) for element in elements if isinstance(element, dict)]


MAX_ID_BYTES = 1_500
MAX_MODEL_LENGTH = 200
"""The maximum lengths of the id of a response and of the model that a server names: databases have an index of both."""


def read_facts(response: JsonObject) -> JsonObject:
    """Return the fields of ``ResponseFacts`` from the response object of any API.

    A response whose id is too long counts as one without an id.
    """
    response_id = get_text(response, "id")
    if len(response_id.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        response_id = ""
    created_at = response.get("created_at", response.get("created"))
    if type(created_at) not in (int, float):
        created_at = None
    stored = response.get("store")
    if not isinstance(stored, bool):
        stored = None
    return {
        "response_id": response_id,
        "model": get_text(response, "model")[:MAX_MODEL_LENGTH],
        "created_at": created_at,
        "previous_response_id": get_text(response, "previous_response_id") or None,
        "echoed": "previous_response_id" in response,
        "status": get_text(response, "status"),
        "background": response.get("background") is True,
        "stored": stored,
        "conversation_id": read_conversation_id(response),
        "response": response,
    }


def read_conversation_id(response: JsonObject) -> str | None:
    """Return the conversation object that a request or a response names; None if it has no such member."""
    if "conversation" not in response:
        return None
    conversation = response["conversation"]
    if isinstance(conversation, dict):
        return get_text(cast("JsonObject", conversation), "id")
    return get_text(response, "conversation")


def read_usage(response: Mapping[str, Any]) -> Usage | None:
    """Return the token counts of a response, if there are any."""
    counts = response.get("usage")
    if not isinstance(counts, dict):
        return None
    return read_counts(cast("JsonObject", counts))


def read_counts(counts: JsonObject, read: str = "input", written: str = "output") -> Usage:
    """Return token counts; ``read`` and ``written`` are the names of the input and the output."""
    input_details = counts.get(f"{read}_tokens_details")
    output_details = counts.get(f"{written}_tokens_details")
    input_tokens = get_count(counts, f"{read}_tokens")
    output_tokens = get_count(counts, f"{written}_tokens")
    return Usage(
        input_tokens,
        get_count(input_details, "cached_tokens"),
        output_tokens,
        get_count(output_details, "reasoning_tokens"),
        get_count(counts, "total_tokens") or input_tokens + output_tokens,
        get_count(input_details, "cache_write_tokens"),
    )


def merge_values(value: Any, piece: Any) -> Any:
    """Return a member of an object after a further piece of it."""
    if isinstance(value, str) and isinstance(piece, str):
        return value + piece
    if isinstance(value, list) and isinstance(piece, list):
        return [*cast("list[Any]", value), *cast("list[Any]", piece)]
    if isinstance(value, dict) and isinstance(piece, dict):
        members = cast("JsonObject", value)
        pieces = cast("JsonObject", piece)
        merged = {
            name: merge_values(members.get(name), pieces[name]) for name in pieces if name != "id"
        }
        return {**pieces, **members, **merged}
    if piece is None:
        return cast("Any", value)
    return piece


def get_arguments(message: JsonObject, name: str) -> str | None:
    """Return the arguments of a call as text: some servers send an object instead."""
    value = message.get(name)
    if isinstance(value, dict) and value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return value
    return None


class MessagePart(NamedTuple):
    """A part of a message with a text."""

    kind: Literal["text", "refusal"]
    position: int
    text: str
    content: JsonObject


_TEXT_MEMBERS: Mapping[object, tuple[Literal["text", "refusal"], str]] = {
    "output_text": ("text", "text"),
    "text": ("text", "text"),
    "refusal": ("refusal", "refusal"),
}
"""The kind of each type of part that has a text, and the member with the text."""


def read_message_parts(item: Mapping[str, Any]) -> list[MessagePart]:
    """Return the texts and refusals of a message that are not empty."""
    content: object = item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text", "text": content}]
    if not isinstance(content, list):
        return []
    parts: list[MessagePart] = []
    for index, part in enumerate(cast("list[Any]", content)):
        if not isinstance(part, dict):
            continue
        members = cast("JsonObject", part)
        kind, member = _TEXT_MEMBERS.get(get_text(members, "type"), (None, ""))
        text = get_text(members, member)
        if kind and text:
            parts.append(MessagePart(kind, index, text, members))
    return parts


def build_message(parts: list[JsonObject]) -> JsonObject:
    """Return a finished message of the model in the form of the Responses API."""
    return {"type": "message", "role": "assistant", "content": parts}


def build_reasoning(text: str, encrypted_content: Any) -> JsonObject:
    """Return a finished reasoning item in the form of the Responses API."""
    item: JsonObject = {"type": "reasoning", "summary": []}
    if text:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    item["encrypted_content"] = encrypted_content
    return item


def read_logprobs(container: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the log probabilities of the tokens of a text, each as a read-only object."""
    tokens = list_objects(container.get("logprobs"))
    return tuple(wrap(repair_surrogates(token)) for token in tokens)


def read_error(message: JsonObject) -> JsonObject:
    """Return the fields of ``StreamFailed`` from an error, nested under ``error`` or flat."""
    inner = message.get("error", message)
    if not isinstance(inner, dict):
        inner = {"message": inner}
    error = cast("JsonObject", inner)
    code = error.get("code")
    if not isinstance(code, str | int):
        code = ""
    kind = get_text(error, "type")
    if kind == "error":  # the type of the event, not of the error
        kind = ""
    status = message.get("status")
    if type(status) is not int:
        status = None
    return {
        "code": str(code),
        "message": get_text(error, "message"),
        "param": get_text(error, "param"),
        "kind": kind,
        "status": status,
    }


def describe_malformed(event: str, message: object, problem: str) -> str:
    """Describe a malformed event by its type, number and field names, never by a value."""
    if not isinstance(message, dict):
        return f"{_safe_name(event)}: {problem}"
    members = cast("JsonObject", message)
    label = _safe_name(event)
    number = members.get("sequence_number")
    if type(number) is int:
        label += f" number {number}"
    names = [_safe_name(name) for name in list(members)[:_MAX_NAMES]]
    if len(members) > _MAX_NAMES:
        names.append("…")
    return f"{label}: {problem}; members: {', '.join(names)}"


def _safe_name(name: str) -> str:
    """Return the name of an event or a member, if it looks like a name: servers may put content there."""
    if not name:
        return "(unnamed)"
    if _NAME_PATTERN.fullmatch(name):
        return name
    return "(unprintable)"


MAX_COUNT = 10**12
"""The largest token count that is believed; every database can store it, and sums of millions of such counts."""


def get_count(counts: object, name: str) -> int:
    """Return a token count, or 0 if it is missing, not a number, or larger than any model can count."""
    if not isinstance(counts, dict):
        return 0
    value = cast("JsonObject", counts).get(name)
    if type(value) is float and value.is_integer():  # some servers write 3.0
        value = int(value)
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    return 0


def _type_name(value: object) -> str:
    if value is None:
        return "missing"
    return name_type(value)


REPLACEMENT = "\ufffd"
"""The character that replaces a lone surrogate."""
_SURROGATES = re.compile("[\ud800-\udfff]")


def repair_surrogates(value: Any) -> Any:
    """Return a JSON value with the surrogates of all its texts and keys joined or replaced by U+FFFD."""
    if isinstance(value, str):
        if value.isascii() or not _SURROGATES.search(value):
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {
            repair_surrogates(key): repair_surrogates(member) for key, member in members.items()
        }
    if isinstance(value, list):
        return [repair_surrogates(member) for member in cast("list[Any]", value)]
    return value


class SurrogateJoiner:
    """Joins surrogate pairs across the deltas of a text; each key is a separate text."""

    __slots__ = ("pending", "replaced")

    def __init__(self) -> None:
        self.pending: dict[object, str] = {}
        """The first halves of characters, which wait for the second ones."""
        self.replaced = False
        """Whether a lone surrogate was replaced by U+FFFD."""

    def feed(self, key: object, delta: str) -> str:
        """Return the delta to emit now; empty if it is only the first half of a character."""
        if not self.pending and (delta.isascii() or not _SURROGATES.search(delta)):
            return delta
        text = self.pending.pop(key, "") + delta
        if text and "\ud800" <= text[-1] <= "\udbff":
            self.pending[key] = text[-1]
            text = text[:-1]
        repaired = repair_surrogates(text)
        if repaired.count(REPLACEMENT) > text.count(REPLACEMENT):
            self.replaced = True
        return repaired

    def discard(self, key: object) -> None:
        """Drop a pending half of a text whose complete version has arrived."""
        self.pending.pop(key, None)
