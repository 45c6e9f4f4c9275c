"""From a valid chat request to a question: messages become items, parameters change their names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from kedge.server import errors
from kedge.server.choosing import check_tool_choice
from kedge.server.completions import refusals, shapes
from kedge.server.completions.order import check_order
from kedge.server.shapes.branches import Object
from kedge.server.stateless.question import Question, within
from kedge.server.validation import Request
from kedge.server.wire import Item

Body = Mapping[str, Any]

_CREATE = Request(Object(shapes.CREATE), required=("model", "messages"))

SAME = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Parameters that have the same name and shape in the Responses API."""


def read(body: object) -> Question:
    """Check a request to ``POST /v1/chat/completions`` and read it."""
    held = _CREATE.check(body)
    _check_together(held)
    check_order(held["messages"])
    asked = {**_parameters(held), "truncation": "disabled"}
    items = list(items_of(held["messages"]))
    check_tool_choice(asked, ())
    stop = held.get("stop") or ()
    return Question(
        items,
        asked,
        live=held.get("stream") is True,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def _check_together(body: Body) -> None:
    if not body["model"]:
        raise errors.MODEL_NOT_FOUND(model="")
    if (body.get("n") or 1) > 1:
        raise refusals.ONE_CHOICE(n=body["n"])
    if "audio" in (body.get("modalities") or ()):
        raise refusals.NO_AUDIO()
    if body.get("max_tokens") and body.get("max_completion_tokens"):
        raise refusals.TWO_LIMITS()
    if body.get("stream_options") is not None and not body.get("stream"):
        raise refusals.ONLY_WHEN_STREAMING()
    for name in ("tool_choice", "parallel_tool_calls"):
        if name in body and not body.get("tools"):
            raise refusals.ONLY_WITH_TOOLS(name=name)
    if within(body, "response_format").get("type") == "json_object" and not any(
        "json" in text.lower() for message in body["messages"] for text in _texts(message)
    ):
        raise refusals.JSON_NOT_MENTIONED()


def _texts(message: Body) -> Iterator[str]:
    content = message.get("content") or ()
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if "text" in part)


def _parameters(body: Body) -> dict[str, Any]:
    """Name the parameters as the Responses API does."""
    asked: dict[str, Any] = {name: body[name] for name in SAME if body.get(name) is not None}
    if body.get("tools"):
        asked["tools"] = [_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        asked["tool_choice"] = _choice(body["tool_choice"])
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most:
        asked["max_output_tokens"] = most
    if body.get("reasoning_effort") is not None:
        asked["reasoning"] = {"effort": body["reasoning_effort"]}
    text = {"format": _format(body.get("response_format")), "verbosity": body.get("verbosity")}
    if any(text.values()):
        asked["text"] = {name: value for name, value in text.items() if value is not None}
    for name in ("seed", "logit_bias"):
        if body.get(name) is not None:
            asked[name] = body[name]
    return asked


def _tool(tool: Body) -> dict[str, Any]:
    kind: str = tool["type"]
    flat: dict[str, Any] = {"type": kind, **tool[kind]}
    if kind == "function":
        return {"strict": False, **flat}
    if flat.get("format", {}).get("type") == "grammar":
        flat["format"] = {"type": "grammar", **flat["format"]["grammar"]}
    return flat


def _choice(choice: str | Body) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    kind: str = choice["type"]
    chosen: dict[str, Any] = {"type": kind, **choice[kind]}
    if kind == "allowed_tools":
        chosen["tools"] = [_allowed(tool) for tool in chosen["tools"]]
    return chosen


def _allowed(tool: Body) -> dict[str, Any]:
    kind = str(tool.get("type"))
    named: Any = tool.get(kind)
    known: Body = cast("Body", named) if isinstance(named, dict) else {}
    return {"type": kind, "name": known.get("name")}


def _format(wanted: Body | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted["type"] != "json_schema":
        return {"type": wanted["type"]}
    return {"type": "json_schema", "schema": {}, **wanted["json_schema"]}


def items_of(messages: Sequence[Body]) -> Iterator[Item]:
    """Turn messages into the items that say the same."""
    types: dict[str, str] = {}
    for message in messages:
        role: str = message["role"]
        if role == "assistant":
            for item in _said_by_model(message):
                if "call_id" in item:
                    types[item["call_id"]] = f"{item['type']}_output"
                yield item
        elif role == "tool":
            id: str = message["tool_call_id"]
            yield {"type": types[id], "call_id": id, "output": _content(message)}
        else:
            yield {"type": "message", "role": role, "content": _content(message)}


def _content(message: Body) -> str | list[Item]:
    content = message["content"]
    return content if isinstance(content, str) else [_part(part) for part in content]


def _said_by_model(message: Body) -> Iterator[Item]:
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "summary": [], "content": [text]}
    said = list(_answer_parts(message))
    if said:
        yield {"type": "message", "role": "assistant", "content": said}
    for call in message.get("tool_calls") or ():
        kind: str = call["type"]
        type = "function_call" if kind == "function" else "custom_tool_call"
        yield {"type": type, "call_id": call["id"], **call[kind]}


def _answer_parts(message: Body) -> Iterator[Item]:
    content: str | Sequence[Body] = message.get("content") or ()
    if isinstance(content, str):
        yield {"type": "output_text", "text": content}
    else:
        for part in content:
            refused = part["type"] == "refusal"
            yield part if refused else {"type": "output_text", "text": part["text"]}
    if message.get("refusal"):
        yield {"type": "refusal", "refusal": message["refusal"]}


def _part(part: Body) -> Item:
    match part["type"]:
        case "text":
            return {"type": "input_text", "text": part["text"]}
        case "image_url":
            image = part["image_url"]
            detail = image.get("detail", "auto")
            return {"type": "input_image", "image_url": image["url"], "detail": detail}
        case "file":
            return {"type": "input_file", **part["file"]}
        case _:
            return {"type": "input_audio", "input_audio": part["input_audio"]}
