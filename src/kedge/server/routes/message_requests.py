"""Convert a request to ``/v1/messages`` to items and parameters of the Responses API."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from kedge._internal.json_text import encode
from kedge.server.encrypted_content import parse_reasoning_payload
from kedge.server.object_forms import Item
from kedge.server.routes import message_errors as errors
from kedge.server.routes import message_schema as schema
from kedge.server.schema.requests import RequestSchema, check_tool_choice
from kedge.server.schema.validators import get_object, is_ignoring_unknown

ContentBlock = Mapping[str, Any]

ALLOWED_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "document", "search_result", "tool_result", *schema.HOSTED_BLOCKS),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", *schema.HOSTED_BLOCKS),
    "system": ("text", *schema.HOSTED_BLOCKS),
}
"""The types of blocks that each role may use."""


class MergedMessage(Struct):
    """Consecutive messages of one role: their blocks, each with its message and block index."""

    role: str
    index: int
    blocks: list[tuple[int, int, ContentBlock]] = []


def normalize_content(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    """Return content as a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def merge_messages(messages: Sequence[Mapping[str, Any]]) -> list[MergedMessage]:
    """Merge consecutive messages of one role; reject empty content and misplaced blocks."""
    if not messages:
        raise errors.NO_MESSAGES()
    merged: list[MergedMessage] = []
    for index, message in enumerate(messages):
        role: str = message["role"]
        if not message["content"]:
            raise errors.EMPTY_MESSAGE(index=index)
        if not merged or merged[-1].role != role:
            merged.append(MergedMessage(role, index))
        for part, block in enumerate(normalize_content(message["content"])):
            _check_block(block, role, index, part)
            merged[-1].blocks.append((index, part, block))
    return merged


def _check_block(block: ContentBlock, role: str, index: int, part: int) -> None:
    if block["type"] not in ALLOWED_BLOCKS[role]:
        raise errors.BLOCK_NOT_ALLOWED(index=index, part=part, type=block["type"], role=role)
    if block["type"] == "text" and not block["text"].strip():
        raise errors.EMPTY_TEXT()


def check_order(merged: Sequence[MergedMessage]) -> None:
    """Reject messages whose calls and results do not match, or that end with the assistant."""
    messages = [message for message in merged if message.role != "system"]
    if not messages:
        raise errors.FIRST_NOT_USER()
    pending: dict[str, None] = {}
    previous: MergedMessage | None = None
    for message in messages:
        if message.role == "user":
            _check_results(message, pending, previous)
        previous = message
        pending = _collect_calls(message)
    if pending and previous is not None:
        raise errors.CALLS_UNANSWERED(index=previous.index, ids=", ".join(pending))
    if messages[-1].role == "assistant":
        raise errors.PREFILL_UNSUPPORTED()


def _collect_calls(message: MergedMessage) -> dict[str, None]:
    calls: dict[str, None] = {}
    for index, part, block in message.blocks:
        if block["type"] == "tool_use":
            if block["id"] in calls:
                raise errors.DUPLICATE_CALL(index=index, part=part)
            calls[block["id"]] = None
    return calls


def _check_results(
    message: MergedMessage, pending: Mapping[str, None], previous: MergedMessage | None
) -> None:
    answered: set[str] = set()
    leading = True
    for index, part, block in message.blocks:
        if block["type"] != "tool_result":
            leading = False
            continue
        id: str = block["tool_use_id"]
        if id not in pending:
            raise errors.RESULT_WITHOUT_CALL(index=index, part=part, id=id)
        if id in answered:
            raise errors.DUPLICATE_RESULT(index=index, part=part, id=id)
        if leading:  # results after other blocks do not count
            answered.add(id)
    missing = [id for id in pending if id not in answered]
    if missing and previous is not None:
        raise errors.CALLS_UNANSWERED(index=previous.index, ids=", ".join(missing))


Body = Mapping[str, Any]
Decrypt = Callable[[str], Any]

_CREATE = RequestSchema(schema.CREATE_MESSAGE)
_CREATE_WITH_SAMPLING = RequestSchema({**schema.CREATE_MESSAGE, **schema.SAMPLING_PARAMETERS})
_COUNT_TOKENS = RequestSchema(schema.COUNT_TOKENS)

DEFAULT_EFFORT = "medium"
"""The reasoning effort if thinking is enabled without one."""


SERVICE_TIERS: Mapping[str, str] = {"auto": "auto", "standard_only": "default"}
"""The names of the tiers in the Responses API."""

LATEST_VERSION = "2026-10-21"
API_VERSIONS = ("2023-01-01", "2023-06-01", LATEST_VERSION)
"""The versions of the API; the newest has no sampling parameters."""


def parse_request(
    body: dict[str, Any], decrypt: Decrypt, version: str = LATEST_VERSION
) -> dict[str, Any]:
    """Validate a request to ``POST /v1/messages`` and convert it to one of the Responses API.

    Args:
        body: The parsed JSON.
        decrypt: Decrypts content that this server encrypted.
        version: The version of the API.

    Returns:
        The request.

    Raises:
        ApiError: The first violation.
    """
    parameters = _CREATE_WITH_SAMPLING
    if version == LATEST_VERSION:
        parameters = _CREATE
    checked = parameters.check_body(body)
    # A thread is never ignored: a client that continues one sends only the newest messages. After this error
    # the anthropic package and Claude Code send the full conversation.
    if checked.get("thread") is not None:
        raise errors.THREAD_UNSUPPORTED()
    budget = get_object(checked, "thinking").get("budget_tokens")
    if budget is not None and budget >= checked["max_tokens"]:
        raise errors.BUDGET_TOO_LARGE()
    params = _build_request(checked, decrypt)
    params["max_output_tokens"] = checked["max_tokens"]
    params["stop"] = tuple(checked.get("stop_sequences") or ())
    if not is_ignoring_unknown() and not all(map(str.strip, params["stop"])):
        raise errors.BLANK_STOP_SEQUENCE()
    same_names = ("stream", *schema.SAMPLING_PARAMETERS)
    return params | {name: checked[name] for name in same_names if name in checked}


def parse_count_request(body: dict[str, Any], decrypt: Decrypt) -> dict[str, Any]:
    """Validate and convert a request to ``POST /v1/messages/count_tokens``."""
    return _build_request(_COUNT_TOKENS.check_body(body), decrypt)


def check_thinking_blocks(body: Body) -> None:
    """Reject a round of tool calls without its thinking block, if thinking is ``enabled``."""
    merged = merge_messages(body["messages"])
    if get_object(body, "thinking").get("type") != "enabled" or len(merged) < 2:
        return
    answer, results = merged[-2:]
    _, _, first_result = results.blocks[0]
    if first_result["type"] != "tool_result":
        return
    index, _, first = answer.blocks[0]
    if first["type"] not in schema.THINKING_TYPES:
        raise errors.THINKING_MISSING(index=index, type=first["type"])


def is_thinking_enabled(body: Body) -> bool:
    """Return whether the response contains thinking blocks."""
    return get_object(body, "thinking").get("type") in ("enabled", "adaptive", "between_tools")


def is_thinking_shown(body: Body) -> bool:
    """Return whether thinking blocks contain their text, or only their signature."""
    return get_object(body, "thinking").get("display") != "omitted"


def _build_request(body: Body, decrypt: Decrypt) -> dict[str, Any]:
    _check_tools(body)
    messages = merge_messages(body["messages"])
    check_order(messages)
    params = _convert_parameters(body)
    check_tool_choice(params, ())
    params["input"] = [item for message in messages for item in iter_items(message, decrypt)]
    return params


def _check_tools(body: Body) -> None:
    tools: Sequence[Body] = body.get("tools") or ()
    choice = body.get("tool_choice")
    names = [tool["name"] for tool in tools if not is_hosted(tool)]
    if len(set(names)) < len(names):
        raise errors.DUPLICATE_TOOL()
    if choice is None:
        return
    if not tools:
        raise errors.CHOICE_WITHOUT_TOOLS()
    # With adaptive thinking the model decides, so that a forced call is possible.
    thinking = get_object(body, "thinking").get("type")
    if choice["type"] in ("any", "tool") and thinking in ("enabled", "between_tools"):
        raise errors.THINKING_WITH_FORCED_TOOL()


def _convert_parameters(body: Body) -> dict[str, Any]:
    """Convert the parameters to those of the Responses API."""
    params: dict[str, Any] = {"model": body["model"], "truncation": "disabled"}
    if body.get("system"):
        params["instructions"] = join_system(body["system"])
    tools: Sequence[Body] = body.get("tools") or ()
    functions = [convert_tool(tool) for tool in tools if not is_hosted(tool)]
    if functions:
        params["tools"] = functions
    choice = body.get("tool_choice")
    hosted_names = [tool.get("name") for tool in tools if is_hosted(tool)]
    if choice is not None and functions and choice.get("name") not in hosted_names:
        params["tool_choice"] = _convert_tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            params["parallel_tool_calls"] = False
    config = get_object(body, "output_config")
    if is_thinking_enabled(body):
        params["reasoning"] = {"effort": config.get("effort") or DEFAULT_EFFORT, "summary": "auto"}
    if config.get("format"):
        params["text"] = {"format": {"name": "answer", "strict": True, **config["format"]}}
    if get_object(body, "metadata").get("user_id"):
        params["user"] = body["metadata"]["user_id"]
    if body.get("service_tier"):
        params["service_tier"] = SERVICE_TIERS[body["service_tier"]]
    return params


def join_system(system: str | Sequence[Body]) -> str:
    """Return system text as one string."""
    if isinstance(system, str):
        return system
    return "\n\n".join(block["text"] for block in system)


def is_hosted(tool: Body) -> bool:
    """Return whether a tool runs at the provider."""
    return tool.get("type") in schema.HOSTED_TOOLS


def convert_tool(tool: Body) -> dict[str, Any]:
    """Convert a tool to a function of the Responses API."""
    converted: dict[str, Any] = {
        "type": "function",
        "name": tool["name"],
        "parameters": tool.get("input_schema") or {"type": "object"},
        "strict": tool.get("strict", False),
    }
    if tool.get("description"):
        converted["description"] = tool["description"]
    return converted


def _convert_tool_choice(choice: Body) -> str | dict[str, Any]:
    match choice["type"]:
        case "tool":
            return {"type": "function", "name": choice["name"]}
        case "any":
            return "required"
        case kind:
            return kind


def iter_items(merged: MergedMessage, decrypt: Decrypt) -> Iterator[Item]:
    """Convert merged messages to items; adjacent parts become one message."""
    parts: list[Item] = []

    def message() -> Iterator[Item]:
        if parts:
            yield {"type": "message", "role": merged.role, "content": parts.copy()}
            parts.clear()

    for index, part, block in merged.blocks:
        match block["type"]:
            case "tool_use":
                yield from message()
                arguments = encode(block["input"]).decode()
                yield {
                    "type": "function_call",
                    "call_id": block["id"],
                    "name": block["name"],
                    "arguments": arguments,
                }
            case "tool_result":
                yield from message()
                yield _convert_result(block)
            case "thinking" | "redacted_thinking":
                yield from message()
                yield _convert_thinking(block, index, part, decrypt)
            case kind if kind in schema.HOSTED_BLOCKS:
                continue
            case "text" if merged.role == "assistant":
                parts.append({"type": "output_text", "text": block["text"]})
            case _:
                parts.extend(_iter_parts(block))
    yield from message()


def _convert_result(block: Body) -> Item:
    content = block.get("content") or ""
    output: str | list[Item] = content
    if not isinstance(content, str):
        output = [part for inner in content for part in _iter_parts(inner)]
    return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}


def _convert_thinking(block: Body, index: int, part: int, decrypt: Decrypt) -> Item:
    encrypted: str
    text: str
    if block["type"] == "redacted_thinking":
        encrypted = block["data"]
        text = ""
        invalid = errors.INVALID_REDACTED_DATA
    else:
        encrypted = block["signature"]
        text = block["thinking"]
        invalid = errors.INVALID_SIGNATURE

    payload = parse_reasoning_payload(decrypt(encrypted))
    if payload is None:
        raise invalid(index=index, part=part)
    shown_text = payload.text if payload.visible else ""
    if text != shown_text:
        raise invalid(index=index, part=part)
    summary: list[Item] = []
    if text:
        summary.append({"type": "summary_text", "text": text})
    return {"type": "reasoning", "summary": summary, "encrypted_content": encrypted}


def _iter_parts(block: Body) -> Iterator[Item]:
    """Yield the content parts of a block: one, or several for a block with nested blocks."""
    source: Any = block.get("source")
    if block["type"] == "text":
        yield {"type": "input_text", "text": block["text"]}
    elif block["type"] == "tool_reference":
        yield {"type": "input_text", "text": block["tool_name"]}
    elif block["type"] == "search_result":
        yield {"type": "input_text", "text": f"{block['title']} ({source})"}
        for inner in block["content"]:
            yield from _iter_parts(inner)
    elif source["type"] == "content":
        for inner in normalize_content(source["content"]):
            yield from _iter_parts(inner)
    elif source["type"] == "text":
        yield {"type": "input_text", "text": source["data"]}
    else:
        yield _convert_source(block, source)


def _convert_source(block: Body, source: Body) -> Item:
    if block["type"] == "image":
        return {"type": "input_image", **_convert_address(source, "image_url", "image_url")}
    part: dict[str, Any] = {
        "type": "input_file",
        **_convert_address(source, "file_url", "file_data"),
    }
    if block.get("title"):
        part["filename"] = block["title"]
    return part


def _convert_address(source: Body, url_member: str, data_member: str) -> dict[str, Any]:
    """Return the member of a content part that says where its data is, or has the data itself."""
    match source["type"]:
        case "url":
            return {url_member: source["url"]}
        case "file":
            return {"file_id": source["file_id"]}
        case _:
            return {data_member: f"data:{source['media_type']};base64,{source['data']}"}
