"""From a valid request to ``/v1/messages`` to a question: blocks become items."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.server.anthropic import errors, schema
from kedge.server.encrypted_content import parse_reasoning_payload
from kedge.server.json_codec import Item, encode
from kedge.server.schema.containers import Object
from kedge.server.stateless_run import StatelessRequest, get_object
from kedge.server.validation import RequestSchema, check_tool_choice

ContentBlock = Mapping[str, Any]

ALLOWED_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that each role may use."""

THINKING_TYPES = ("thinking", "redacted_thinking")


@dataclass(slots=True)
class MergedMessage:
    """What one role says until the other answers: its blocks, each with its place."""

    role: str
    index: int
    blocks: list[tuple[int, int, ContentBlock]] = field(
        default_factory=list[tuple[int, int, ContentBlock]]
    )


def normalize_content(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    """Show any content as blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def merge_messages(messages: Sequence[Mapping[str, Any]]) -> list[MergedMessage]:
    """Join messages of one role in a row; refuse what is empty or out of place."""
    if not messages:
        raise errors.NO_MESSAGES()
    joined: list[MergedMessage] = []
    for index, message in enumerate(messages):
        role: str = message["role"]
        if not message["content"]:
            raise errors.EMPTY_MESSAGE(index=index)
        if not joined or joined[-1].role != role:
            joined.append(MergedMessage(role, index))
        for part, block in enumerate(normalize_content(message["content"])):
            _check_block(block, role, index, part)
            joined[-1].blocks.append((index, part, block))
    return joined


def _check_block(block: ContentBlock, role: str, index: int, part: int) -> None:
    if block["type"] not in ALLOWED_BLOCKS[role]:
        raise errors.BLOCK_NOT_ALLOWED(index=index, part=part, type=block["type"], role=role)
    if block["type"] == "text" and not block["text"].strip():
        raise errors.EMPTY_TEXT()


def check_order(merged: Sequence[MergedMessage]) -> None:
    """Refuse a conversation whose calls and results do not pair up, or that has no question."""
    talk = [one for one in merged if one.role != "system"]
    if not talk or talk[0].role != "user":
        raise errors.FIRST_NOT_USER()
    waiting: dict[str, None] = {}
    asking: MergedMessage | None = None
    for one in talk:
        if one.role == "user":
            _check_results(one, waiting, asking)
        asking, waiting = one, _collect_calls(one)
    if waiting and asking is not None:
        raise errors.CALLS_UNANSWERED(index=asking.index, ids=", ".join(waiting))
    if talk[-1].role == "assistant":
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
        if leading:  # results that stand behind other blocks do not count
            answered.add(id)
    missing = [id for id in pending if id not in answered]
    if missing and previous is not None:
        raise errors.CALLS_UNANSWERED(index=previous.index, ids=", ".join(missing))


def check_thinking(merged: Sequence[MergedMessage]) -> None:
    """Refuse to go on with a round of tools whose thought was left out."""
    last = merged[-1]
    if len(merged) < 2 or last.blocks[0][2]["type"] != "tool_result":
        return
    index, _, first = merged[-2].blocks[0]
    if first["type"] not in THINKING_TYPES:
        raise errors.THINKING_MISSING(index=index, type=first["type"])


Body = Mapping[str, Any]
Decrypt = Callable[[str], Any]

_REQUIRED = ("model", "max_tokens", "messages")
_CREATE = RequestSchema(Object(schema.CREATE_MESSAGE), _REQUIRED)
_CREATE_WITH_SAMPLING = RequestSchema(
    Object({**schema.CREATE_MESSAGE, **schema.SAMPLING_PARAMETERS}), _REQUIRED
)
_COUNT_TOKENS = RequestSchema(Object(schema.COUNT_TOKENS), required=("model", "messages"))

DEFAULT_EFFORT = "medium"
"""How hard a model thinks that is told to think, but not how hard."""


SERVICE_TIERS: Mapping[str, str] = {"auto": "auto", "standard_only": "default"}
"""The names of the tiers in the Responses API."""

LATEST_VERSION = "2026-10-21"
API_VERSIONS = ("2023-01-01", "2023-06-01", LATEST_VERSION)
"""The versions of the API; the newest knows no sampling parameters."""


def parse_request(
    body: object, decrypt: Decrypt, version: str = LATEST_VERSION
) -> StatelessRequest:
    """Check a request to ``POST /v1/messages`` and read it; ``open`` opens the server's seals."""
    held = (_CREATE if version == LATEST_VERSION else _CREATE_WITH_SAMPLING).check(body)
    # Never ignored: a client that continues a Thread sends only the newest messages. On this error the
    # anthropic package and Claude Code send the full conversation.
    if held.get("thread") is not None:
        raise errors.THREAD_UNSUPPORTED()
    _check_budget(held)
    question = _build_request(held, decrypt)
    asked = {**question.body, "max_output_tokens": held["max_tokens"]}
    asked |= {name: held[name] for name in schema.SAMPLING_PARAMETERS if name in held}
    stop = tuple(held.get("stop_sequences") or ())
    return StatelessRequest(question.input, asked, stream=held.get("stream") is True, stop=stop)


def parse_count_request(body: object, decrypt: Decrypt) -> StatelessRequest:
    """Check a request to ``POST /v1/messages/count_tokens`` and read it."""
    return _build_request(_COUNT_TOKENS.check(body), decrypt)


def check_thinking_blocks(body: Body) -> None:
    """Refuse a round of tools without its thought, of a model that thinks whenever it is told to."""
    if get_object(body, "thinking").get("type") == "enabled":
        check_thinking(merge_messages(body["messages"]))


def is_thinking_enabled(body: Body) -> bool:
    """Whether a request wants to see thoughts."""
    return get_object(body, "thinking").get("type") in ("enabled", "adaptive", "between_tools")


def is_thinking_shown(body: Body) -> bool:
    """Whether the text of thoughts is shown, or only what proves them."""
    return get_object(body, "thinking").get("display") != "omitted"


def _build_request(body: Body, decrypt: Decrypt) -> StatelessRequest:
    _check_tools(body)
    said = merge_messages(body["messages"])
    check_order(said)
    asked = _convert_parameters(body)
    check_tool_choice(asked, ())
    return StatelessRequest([item for one in said for item in _iter_items(one, decrypt)], asked)


def _check_budget(body: Body) -> None:
    budget = get_object(body, "thinking").get("budget_tokens")
    if budget is not None and budget >= body["max_tokens"]:
        raise errors.BUDGET_TOO_LARGE()


def _check_tools(body: Body) -> None:
    tools, choice = body.get("tools") or (), body.get("tool_choice")
    names = [tool["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise errors.DUPLICATE_TOOL()
    if choice is None:
        return
    if not tools:
        raise errors.CHOICE_WITHOUT_TOOLS()
    if choice["type"] in ("any", "tool") and is_thinking_enabled(body):
        raise errors.THINKING_WITH_FORCED_TOOL()


def _convert_parameters(body: Body) -> dict[str, Any]:
    """Name the parameters as the Responses API does."""
    asked: dict[str, Any] = {"model": body["model"], "truncation": "disabled"}
    if body.get("system"):
        asked["instructions"] = _join_system(body["system"])
    if body.get("tools"):
        asked["tools"] = [_convert_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        asked["tool_choice"] = _convert_tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            asked["parallel_tool_calls"] = False
    config = get_object(body, "output_config")
    if is_thinking_enabled(body):
        asked["reasoning"] = {"effort": config.get("effort") or DEFAULT_EFFORT, "summary": "auto"}
    if config.get("format"):
        asked["text"] = {"format": {"name": "answer", "strict": True, **config["format"]}}
    if get_object(body, "metadata").get("user_id"):
        asked["user"] = body["metadata"]["user_id"]
    if body.get("service_tier"):
        asked["service_tier"] = SERVICE_TIERS[body["service_tier"]]
    return asked


def _join_system(system: str | Sequence[Body]) -> str:
    return system if isinstance(system, str) else "\n\n".join(block["text"] for block in system)


def _convert_tool(tool: Body) -> dict[str, Any]:
    read: dict[str, Any] = {
        "type": "function",
        "name": tool["name"],
        "parameters": tool["input_schema"],
        "strict": tool.get("strict", False),
    }
    return read | ({"description": tool["description"]} if tool.get("description") else {})


def _convert_tool_choice(choice: Body) -> str | dict[str, Any]:
    if choice["type"] == "tool":
        return {"type": "function", "name": choice["name"]}
    kind: str = choice["type"]
    return "required" if kind == "any" else kind


def _iter_items(merged: MergedMessage, decrypt: Decrypt) -> Iterator[Item]:
    """Turn what one role says into items; neighbouring parts become one message."""
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
            case "text" if merged.role == "assistant":
                parts.append({"type": "output_text", "text": block["text"]})
            case _:
                parts.extend(_iter_parts(block))
    yield from message()


def _convert_result(block: Body) -> Item:
    content = block.get("content") or ""
    output = (
        content
        if isinstance(content, str)
        else [one for part in content for one in _iter_parts(part)]
    )
    return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}


def _convert_thinking(block: Body, index: int, part: int, decrypt: Decrypt) -> Item:
    redacted = block["type"] == "redacted_thinking"
    sealed: str = block["data"] if redacted else block["signature"]
    text: str = "" if redacted else block["thinking"]
    thought = parse_reasoning_payload(decrypt(sealed))
    expected = None if thought is None else (thought.text if thought.visible else "")
    if expected != text:
        refused = errors.INVALID_REDACTED_DATA if redacted else errors.INVALID_SIGNATURE
        raise refused(index=index, part=part)
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"type": "reasoning", "summary": summary, "encrypted_content": sealed}


def _iter_parts(block: Body) -> Iterator[Item]:
    """The parts that say what a block says: one, but for blocks that hold others."""
    source: Any = block.get("source")
    if block["type"] == "text":
        yield {"type": "input_text", "text": block["text"]}
    elif block["type"] == "search_result":
        yield {"type": "input_text", "text": f"{block['title']} ({source})"}
        for one in block["content"]:
            yield from _iter_parts(one)
    elif source["type"] == "content":
        inner: str | Sequence[Body] = source["content"]
        for one in normalize_content(inner):
            yield from _iter_parts(one)
    elif source["type"] == "text":
        yield {"type": "input_text", "text": source["data"]}
    else:
        yield _convert_source(block, source)


def _convert_source(block: Body, source: Body) -> Item:
    kind = "image" if block["type"] == "image" else "file"
    match source["type"]:
        case "url":
            part = {f"{kind}_url": source["url"]}
        case "file":
            part = {"file_id": source["file_id"]}
        case _:
            inline = "image_url" if kind == "image" else "file_data"
            part = {inline: f"data:{source['media_type']};base64,{source['data']}"}
    if kind == "file" and block.get("title"):
        part["filename"] = block["title"]
    return {"type": f"input_{kind}", **part}
