"""Decode streams of the Chat Completions API.

Chunks have no type; ``DELTA_READERS`` maps the fields of a delta to methods. The API returns one message without
an order of its parts, so the output items (reasoning, message, each call) are numbered in the order in which
they first appear.

Servers differ most in their tool calls. By the API a call is identified by its ``index``, and its id and name
are sent once. Some servers omit the index, the id or both; some number every call 0; some send a new id
with every piece of one call; some send a complete call at once, its arguments as an object; some repeat the name
in every piece, others split it. ``_find_call`` finds the call that a piece belongs to, and ``ItemTable`` does
the rest. A call is announced when its name is known: when its first arguments or something else follow.

Some servers repeat the answer after ``finish_reason``, and some send a ``finish_reason`` with every chunk. So text
after it is held back while it repeats the answer from the start, and is part of the answer otherwise; a call
after it is ignored if it is one of those before. Some servers send no ``finish_reason`` at all, only ``[DONE]``.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import msgspec
from msgspec import structs

from kedge.events import types
from kedge.events.types import Usage, build_delta
from kedge.turns.server_fields import CHAT_CALL, CHAT_MESSAGE
from kedge.wire import fields
from kedge.wire.decoder import FinalStatus, StreamDecoder
from kedge.wire.fields import JsonObject, MalformedEvent, repair_surrogates
from kedge.wire.items import ToolCall, read_call_id

log = logging.getLogger(__name__)

TextKind = Literal["text", "refusal", "reasoning"]

_COMPLETED = ("stop", "tool_calls", "function_call", "eos", "stop_sequence", "end_turn", "tool_use")
FINISH_REASONS: dict[str, tuple[FinalStatus, str]] = {
    **dict.fromkeys(_COMPLETED, ("completed", "")),
    **dict.fromkeys(("length", "max_tokens", "model_length"), ("incomplete", "max_output_tokens")),
    "content_filter": ("incomplete", "content_filter"),
    "error": ("failed", "server_error"),
    "abort": ("failed", "cancelled"),
    "cancelled": ("failed", "cancelled"),
    "insufficient_system_resource": ("failed", "server_overloaded"),
}
"""The meaning of each ``finish_reason``; with any other the response is ``incomplete``."""


class _CallPiece(msgspec.Struct):
    """A call or a piece of one, as an entry of ``tool_calls``."""

    index: int
    """The index of the call; -1 if the server omits it."""
    call_id: str
    problem: str
    """Why the id is not usable; empty if it is."""
    name: str
    arguments: object
    is_custom: bool


def _read_piece(entry: JsonObject) -> _CallPiece:
    is_custom = isinstance(entry.get("custom"), dict)
    function: object = entry.get("custom" if is_custom else "function", entry)
    if function is not None and not isinstance(function, dict):
        raise MalformedEvent("a tool call has no function")
    members = cast("JsonObject", function or {})
    call_id, problem = read_call_id(entry.get("id"))
    return _CallPiece(
        fields.get_index(entry, "index"),
        call_id,
        problem,
        fields.get_text(members, "name"),
        members.get("input" if is_custom else "arguments"),
        is_custom,
    )


class _StreamedCall(ToolCall, eq=False):
    """A call as the chunks identify it."""

    is_announced: bool = False
    """Whether the call was started, because its name is complete."""

    def is_other_call(self, piece: _CallPiece, listed: set[int]) -> bool:
        """Return whether a piece under the same index starts another call: some servers number every call 0.

        A different id counts only together with a name, because some servers send a new id with every piece.
        Another name continues the name of a call without arguments, but not in the same list.
        """
        if not piece.name:
            return False
        if self.call_id and piece.call_id and self.call_id != piece.call_id:
            return True
        if not self.name or piece.name == self.name:
            return False
        return self.is_announced or self.output_index in listed

    def extend(self, piece: _CallPiece) -> None:
        """Add what a piece holds about a call that is not announced; its name may be a part or repeated."""
        if not self.call_id:
            self.call_id = piece.call_id
            self.fallback = piece.problem
        if piece.name.startswith(self.name):
            self.name = piece.name
        else:
            self.name += piece.name


_CALL_MEMBERS = frozenset({"index", "id", "type", "function", "custom", "name", "arguments"})
"""The members of a call that are read."""
_IGNORED_FIELDS = frozenset({"role", "name", "channel"})
"""Fields that are ignored; any other is stored with the message, and passed on as an ``OpaqueEvent``."""
_DETAIL_TEXTS = ("text", "summary", "data")
"""The members of reasoning details that are sent in pieces."""


class ChatDecoder(StreamDecoder):
    """Decodes a stream of the Chat Completions API.

    Args:
        **bounds: ``max_line`` and ``max_message``, as for ``StreamDecoder``.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"choices"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self._calls_by_key: dict[int | str, _StreamedCall] = {}
        """The calls by index and by id."""
        self._last_call: _StreamedCall | None = None
        self._item_indices: dict[object, int] = {}
        """The output indexes of the reasoning, the message and the calls."""
        self._facts: JsonObject = {}
        self._usage: Usage | None = None
        self._finish_reason = ""
        self._has_message = False  # even an empty one
        self._has_failed = False
        self._texts: dict[TextKind, list[str]] = {}
        self._repeated: dict[TextKind, int] = {}
        """How many characters of each text were repeated after the finish reason."""
        self._continued = False
        """Whether the answer went on after its finish reason."""
        self._text_logprobs: tuple[Mapping[str, Any], ...] = ()
        self._details: list[JsonObject] = []
        """Reasoning in the form of OpenRouter, with signatures and encrypted parts."""
        self._annotations: list[Any] = []
        self._members: JsonObject = {}
        """Members of the message that only some servers send, such as signatures."""
        self._call_members: dict[int, JsonObject] = {}
        """The same of the calls, by output index."""

    def _read_whole(self, response: JsonObject) -> None:
        self._decode_message(response, "")
        if self._has_message:
            self._finish_reason = self._finish_reason or "stop"  # some servers send no reason
        elif not self._finish_reason and not self._has_failed:
            message = "the server returned a completion without choices"
            self._fail({"error": {"code": "server_error", "message": message}})

    def _decode_message(self, message: JsonObject, event: str) -> None:
        if self.ended:
            return
        if message.get("error") or "error" in (event, message.get("object")):
            self._fail(message)
        elif "choices" in message or "usage" in message:
            self._read_chunk(message)
        else:
            kind = event or fields.get_text(message, "object")
            self._events.append(types.OpaqueEvent(kind, message))

    def _read_chunk(self, chunk: JsonObject) -> None:
        self._update_facts(chunk)
        choices: object = chunk.get("choices") or []
        if not isinstance(choices, list):
            self._report_malformed("chunk", chunk, "choices is not an array")
        try:
            for choice in fields.list_objects(cast("object", choices)):
                if fields.get_part_index(choice, "index") == 0:
                    self._read_choice(choice)
        except MalformedEvent as problem:
            self._report_malformed("chunk", chunk, str(problem))

    def _read_choice(self, choice: JsonObject) -> None:
        raw: object = choice.get("delta")
        if raw is None or (raw == {} and not self._has_message):
            raw = cast("object", choice.get("message")) or {}
        if not isinstance(raw, dict):
            raise MalformedEvent("delta is not an object")
        if choice.get("error"):
            self._fail(choice)
        logprobs = fields.get_object(choice, "logprobs")
        if logprobs:
            self._logprobs += fields.read_logprobs({"logprobs": logprobs.get("content")})
        self._has_message = self._has_message or bool(cast("JsonObject", raw))
        self._read_delta(cast("JsonObject", raw))
        if not self._finish_reason or self._continued:
            reason = fields.get_text(choice, "finish_reason")
            self._finish_reason = reason or self._finish_reason

    def _read_delta(self, raw: JsonObject) -> None:
        delta = {name: value for name, value in raw.items() if value is not None}
        if delta.get("reasoning_content") and "reasoning" in delta:
            del delta["reasoning"]  # some servers send the same text under both names
        for name, (read, *arguments) in self.DELTA_READERS.items():
            if name in delta:
                read(self, delta.pop(name), *arguments)
        rest = {
            name: value for name, value in delta.items() if name not in _IGNORED_FIELDS and value
        }
        if not rest:
            return
        self._events.append(types.OpaqueEvent("delta", rest))
        for name, value in rest.items():
            self._members[name] = fields.merge_values(self._members.get(name), value)

    def _fail(self, message: JsonObject) -> None:
        self._has_failed = True
        error = fields.read_error(message)
        self._events.append(types.StreamFailed(**error, usage=read_usage(message)))

    def _read_done(self) -> None:
        """Complete an answer without a finish reason, unless the end of a call is missing."""
        if self._has_message and not self._finish_reason and not self._has_failed:
            calls = self.calls.sorted_calls()
            if all(call.custom or not call.arguments or _is_complete(call) for call in calls):
                self._finish_reason = "stop"
        if not self._closed:
            self._finish()

    def _finish(self) -> None:
        self._announce_call()
        if self.ended:
            return
        reason = self._finish_reason
        if not reason:  # the model may not have finished
            if self._closed:
                self._emit_items(completed=False)
            return
        status, code = FINISH_REASONS.get(reason.lower(), ("incomplete", reason))
        if status == "completed":
            self._add_empty_arguments()
            self.calls.resolve_open()
        self._emit_items(completed=status == "completed")
        facts = fields.read_facts({**self._facts, "finish_reason": reason})
        self._end((status, code, ""), {**facts, "status": status, "usage": self._usage})

    def _read_content(self, value: object) -> None:
        """Read text or, from some servers, a list of parts."""
        if isinstance(value, list):
            for part in cast("list[Any]", value):
                self._read_part(part)
            return
        self._emit_delta("text", fields.check_text(value, "content"))

    def _read_part(self, part: object) -> None:
        if not isinstance(part, dict):
            raise MalformedEvent("a part of content is not an object")
        content_part = cast("JsonObject", part)
        match content_part.get("type"):
            case "text" | "output_text":
                self._emit_delta("text", fields.require_text(content_part, "text"))
            case "refusal":
                self._emit_delta("refusal", fields.require_text(content_part, "refusal"))
            case "thinking":
                self._read_thinking(content_part.get("thinking"))
            case _:
                self._annotations.append(content_part)
                self._events.append(types.OpaqueEvent("part", content_part))

    def _read_thinking(self, value: object) -> None:
        """Read reasoning in the form of Mistral: a text, or a list of texts and objects with a text."""
        if not isinstance(value, list):
            value = [value]
        for entry in cast("list[object]", value):
            text = entry
            if isinstance(entry, dict):
                text = cast("JsonObject", entry).get("text")
            self._emit_delta("reasoning", fields.check_text(text, "thinking"))

    def _read_text(self, value: object, kind: TextKind) -> None:
        self._emit_delta(kind, fields.check_text(value, kind))

    def _read_details(self, value: object) -> None:
        """Read reasoning details, of which a piece with the same index and type continues the last one."""
        for piece in fields.list_objects(value):
            if not self._item_indices:
                # What comes after an answer belongs to it.
                self._item_index("reasoning")
            detail = self._find_detail(piece)
            if detail is None:
                self._details.append(dict(piece))
                continue
            for name, member in piece.items():
                if name in _DETAIL_TEXTS:
                    detail[name] = fields.merge_values(detail.get(name), member)
                elif member is not None:
                    detail[name] = member

    def _find_detail(self, piece: JsonObject) -> JsonObject | None:
        """Return the last reasoning detail with the index and type of a piece."""
        if piece.get("index") is None:
            return None
        for detail in reversed(self._details):
            if detail.get("index") == piece["index"] and detail.get("type") == piece.get("type"):
                return detail
        return None

    def _read_annotations(self, value: object) -> None:
        self._annotations += fields.list_objects(value)

    def _emit_items(self, *, completed: bool) -> None:
        """Emit the items with what the deltas of the common events cannot express.

        Members of the message that only some servers send are stored with its text or, if it has none, with its
        first call.
        """
        native = dict(self._members)
        if self._details and "reasoning" not in self._item_indices:
            native["reasoning_details"] = self._details
        elif self._details:
            index = self._item_index("reasoning")
            item = self._build_reasoning(index)
            if not completed and len(self._item_indices) == 1:
                item["status"] = "incomplete"
            self._emit_item(item, index)

        has_message = "message" in self._item_indices or not self.calls.sorted_calls()
        if has_message and (native or self._annotations):
            item = self._build_message()
            if native:
                item[CHAT_MESSAGE] = native
            if not completed:
                item["status"] = "incomplete"
            self._emit_item(item, self._item_index("message"))
            native = {}

        for call in self.calls.sorted_calls():
            members = self._call_members.get(call.output_index)
            if not call.completed or not (native or members):
                continue
            item = call.complete_item({"type": call.type})
            if native:
                item[CHAT_MESSAGE] = native
                native = {}
            if members:
                item[CHAT_CALL] = members
            self._events.append(types.ItemCompleted(item, call.output_index))

    def _emit_item(self, item: JsonObject, output_index: int) -> None:
        self._events.append(types.ItemCompleted(repair_surrogates(item), output_index))

    def _build_reasoning(self, index: int) -> JsonObject:
        text = "".join(self._texts.get("reasoning", ()))
        item = fields.build_reasoning(text, self._find_ciphertext())
        item[CHAT_MESSAGE] = {"reasoning_details": self._details}
        response_id = fields.get_text(self._facts, "id")
        if response_id:
            item["id"] = f"{response_id}.{index}"
        return item

    def _find_ciphertext(self) -> Any:
        """Return the first signature or encrypted text of the reasoning details; empty if there is none."""
        for detail in self._details:
            ciphertext = detail.get("signature") or detail.get("data")
            if ciphertext:
                return ciphertext
        return ""

    def _build_message(self) -> JsonObject:
        text = "".join(self._texts.get("text", ()))
        refusal = "".join(self._texts.get("refusal", ()))
        parts: list[JsonObject] = []
        if text or self._annotations:
            part = {"type": "output_text", "text": text, "annotations": self._annotations}
            if self._text_logprobs:
                part["logprobs"] = [dict(token) for token in self._text_logprobs]
            parts.append(part)
        if refusal:
            parts.append({"type": "refusal", "refusal": refusal})
        return fields.build_message(parts)

    def _emit_delta(self, kind: TextKind, text: str) -> None:
        delta = self._joiner.feed(kind, text)
        if delta and self._finish_reason and not self._continued:
            delta = self._skip_repeated(kind, delta)
        if not delta:
            return
        self._announce_call()
        self._texts.setdefault(kind, []).append(delta)
        if kind == "reasoning":
            index = self._item_index("reasoning")
            self._events.append(build_delta(kind, delta, "", index))
            return
        index = self._item_index("message")
        if kind == "refusal":  # the second part of the message
            self._events.append(build_delta(kind, delta, "", index, 1))
            return
        logprobs = self._take_logprobs()
        self._text_logprobs += logprobs
        self._events.append(build_delta(kind, delta, "", index, 0, logprobs))

    def _item_index(self, item: object) -> int:
        """Return the output index of an item; a new item gets the next."""
        return self._item_indices.setdefault(item, len(self._item_indices))

    def _skip_repeated(self, kind: TextKind, delta: str) -> str:
        """Return the text to emit after the finish reason: none while it repeats the answer."""
        answer = "".join(self._texts.get(kind, ()))
        start = self._repeated.get(kind, 0)
        self._texts[kind] = [answer]
        if answer.startswith(delta, start):
            self._repeated[kind] = start + len(delta)
            return ""
        log.warning("the answer continues after finish_reason")
        self._continued = True
        return answer[:start] + delta

    def _announce_call(self) -> None:
        """Start the last call, the name of which is complete now."""
        call = self._last_call
        if call is not None and not call.is_announced:
            self.calls.start(call)
            call.is_announced = True

    def _read_tool_calls(self, value: object) -> None:
        if not isinstance(value, list):
            raise MalformedEvent("tool_calls is not an array")
        listed: set[int] = set()
        for entry in cast("list[Any]", value):
            if not isinstance(entry, dict):
                raise MalformedEvent("a tool call is not an object")
            call = cast("JsonObject", entry)
            index = self._read_call(call, listed)
            listed.add(index)
            members = {k: v for k, v in call.items() if k not in _CALL_MEMBERS and v is not None}
            if members and index >= 0:
                self._call_members.setdefault(index, {}).update(members)

    def _read_function_call(self, value: object) -> None:
        """Read the single call of the API's first version."""
        self._read_call({"function": value}, set())

    def _find_call(self, piece: _CallPiece, listed: set[int]) -> _StreamedCall | None:
        """Return the call of a piece, by its index, by its id or as the last call; None if the piece starts a call."""
        call = None
        if piece.index >= 0:
            call = self._calls_by_key.get(piece.index)
        elif piece.call_id:
            call = self._calls_by_key.get(piece.call_id)
        if call is not None:
            return None if call.is_other_call(piece, listed) else call
        if piece.name or piece.index >= 0:
            return None
        return self._last_call

    def _get_call(self, call: _StreamedCall) -> ToolCall:
        """Return a call that is announced."""
        return cast("ToolCall", self.calls.items[call.output_index])

    def _read_call(self, entry: JsonObject, listed: set[int]) -> int:
        """Read a call or a piece of one, and return its output index; -1 if it is ignored.

        ``listed`` are the output indexes of the earlier calls in the same list.
        """
        piece = _read_piece(entry)
        call = self._find_call(piece, listed)
        if self._finish_reason:
            if self._is_repeated(call, piece):
                log.warning("a tool call that is repeated after finish_reason is ignored")
                return -1
            self._continued = True
        if call and call.is_announced and piece.name and piece.arguments:
            # Some servers send complete calls that share an id or an index. Complete arguments cannot be
            # extended, so this is another call, or a repetition; a list does not repeat a call.
            announced = self._get_call(call)
            in_list = call.output_index in listed
            if _is_complete(announced):
                if not in_list and announced.arguments == _argument_text(piece.arguments):
                    return call.output_index
                call = None
            elif in_list and (piece.index < 0 or not piece.call_id):
                call = None
        if call is None:
            call = self._add_call(piece)
        else:
            self._extend_call(call, piece)
        if piece.arguments not in (None, ""):
            self._announce_call()
        self._read_arguments(piece.arguments, call.output_index)
        return call.output_index

    def _add_call(self, piece: _CallPiece) -> _StreamedCall:
        """Return a new call; its name may be incomplete, so it is announced later."""
        self._announce_call()
        call = _StreamedCall(
            "custom_tool_call" if piece.is_custom else "function_call",
            output_index=self._item_index(len(self._item_indices)),
            call_id=piece.call_id,
            name=piece.name,
            fallback=piece.problem,
        )
        self._last_call = call
        if piece.index >= 0:
            self._calls_by_key[piece.index] = call
        if piece.call_id:
            self._calls_by_key[piece.call_id] = call
        return call

    def _extend_call(self, call: _StreamedCall, piece: _CallPiece) -> None:
        """Add the id and the name in a further piece of a call."""
        if not call.is_announced:
            call.extend(piece)
        elif piece.name or (piece.call_id and not call.call_id):
            call.call_id = call.call_id or piece.call_id
            call.name = call.name or piece.name
            self.calls.start(call)

    def _is_repeated(self, call: _StreamedCall | None, piece: _CallPiece) -> bool:
        """Return whether a piece after the finish reason belongs to a call that is complete."""
        if call is not None:
            if not call.is_announced:
                return False
            announced = self._get_call(call)
            return announced.custom or _is_complete(announced)
        text = _argument_text(piece.arguments or "")
        return any(
            not text or announced.arguments == text
            for announced in self.calls.sorted_calls()
            if announced.name == piece.name
        )

    def _read_arguments(self, arguments: object, output_index: int) -> None:
        if isinstance(arguments, str):
            delta = self._joiner.feed(("arguments", output_index), arguments)
            if delta:
                self.calls.append_arguments("", output_index, delta)
        elif arguments is not None:
            self.calls.set_arguments("", output_index, _argument_text(arguments))

    def _add_empty_arguments(self) -> None:
        """Set empty arguments for calls that have none, because their response is complete."""
        for call in self.calls.sorted_calls():
            if not call.completed and call.name and not call.arguments:
                self.calls.set_arguments("", call.output_index, "" if call.custom else "{}")

    def _update_facts(self, chunk: JsonObject) -> None:
        """Update the response fields, of which the first value is used, and usage, of which the last is used."""
        is_first = not self._facts
        for name in ("id", "model", "created"):
            self._facts[name] = self._facts.get(name) or chunk.get(name)
        self._usage = read_usage(chunk) or self._usage
        if is_first:
            facts = fields.read_facts({**self._facts, "finish_reason": None})
            self._events.append(types.ResponseStarted(**facts))

    DELTA_READERS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "reasoning_details": (_read_details,),
        "reasoning_content": (_read_text, "reasoning"),
        "reasoning": (_read_text, "reasoning"),
        "content": (_read_content,),
        "refusal": (_read_text, "refusal"),
        "tool_calls": (_read_tool_calls,),
        "function_call": (_read_function_call,),
        "annotations": (_read_annotations,),
    }
    """The fields of a delta that are read, in this order, with the method and its arguments after the value."""


def _argument_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _is_complete(call: ToolCall) -> bool:
    """Return whether the arguments of a function call are a complete JSON object."""
    if call.custom or not call.arguments.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


_CACHED_NAMES = ("prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens")
"""The names of DeepSeek, Mistral and others for cached tokens."""


def read_usage(chunk: JsonObject) -> Usage | None:
    """Return the token counts of a chunk, if any; Moonshot puts them into the choice, and Groq into ``x_groq``."""
    choices = fields.list_objects(chunk.get("choices"))[:1]
    for holder in (chunk, fields.get_object(chunk, "x_groq"), *choices):
        counts = fields.get_object(holder, "usage")
        if not counts:
            continue
        usage = fields.read_counts(counts, "prompt", "completion")
        if usage.cached_tokens:
            return usage
        cached = max(fields.get_count(counts, name) for name in _CACHED_NAMES)
        return structs.replace(usage, cached_tokens=cached)
    return None
