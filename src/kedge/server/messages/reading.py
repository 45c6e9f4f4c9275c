"""From a valid request to ``/v1/messages`` to a question: blocks become items."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kedge.server.choosing import check_tool_choice
from kedge.server.messages import refusals, shapes
from kedge.server.messages.order import Said, blocks_of, check_order, check_thinking, gather
from kedge.server.shapes.branches import Object
from kedge.server.stateless.question import Question, within
from kedge.server.thoughts import read_thought
from kedge.server.validation import Request
from kedge.server.wire import Item, encode

Body = Mapping[str, Any]
Open = Callable[[str], Any]

_REQUIRED = ("model", "max_tokens", "messages")
_CREATE = Request(Object(shapes.CREATE), _REQUIRED)
_CREATE_BEFORE = Request(Object({**shapes.CREATE, **shapes.SAMPLING}), _REQUIRED)
_COUNT = Request(Object(shapes.COUNT), required=("model", "messages"))

EFFORT = "medium"
"""How hard a model thinks that is told to think, but not how hard."""


NEWEST = "2026-10-21"
VERSIONS = ("2023-01-01", "2023-06-01", NEWEST)
"""The versions of the API; the newest knows no sampling parameters."""


def read(body: object, open: Open, version: str = NEWEST) -> Question:
    """Check a request to ``POST /v1/messages`` and read it; ``open`` opens the server's seals."""
    held = (_CREATE if version == NEWEST else _CREATE_BEFORE).check(body)
    _check_budget(held)
    question = _question(held, open)
    asked = {**question.body, "max_output_tokens": held["max_tokens"]}
    asked |= {name: held[name] for name in shapes.SAMPLING if name in held}
    stop = tuple(held.get("stop_sequences") or ())
    return Question(question.input, asked, live=held.get("stream") is True, stop=stop)


def read_count(body: object, open: Open) -> Question:
    """Check a request to ``POST /v1/messages/count_tokens`` and read it."""
    return _question(_COUNT.check(body), open)


def check_thoughts(body: Body) -> None:
    """Refuse a round of tools without its thought, of a model that thinks whenever it is told to."""
    if within(body, "thinking").get("type") == "enabled":
        check_thinking(gather(body["messages"]))


def thinks(body: Body) -> bool:
    """Whether a request wants to see thoughts."""
    return within(body, "thinking").get("type") in ("enabled", "adaptive", "between_tools")


def shows(body: Body) -> bool:
    """Whether the text of thoughts is shown, or only what proves them."""
    return within(body, "thinking").get("display") != "omitted"


def _question(held: Body, open: Open) -> Question:
    _check_tools(held)
    said = gather(held["messages"])
    check_order(said)
    asked = _parameters(held)
    check_tool_choice(asked, ())
    return Question([item for one in said for item in _items(one, open)], asked)


def _check_budget(held: Body) -> None:
    budget = within(held, "thinking").get("budget_tokens")
    if budget is not None and budget >= held["max_tokens"]:
        raise refusals.BUDGET_TOO_LARGE()


def _check_tools(held: Body) -> None:
    tools, choice = held.get("tools") or (), held.get("tool_choice")
    names = [tool["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise refusals.SAME_TOOL_TWICE()
    if choice is None:
        return
    if not tools:
        raise refusals.CHOICE_WITHOUT_TOOLS()
    if choice["type"] in ("any", "tool") and thinks(held):
        raise refusals.FORCED_THINKING()


def _parameters(held: Body) -> dict[str, Any]:
    """Name the parameters as the Responses API does."""
    asked: dict[str, Any] = {"model": held["model"], "truncation": "disabled"}
    if held.get("system"):
        asked["instructions"] = _joined(held["system"])
    if held.get("tools"):
        asked["tools"] = [_tool(tool) for tool in held["tools"]]
    choice = held.get("tool_choice")
    if choice is not None:
        asked["tool_choice"] = _choice(choice)
        if choice.get("disable_parallel_tool_use"):
            asked["parallel_tool_calls"] = False
    config = within(held, "output_config")
    if thinks(held):
        asked["reasoning"] = {"effort": config.get("effort") or EFFORT, "summary": "auto"}
    if config.get("format"):
        asked["text"] = {"format": {"name": "answer", "strict": True, **config["format"]}}
    if within(held, "metadata").get("user_id"):
        asked["user"] = held["metadata"]["user_id"]
    return asked


def _joined(system: str | Sequence[Body]) -> str:
    return system if isinstance(system, str) else "\n\n".join(block["text"] for block in system)


def _tool(tool: Body) -> dict[str, Any]:
    read: dict[str, Any] = {
        "type": "function",
        "name": tool["name"],
        "parameters": tool["input_schema"],
        "strict": tool.get("strict", False),
    }
    return read | ({"description": tool["description"]} if tool.get("description") else {})


def _choice(choice: Body) -> str | dict[str, Any]:
    if choice["type"] == "tool":
        return {"type": "function", "name": choice["name"]}
    kind: str = choice["type"]
    return "required" if kind == "any" else kind


def _items(said: Said, open: Open) -> Iterator[Item]:
    """Turn what one role says into items; neighbouring parts become one message."""
    parts: list[Item] = []

    def message() -> Iterator[Item]:
        if parts:
            yield {"type": "message", "role": said.role, "content": parts.copy()}
            parts.clear()

    for index, part, block in said.blocks:
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
                yield _result(block)
            case "thinking" | "redacted_thinking":
                yield from message()
                yield _thought(block, index, part, open)
            case "text" if said.role == "assistant":
                parts.append({"type": "output_text", "text": block["text"]})
            case _:
                parts.extend(_parts(block))
    yield from message()


def _result(block: Body) -> Item:
    content = block.get("content") or ""
    output = (
        content if isinstance(content, str) else [one for part in content for one in _parts(part)]
    )
    return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}


def _thought(block: Body, index: int, part: int, open: Open) -> Item:
    redacted = block["type"] == "redacted_thinking"
    sealed: str = block["data"] if redacted else block["signature"]
    text: str = "" if redacted else block["thinking"]
    thought = read_thought(open(sealed))
    expected = None if thought is None else (thought.text if thought.shown else "")
    if expected != text:
        refused = refusals.DATA_REFUSED if redacted else refusals.SIGNATURE_REFUSED
        raise refused(index=index, part=part)
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"type": "reasoning", "summary": summary, "encrypted_content": sealed}


def _parts(block: Body) -> Iterator[Item]:
    """The parts that say what a block says: one, but for blocks that hold others."""
    source: Any = block.get("source")
    if block["type"] == "text":
        yield {"type": "input_text", "text": block["text"]}
    elif block["type"] == "search_result":
        yield {"type": "input_text", "text": f"{block['title']} ({source})"}
        for one in block["content"]:
            yield from _parts(one)
    elif source["type"] == "content":
        inner: str | Sequence[Body] = source["content"]
        for one in blocks_of(inner):
            yield from _parts(one)
    elif source["type"] == "text":
        yield {"type": "input_text", "text": source["data"]}
    else:
        yield _sourced(block, source)


def _sourced(block: Body, source: Body) -> Item:
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
