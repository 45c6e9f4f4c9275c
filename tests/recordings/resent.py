"""Compare what a request sends back with the answer as the provider sent it: nothing that it needs may be lost."""

import json
from typing import Any

from recordings.answers import parse_arguments, read_object
from recordings.exchanges import Exchange, JsonObject

SERVER_MEMBERS = frozenset({"status", "logprobs", "parsed_arguments"})
"""Members of an item that only a server sets."""
CHAT_MEMBERS = ("annotations", "reasoning_details", "extra_content", "thought_signature")
"""Members of a chat message that its provider needs to continue it."""


def compare_resent(exchange: Exchange, body: JsonObject) -> list[str]:
    """Return what is missing in a request that continues a recorded answer."""
    differences = _COMPARERS[exchange.api](read_object(exchange), body)
    return [f"sent back: {each}" for each in differences]


def compare_compacted(exchange: Exchange, body: JsonObject) -> list[str]:
    """Return what is missing in a request with the items that replace a compacted context: all of them are sent."""
    sent = [_normalize_item(item) for item in body["input"]]
    return [
        f"sent back: no item like {_describe(item)}"
        for item in read_object(exchange)["output"]
        if _normalize_item(item) not in sent
    ]


def _clean(value: Any, *drop: str) -> Any:
    """Return a JSON value without nulls, empty lists, and these members."""
    if isinstance(value, list):
        return [_clean(each, *drop) for each in value]
    if not isinstance(value, dict):
        return value
    cleaned = {k: _clean(v, *drop) for k, v in value.items() if k not in drop}
    return {k: v for k, v in cleaned.items() if v not in (None, [], {})}


def _describe(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:300]


def _compare_items(response: JsonObject, body: JsonObject) -> list[str]:
    """Compare the output items of a response with the input of a request."""
    output = response.get("output") or []
    compactions = [at for at, item in enumerate(output) if item["type"] == "compaction"]
    output = output[compactions[-1] if compactions else 0 :]
    sent = [_normalize_item(item) for item in body["input"]]
    found: list[str] = []
    for at, item in enumerate(output):
        following = output[at + 1] if at + 1 < len(output) else None
        if item["type"] == "reasoning" and (not item.get("encrypted_content") or following is None):
            continue  # of no use to a server that does not store it
        if _normalize_item(item) not in sent:
            found.append(f"no item like {_describe(item)}")
        is_bound = item["type"] == "reasoning" or (at and output[at - 1].get("encrypted_content"))
        if is_bound and item.get("id") not in [each.get("id") for each in body["input"]]:
            found.append(f"no id of {_describe(item)}")
    return found


def _normalize_item(item: JsonObject) -> Any:
    plain = _clean(item, "id", *SERVER_MEMBERS)
    if isinstance(plain.get("content"), str):
        kind = "output_text" if plain.get("role") == "assistant" else "input_text"
        plain["content"] = [{"type": kind, "text": plain["content"]}]
    return {"type": "message", **plain}


def _compare_messages(message: JsonObject, body: JsonObject) -> list[str]:
    """Compare the content of a message of the Messages API with the last answer of a request."""
    answers = [each["content"] for each in body["messages"] if each["role"] == "assistant"]
    sent = [_clean(block, "cache_control") for answer in answers for block in answer]
    blocks = message.get("content") or []
    found: list[str] = []
    for at, block in enumerate(blocks):
        is_trailing = all(each["type"] in ("thinking", "redacted_thinking") for each in blocks[at:])
        is_unsigned = block["type"] == "thinking" and not block.get("signature")
        is_blank = block["type"] == "text" and not block["text"].strip()
        if is_trailing or is_unsigned or is_blank:
            continue
        expected = _clean(block)
        if expected.get("caller") == {"type": "direct"}:
            del expected["caller"]  # the default
        if expected not in [_without_direct_caller(each) for each in sent]:
            found.append(f"no block like {_describe(block)}")
    return found


def _without_direct_caller(block: JsonObject) -> JsonObject:
    return {k: v for k, v in block.items() if (k, v) != ("caller", {"type": "direct"})}


def _compare_completion(completion: JsonObject, body: JsonObject) -> list[str]:
    """Compare the message of a completion with the last answer of a request."""
    message = (completion.get("choices") or [{}])[0].get("message") or {}
    answers = [each for each in body["messages"] if each["role"] == "assistant"]
    if not answers:
        has_content = message.get("content") or message.get("tool_calls")
        return ["no message of the assistant"] if has_content else []
    found: list[str] = []
    for name in CHAT_MEMBERS:
        value, resent_values = message.get(name), [_clean(each.get(name)) for each in answers]
        if value and _is_needed(name, value) and _clean(value) not in resent_values:
            found.append(f"no {name} like {_describe(value)}")
    written = _join_text(message.get("content"))
    sent = "".join(_join_text(each.get("content")) for each in answers)
    if written != sent:
        found.append(f"text {_describe(sent)} instead of {_describe(written)}")
    calls = [_normalize_call(call) for call in message.get("tool_calls") or []]
    resent = [_normalize_call(call) for each in answers for call in each.get("tool_calls") or []]
    for expected, actual in zip(calls, resent, strict=False):
        wanted = {**expected, "id": expected["id"] or actual["id"]}
        if wanted != actual:
            found.append(f"call {_describe(actual)} instead of {_describe(wanted)}")
    if len(calls) != len(resent):
        found.append(f"{len(resent)} calls instead of {len(calls)}")
    return found


def _is_needed(name: str, value: Any) -> bool:
    """Return whether a member is needed: reasoning only if the provider signed or encrypted it."""
    return name != "reasoning_details" or any(
        each.get("signature") or each.get("data") for each in value
    )


def _join_text(content: Any) -> str:
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _normalize_call(call: JsonObject) -> JsonObject:
    inner = call.get("function") or call.get("custom") or {}
    rest = {k: v for k, v in call.items() if k not in ("index", "id", "type", "function", "custom")}
    arguments = parse_arguments(inner.get("arguments", inner.get("input")))
    named = {"id": call.get("id") or "", "name": inner.get("name"), "arguments": arguments}
    return {**named, **_clean(rest)}


_COMPARERS = {
    "responses": _compare_items,
    "chat": _compare_completion,
    "messages": _compare_messages,
}
