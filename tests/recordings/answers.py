"""What an answer contains, in one form for the recorded object and for the blocks that Kedge makes of it.

``read_recorded`` reads the recorded response with code of its own, so that a mistake of the decoder is a difference.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from kedge import turns
from kedge.events import Outcome, Usage
from kedge.turns.frozen_json import FrozenMap, thaw
from recordings.exchanges import Exchange, JsonObject

EXTRA_MEMBERS = frozenset({"reasoning_details", "annotations"})
"""Members of a chat message with a field of their own in ``Answer``."""
READ_MEMBERS = EXTRA_MEMBERS | {
    "role", "name", "content", "refusal", "reasoning", "reasoning_content", "tool_calls", "function_call",
}  # fmt: skip
"""Members of a chat message that are read; others must be stored with a block."""
TRANSIENT_MEMBERS = frozenset({"channel"})
"""Members of a chat delta that describe the delta and not the message."""


@dataclass(slots=True)
class Answer:
    """The content of one answer."""

    status: str = "completed"
    reason: str = ""
    response_id: str = ""
    texts: list[str] = field(default_factory=list[str])
    refusals: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    encrypted: list[str] = field(default_factory=list[str])
    calls: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])
    citations: list[Any] = field(default_factory=list[Any])
    hosted: list[Any] = field(default_factory=list[Any])
    native: JsonObject = field(default_factory=dict[str, Any])
    usage: tuple[int, ...] = ()

    def compare(self, seen: "Answer") -> list[str]:
        """Return the fields in which another answer differs, with both values."""
        found: list[str] = []
        for each in fields(self):
            expected, actual = getattr(self, each.name), getattr(seen, each.name)
            if each.name == "calls":
                expected, actual = _without_missing_ids(expected, actual)
            if expected != actual:
                recorded, seen_here = _shorten(expected), _shorten(actual)
                found.append(f"{each.name}: recorded {recorded}, Kedge has {seen_here}")
        return found


def _without_missing_ids(expected: list[Any], actual: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the calls without the ids that the provider did not send, for which Kedge makes some."""
    if len(expected) != len(actual):
        return expected, actual
    pairs = zip(expected, actual, strict=True)
    return expected, [call if wanted[0] else ("", *call[1:]) for wanted, call in pairs]


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text)} characters)"


def parse_arguments(arguments: Any) -> Any:
    """Return the value of a call's arguments, so that blanks do not matter."""
    if not isinstance(arguments, str) or not arguments:
        return arguments or {}
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


# What Kedge has.


def read_blocks(blocks: Iterable[turns.Block], outcome: Outcome) -> Answer:
    """Return the content of an answer from its blocks."""
    answer = Answer(outcome.status, outcome.reason, outcome.response_id)
    if outcome.usage is not None:
        answer.usage = usage_numbers(outcome.usage)
    for block in blocks:
        match block:
            case turns.AssistantBlock():
                for part in block.parts:
                    if isinstance(part, turns.RefusalPart):
                        answer.refusals.append(part.text)
                    elif isinstance(part, turns.TextPart):
                        answer.texts += [part.text] if part.text else []
                        for name in ("annotations", "citations"):
                            answer.citations += thaw(part.extra.get(name, ()))
                    else:
                        answer.hosted.append(thaw(part.content))
            case turns.ToolCallBlock():
                answer.calls.append((block.call_id, block.name, parse_arguments(block.arguments)))
            case turns.ReasoningBlock():
                answer.reasoning += [text for text in (*block.summary, *block.texts) if text]
                answer.encrypted += [block.encrypted_content] if block.encrypted_content else []
            case turns.OpaqueBlock():
                answer.hosted.append(thaw(block.item))
            case _:
                pass
        answer.native |= _read_members(block)
    return answer


def _read_members(block: turns.Block) -> JsonObject:
    """Return the members of a chat message or call that are stored with a block."""
    item = block.extra.get("item")
    members = item if isinstance(item, FrozenMap) else FrozenMap()
    both = (members.get(name, FrozenMap()) for name in ("chat_message", "chat_call"))
    return {name: value for each in both for name, value in thaw(each).items()}


def usage_numbers(usage: Usage) -> tuple[int, ...]:
    """Return the counts of tokens in the order in which recorded ones are read."""
    names = ("input", "cached", "output", "reasoning", "cache_write")
    return tuple(getattr(usage, f"{name}_tokens") for name in names)


# What the provider sent.


def read_recorded(exchange: Exchange) -> Answer:
    """Return the content of a recorded answer."""
    return _READERS[exchange.api](read_object(exchange))


def read_object(exchange: Exchange) -> JsonObject:
    """Return the recorded response object."""
    return merge_stream(exchange) if exchange.is_stream else exchange.parse()


def merge_stream(exchange: Exchange) -> JsonObject:
    """Return the response object that a recorded stream describes."""
    return _MERGERS[exchange.api](exchange)


def _without_nulls(members: JsonObject | None) -> JsonObject:
    return {name: value for name, value in (members or {}).items() if value is not None}


def _count(counts: Any, *names: str) -> int:
    """Return the first count that is a number above 0."""
    values = [counts.get(name) for name in names] if isinstance(counts, dict) else []
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _read_response(response: JsonObject) -> Answer:
    """Read an object of the Responses API."""
    status, error = response.get("status") or "completed", response.get("error")
    details = response.get("incomplete_details") or {}
    status = _RESPONSE_STATUS.get(status, status)
    answer = Answer(status, details.get("reason") or "", response.get("id") or "")
    if error or answer.status == "failed":
        answer.status, answer.reason = "failed", ""
    for item in response.get("output") or []:
        match item["type"]:
            case "message":
                for part in item["content"]:
                    answer.texts += [part["text"]] if part.get("text") else []
                    answer.refusals += [part["refusal"]] if part["type"] == "refusal" else []
                    answer.citations += part.get("annotations") or []
            case "reasoning":
                parts = [*(item.get("summary") or []), *(item.get("content") or [])]
                answer.reasoning += [part["text"] for part in parts if part.get("text")]
                encrypted = item.get("encrypted_content")
                answer.encrypted += [encrypted] if encrypted else []
            case "function_call" | "custom_tool_call":
                written = parse_arguments(item.get("arguments", item.get("input")))
                answer.calls.append((item.get("call_id") or "", item["name"], written))
            case _:
                answer.hosted.append(item)
    usage = response.get("usage")
    if usage:
        inputs, outputs = usage.get("input_tokens_details"), usage.get("output_tokens_details")
        answer.usage = (
            _count(usage, "input_tokens"),
            _count(inputs, "cached_tokens"),
            _count(usage, "output_tokens"),
            _count(outputs, "reasoning_tokens"),
            _count(inputs, "cache_write_tokens"),
        )
    return answer


_RESPONSE_STATUS = {
    "complete": "completed",
    "cancelled": "failed",
    "in_progress": "running",
    "queued": "running",
}


def _merge_response(exchange: Exchange) -> JsonObject:
    """Return the response of a stream: the last one that is listed, with the streamed items if it lists none.

    A provider encrypts an item anew when it lists it, so what it encrypted first is used.
    """
    last: JsonObject = {}
    items: dict[int, JsonObject] = {}
    for event in exchange.iter_events():
        if isinstance(event.get("response"), dict):
            last = event["response"]
        elif event.get("type") == "response.output_item.done":
            items[event.get("output_index", len(items))] = event["item"]
        elif event.get("type") == "error":
            return {**last, "status": "failed", "output": list(items.values())}
    sealed: JsonObject = {
        each["id"]: {"encrypted_content": each["encrypted_content"]}
        for each in items.values()
        if each.get("id") and "encrypted_content" in each
    }
    listed = [{**each, **sealed.get(each.get("id"), {})} for each in last.get("output") or []]
    return {**last, "output": listed or list(items.values())}


def _read_completion(completion: JsonObject) -> Answer:
    """Read an object of the Chat Completions API."""
    choices = completion.get("choices") or [{}]
    choice = next((each for each in choices if not each.get("index")), choices[0])
    message = _without_nulls(choice.get("message"))
    finish = (choice.get("finish_reason") or "stop").lower()
    ending = _FINISH.get(finish, ("incomplete", finish))
    answer = Answer(*ending, response_id=completion.get("id") or "")
    if completion.get("error"):
        answer.status, answer.reason = "failed", ""
    _read_chat_content(answer, message.get("content"))
    answer.texts = ["".join(answer.texts)] if answer.texts else []
    answer.refusals += [message["refusal"]] if message.get("refusal") else []
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    thoughts = "".join([thought, *answer.reasoning])
    answer.reasoning = [thoughts] if thought or answer.reasoning else []
    details = message.get("reasoning_details") or []
    for call in message.get("tool_calls") or []:
        inner = call.get("function") or call.get("custom") or {}
        written = parse_arguments(inner.get("arguments", inner.get("input")))
        answer.calls.append((call.get("id") or "", inner.get("name") or "", written))
        answer.native |= {k: v for k, v in call.items() if k not in _CALL_MEMBERS and v is not None}
    answer.citations += message.get("annotations") or []
    answer.native |= {"reasoning_details": details} if details else {}
    rest = {k: v for k, v in message.items() if k not in READ_MEMBERS | TRANSIENT_MEMBERS}
    answer.native |= {name: value for name, value in rest.items() if value}
    answer.usage = _read_chat_usage(completion, choice)
    return answer


_CALL_MEMBERS = frozenset({"id", "index", "type", "function", "custom"})
_FINISH: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("stop", "tool_calls", "function_call", "end_turn"), ("completed", "")),
    **dict.fromkeys(("tool_use", "eos", "stop_sequence"), ("completed", "")),
    **dict.fromkeys(("length", "max_tokens", "model_length"), ("incomplete", "max_output_tokens")),
    "content_filter": ("incomplete", "content_filter"),
    **dict.fromkeys(("error", "abort", "cancelled"), ("failed", "")),
    "insufficient_system_resource": ("failed", ""),
}


def _read_chat_content(answer: Answer, content: Any) -> None:
    if isinstance(content, str):
        answer.texts += [content] if content else []
        return
    for part in content or []:
        match part["type"]:
            case "text" | "output_text":
                answer.texts += [part["text"]] if part["text"] else []
            case "refusal":
                answer.refusals.append(part["refusal"])
            case "thinking":
                thought = part["thinking"]
                entries = thought if isinstance(thought, list) else [{"text": thought}]
                answer.reasoning += [each["text"] for each in entries if each.get("text")]
            case _:
                answer.citations.append(part)


def _read_chat_usage(completion: JsonObject, choice: JsonObject) -> tuple[int, ...]:
    holders = (completion, completion.get("x_groq") or {}, choice)
    usage = next((each["usage"] for each in holders if each.get("usage")), None)
    if not usage:
        return ()
    inputs, outputs = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    cached = _count(inputs, "cached_tokens")
    return (
        _count(usage, "prompt_tokens"),
        cached or _count(usage, "prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens"),
        _count(usage, "completion_tokens"),
        _count(outputs, "reasoning_tokens"),
        _count(inputs, "cache_write_tokens"),
    )


def _merge_completion(exchange: Exchange) -> JsonObject:
    """Return the completion that the chunks of a stream describe."""
    merged: JsonObject = {}
    message: JsonObject = {}
    calls: dict[Any, JsonObject] = {}
    choice: JsonObject = {"message": message}
    for chunk in exchange.iter_events():
        merged |= {k: v for k, v in chunk.items() if k != "choices" and v is not None and v != ""}
        for each in chunk.get("choices") or []:
            if each.get("index"):
                continue
            choice |= {k: v for k, v in each.items() if k not in ("delta", "message") and v}
            for name, value in (each.get("delta") or {}).items():
                _merge_member(message, calls, name, value)
    if calls:
        message["tool_calls"] = list(calls.values())
    return {**merged, "choices": [choice]}


def _merge_member(message: JsonObject, calls: dict[Any, JsonObject], name: str, value: Any) -> None:
    if name == "tool_calls":
        for call in value or []:
            known = calls.setdefault(
                call.get("index", call.get("id")), {"function": {"name": "", "arguments": ""}}
            )
            function = call.get("function") or {}
            known["function"]["name"] += function.get("name") or ""
            known["function"]["arguments"] += function.get("arguments") or ""
            known |= {k: v for k, v in call.items() if k != "function" and v}
    elif name == "reasoning_details":
        _merge_details(message.setdefault(name, []), value or [])
    elif isinstance(value, str) and name not in ("role", *TRANSIENT_MEMBERS):
        message[name] = message.get(name, "") + value
    elif isinstance(value, list):
        message[name] = [*message.get(name, []), *value]
    elif isinstance(value, dict) and isinstance(message.get(name), dict):
        known = message[name]
        for key, piece in value.items():
            grows = isinstance(piece, str) and isinstance(known.get(key), str) and key != "id"
            known[key] = known[key] + piece if grows else known.get(key) or piece
    elif value is not None:
        message[name] = value


def _merge_details(known: list[JsonObject], pieces: list[JsonObject]) -> None:
    """Add pieces of reasoning details; those with the same index and type continue one another."""
    for piece in pieces:
        place = (piece.get("index"), piece.get("type"))
        same = [each for each in known if (each.get("index"), each.get("type")) == place]
        if not same or piece.get("index") is None:
            known.append(dict(piece))
            continue
        for name, value in piece.items():
            grows = name in ("text", "summary", "data")
            if value is not None:
                same[-1][name] = (same[-1].get(name) or "") + value if grows else value


def _read_message(message: JsonObject) -> Answer:
    """Read an object of the Messages API."""
    reason = message.get("stop_reason") or "end_turn"
    answer = Answer(*_STOP.get(reason, ("incomplete", reason)), response_id=message.get("id") or "")
    if message.get("type") == "error":
        answer.status, answer.reason = "failed", ""
    for block in message.get("content") or []:
        match block["type"]:
            case "text":
                answer.texts += [block["text"]] if block["text"] else []
                answer.citations += block.get("citations") or []
            case "thinking":
                answer.reasoning += [block["thinking"]] if block["thinking"] else []
                answer.encrypted += [block["signature"]] if block.get("signature") else []
            case "redacted_thinking":
                answer.encrypted.append(block["data"])
            case "tool_use":
                answer.calls.append((block["id"], block["name"], block["input"]))
            case _:
                answer.hosted.append(block)
    if reason == "refusal":
        explanation = (message.get("stop_details") or {}).get("explanation")
        answer.refusals.append(explanation or "The model declined to answer.")
    usage = message.get("usage")
    if usage:
        rounds = usage.get("iterations") or [usage]
        cached = sum(_count(each, "cache_read_input_tokens") for each in rounds)
        written = sum(_count(each, "cache_creation_input_tokens") for each in rounds)
        fresh = sum(_count(each, "input_tokens") for each in rounds)
        answer.usage = (
            fresh + cached + written,
            cached,
            sum(_count(each, "output_tokens") for each in rounds),
            _count(usage.get("output_tokens_details"), "thinking_tokens"),
            written,
        )
    return answer


_STOP: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("end_turn", "tool_use", "stop_sequence", "refusal"), ("completed", "")),
    "max_tokens": ("incomplete", "max_output_tokens"),
}


def _merge_message(exchange: Exchange) -> JsonObject:
    """Return the message that a stream describes."""
    message: JsonObject = {}
    blocks: dict[int, JsonObject] = {}
    inputs: dict[int, str] = {}
    for event in exchange.iter_events():
        match event.get("type"):
            case "message_start":
                if message.get("id", event["message"]["id"]) != event["message"]["id"]:
                    message["type"] = "error"  # another message is not the rest of this one
                    break
                message = dict(event["message"])
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                _merge_delta(blocks[event["index"]], event["delta"], event["index"], inputs)
            case "message_delta":
                message |= _without_nulls(event["delta"])
                usage = _without_nulls(event.get("usage"))
                message["usage"] = {**(message.get("usage") or {}), **usage}
            case "error":
                message["type"] = "error"
            case _:
                pass
    for index, written in inputs.items():
        blocks[index]["input"] = parse_arguments(written)
    return {**message, "content": [blocks[index] for index in sorted(blocks)]}


def _merge_delta(block: JsonObject, delta: JsonObject, index: int, inputs: dict[int, str]) -> None:
    match delta["type"]:
        case "input_json_delta":
            inputs[index] = inputs.get(index, "") + delta["partial_json"]
        case "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta["citation"]]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case _:
            for name in delta.keys() - {"type"}:
                known, value = block.get(name), delta[name]
                if isinstance(known, str) and isinstance(value, str):
                    value = known + value
                block[name] = value


_READERS = {"responses": _read_response, "chat": _read_completion, "messages": _read_message}
_MERGERS = {"responses": _merge_response, "chat": _merge_completion, "messages": _merge_message}
