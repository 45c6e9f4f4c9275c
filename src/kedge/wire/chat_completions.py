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


class _StreamedCall(ToolCall, eq=False):
    """A call as the chunks identify it."""

    is_announced: bool = False
    """Whether the call was started, because its name is complete."""

    def is_other_call(self, call_id: str, name: str, listed: set[int]) -> bool:
        """Return whether a piece under the same index starts another call: some number every call 0.

        A different id counts only together with a name, because some servers send a new id with every piece.
        Another name continues that of a call without arguments, but not in the same list.
        """
        renamed = bool(self.call_id and call_id and self.call_id != call_id)
        if not name or renamed or not self.name or name == self.name:
            return bool(name) and renamed
        return self.is_announced or self.output_index in listed

    def extend(self, call_id: str, problem: str, name: str) -> None:
        """Add what a piece holds about a call that is not announced; its name may be a part or repeated."""
        if not self.call_id:
            self.call_id, self.fallback = call_id, problem
        self.name = name if name.startswith(self.name) else self.name + name


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
            self._found.append(types.OpaqueEvent(kind, message))

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
        if logprobs := fields.get_object(choice, "logprobs"):
            self._logprobs += fields.read_logprobs({"logprobs": logprobs.get("content")})
        raw_fields = cast("JsonObject", raw)
        delta = {name: value for name, value in raw_fields.items() if value is not None}
        self._has_message = self._has_message or bool(raw_fields)
        if delta.get("reasoning_content") and "reasoning" in delta:
            del delta["reasoning"]  # some servers send the same text under both names
        for name, (read, *arguments) in self.DELTA_READERS.items():
            if name in delta:
                read(self, delta.pop(name), *arguments)
        rest = {
            name: value for name, value in delta.items() if name not in _IGNORED_FIELDS and value
        }
        if rest:
            self._found.append(types.OpaqueEvent("delta", rest))
            for name, value in rest.items():
                self._members[name] = fields.merge_values(self._members.get(name), value)
        if not self._finish_reason or self._continued:
            reason = fields.get_text(choice, "finish_reason")
            self._finish_reason = reason or self._finish_reason

    def _fail(self, message: JsonObject) -> None:
        self._has_failed = True
        self._found.append(
            types.StreamFailed(**fields.read_error(message), usage=read_usage(message))
        )

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
                value = content_part.get("thinking")
                for entry in cast("list[Any]", value) if isinstance(value, list) else [value]:
                    text = (
                        cast("JsonObject", entry).get("text") if isinstance(entry, dict) else entry
                    )
                    self._emit_delta("reasoning", fields.check_text(text, "thinking"))
            case _:
                self._annotations.append(content_part)
                self._found.append(types.OpaqueEvent("part", content_part))

    def _read_text(self, value: object, kind: TextKind) -> None:
        self._emit_delta(kind, fields.check_text(value, kind))

    def _read_details(self, value: object) -> None:
        """Read reasoning details, of which a piece with the same index and type continues the last one."""
        for piece in fields.list_objects(value):
            if not self._item_indices:
                # What comes after an answer belongs to it.
                self._item_index("reasoning")
            place = piece.get("index"), piece.get("type")
            known = [
                each for each in self._details if (each.get("index"), each.get("type")) == place
            ]
            if not known or place[0] is None:
                self._details.append(dict(piece))
                continue
            for name, member in piece.items():
                if name in _DETAIL_TEXTS:
                    known[-1][name] = fields.merge_values(known[-1].get(name), member)
                elif member is not None:
                    known[-1][name] = member

    def _read_annotations(self, value: object) -> None:
        self._annotations += fields.list_objects(value)

    def _emit_items(self, *, completed: bool) -> None:
        """Emit the items with what the deltas of the common events cannot express."""
        ending: JsonObject = {} if completed else {"status": "incomplete"}
        native = dict(self._members)
        if self._details and "reasoning" not in self._item_indices:
            native["reasoning_details"] = self._details
        elif self._details:
            is_last = len(self._item_indices) == 1
            index = self._item_index("reasoning")
            item = {**self._build_reasoning(index), **(ending if is_last else {})}
            self._found.append(types.ItemCompleted(repair_surrogates(item), index))
        members = {CHAT_MESSAGE: native} if native else {}
        has_message = "message" in self._item_indices or not self.calls.sorted_calls()
        if has_message and (members or self._annotations):
            item = {**self._build_message(), **members, **ending}
            self._found.append(
                types.ItemCompleted(repair_surrogates(item), self._item_index("message"))
            )
            members = {}
        for call in self.calls.sorted_calls():
            own = self._call_members.get(call.output_index)
            more = {**members, **({CHAT_CALL: own} if own else {})}
            if more and call.completed:
                members = {}
                item = {**call.complete_item({"type": call.type}), **more}
                self._found.append(types.ItemCompleted(item, call.output_index))

    def _build_reasoning(self, index: int) -> JsonObject:
        known, text = fields.get_text(self._facts, "id"), "".join(self._texts.get("reasoning", ()))
        sealed = [each.get("signature") or each.get("data") for each in self._details]
        return {
            **fields.build_reasoning(text, next((each for each in sealed if each), "")),
            CHAT_MESSAGE: {"reasoning_details": self._details},
            **({"id": f"{known}.{index}"} if known else {}),
        }

    def _build_message(self) -> JsonObject:
        text, refusal = ("".join(self._texts.get(kind, ())) for kind in ("text", "refusal"))
        part: JsonObject = {"type": "output_text", "text": text, "annotations": self._annotations}
        if self._text_logprobs:
            part["logprobs"] = [dict(each) for each in self._text_logprobs]
        refused = [{"type": "refusal", "refusal": refusal}] if refusal else []
        written = [part] if text or self._annotations else []
        return fields.build_message([*written, *refused])

    def _emit_delta(self, kind: TextKind, text: str) -> None:
        delta = self._joiner.feed(kind, text)
        if delta and self._finish_reason and not self._continued:
            delta = self._skip_repeated(kind, delta)
        if not delta:
            return
        self._announce_call()
        self._texts.setdefault(kind, []).append(delta)
        logprobs = self._take_logprobs() if kind == "text" else ()
        self._text_logprobs += logprobs
        index = self._item_index("reasoning" if kind == "reasoning" else "message")
        self._found.append(build_delta(kind, delta, "", index, int(kind == "refusal"), logprobs))

    def _item_index(self, item: object) -> int:
        """Return the output index of an item, which is the next one if the item is new."""
        return self._item_indices.setdefault(item, len(self._item_indices))

    def _skip_repeated(self, kind: TextKind, delta: str) -> str:
        """Return the text to emit after the finish reason: none while it repeats the answer."""
        known, start = "".join(self._texts.get(kind, ())), self._repeated.get(kind, 0)
        self._texts[kind] = [known]
        if known.startswith(delta, start):
            self._repeated[kind] = start + len(delta)
            return ""
        log.warning("the answer continues after finish_reason")
        self._continued = True
        return known[:start] + delta

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

    def _find_call(
        self, index: int, call_id: str, name: str, listed: set[int]
    ) -> _StreamedCall | None:
        """Return the call of a piece by its index, by its id or as the last one; None if it starts a new one."""
        key = index if index >= 0 else call_id
        known = None if key == "" else self._calls_by_key.get(key)
        if known is not None:
            return None if known.is_other_call(call_id, name, listed) else known
        return None if name or index >= 0 else self._last_call

    def _get_call(self, call: _StreamedCall) -> ToolCall:
        """Return a call that is announced."""
        return cast("ToolCall", self.calls.items[call.output_index])

    def _read_call(self, entry: JsonObject, listed: set[int]) -> int:
        """Read a call or a piece of one, and return its output index; -1 if it is ignored.

        ``listed`` are the output indexes of the earlier calls in the same list.
        """
        custom = isinstance(entry.get("custom"), dict)
        inner: object = entry.get("custom" if custom else "function", entry)
        if inner is not None and not isinstance(inner, dict):
            raise MalformedEvent("a tool call has no function")
        function = cast("JsonObject", inner or {})
        index, name = fields.get_index(entry, "index"), fields.get_text(function, "name")
        call_id, problem = read_call_id(entry.get("id"))
        arguments = function.get("input" if custom else "arguments")
        seen = self._find_call(index, call_id, name, listed)
        if self._finish_reason:
            if self._is_repeated(seen, name, arguments):
                log.warning("a tool call that is repeated after finish_reason is ignored")
                return -1
            self._continued = True
        if seen and seen.is_announced and name and arguments:
            # Some servers send complete calls that share an id or an index. Complete arguments cannot be
            # extended, so this is another call, or a repetition; a list does not repeat a call.
            known, in_list = self._get_call(seen), seen.output_index in listed
            if _is_complete(known):
                if not in_list and known.arguments == _argument_text(arguments):
                    return seen.output_index
                seen = None
            elif in_list and (index < 0 or not call_id):
                seen = None
        if seen is None:
            self._announce_call()
            kind = "custom_tool_call" if custom else "function_call"
            at = self._item_index(len(self._item_indices))
            seen = _StreamedCall(kind, "", at, call_id=call_id, name=name, fallback=problem)
            self._last_call = self._calls_by_key[index] = self._calls_by_key[call_id] = seen
        elif not seen.is_announced:
            seen.extend(call_id, problem, name)
        elif name or (call_id and not seen.call_id):
            seen.call_id, seen.name = seen.call_id or call_id, seen.name or name
            self.calls.start(seen)
        if arguments not in (None, ""):
            self._announce_call()
        self._read_arguments(arguments, seen.output_index)
        return seen.output_index

    def _is_repeated(self, seen: _StreamedCall | None, name: str, arguments: object) -> bool:
        """Return whether a piece after the finish reason belongs to a call that is complete."""
        if seen is not None:
            known = self._get_call(seen) if seen.is_announced else None
            return known is not None and (known.custom or _is_complete(known))
        text = _argument_text(arguments or "")
        calls = [call for call in self.calls.sorted_calls() if call.name == name]
        return any(not text or call.arguments == text for call in calls)

    def _read_arguments(self, arguments: object, output_index: int) -> None:
        if isinstance(arguments, str):
            if delta := self._joiner.feed(("arguments", output_index), arguments):
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
        began = bool(self._facts)
        for name in ("id", "model", "created"):
            self._facts[name] = self._facts.get(name) or chunk.get(name)
        self._usage = read_usage(chunk) or self._usage
        if not began:
            known = fields.read_facts({**self._facts, "finish_reason": None})
            self._found.append(types.ResponseStarted(**known))

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
        if counts := fields.get_object(holder, "usage"):
            usage = fields.read_counts(counts, "prompt", "completion")
            cached = max(fields.get_count(counts, name) for name in _CACHED_NAMES)
            return structs.replace(usage, cached_tokens=usage.cached_tokens or cached)
    return None
