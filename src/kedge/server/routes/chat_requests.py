"""The schema of a chat completion request, as in the openai package, and its conversion to the Responses API.

``functions``, ``function_call`` and the role ``function``, which tools have replaced, are not supported.
An assistant's ``reasoning_content`` is not part of OpenAI's API, but many open servers send it, and clients
that replay messages send it back.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from kedge.server import errors
from kedge.server.errors import ErrorTemplate
from kedge.server.object_forms import Item
from kedge.server.schema import requests
from kedge.server.schema import validators as v
from kedge.server.schema.items import NAME
from kedge.server.schema.json_schemas import check_schemas
from kedge.server.schema.tables import ANY_OBJECT, STRING, Rules

PARTS = Rules(
    order={
        "text": "text prompt_cache_breakpoint?",
        "image_url": "image_url prompt_cache_breakpoint?",
        "input_audio": "input_audio prompt_cache_breakpoint?",
        "file": "file prompt_cache_breakpoint?",
    }
).build("chat", "content")


def text_or_parts(
    *types: str, foreign: Mapping[str, v.Members] | None = None, skips_unknown: bool = False
) -> v.TypeUnion:
    """Build the schema of a content: a text, or a list of parts of these types."""
    union = v.TaggedUnion({type: PARTS[type] for type in types}, foreign=foreign or {})
    parts = v.Array(union, skips_unknown=skips_unknown)
    return v.TypeUnion("one of a string or array of objects", {str: STRING, list: parts})


TEXT_CONTENT = text_or_parts("text")
TOOL_CALL = v.TaggedUnion(
    {
        "function": {
            "id!": STRING,
            "index~": v.Integer(),
            "function!": {"name!": NAME, "arguments!": STRING, "parsed_arguments~": v.AnyJson()},
        },
        "custom": {
            "id!": STRING,
            "index~": v.Integer(),
            "custom!": {"name!": NAME, "input!": STRING},
        },
    },
    foreign_default="function",
)
MESSAGES = Rules(
    order={
        "assistant": (
            "name content refusal reasoning_content? annotations? parsed~ audio function_call tool_calls?"
        ),
        "assistant.audio": "id data~ expires_at~ transcript~",
        "user": "name",
        "system": "name",
        "developer": "name",
        "tool": "name content tool_call_id",
    },
    types={
        "*.name": STRING,
        "*.content": TEXT_CONTENT,
        "user.content": text_or_parts(
            "text",
            "image_url",
            "input_audio",
            "file",
            foreign={"video_url": {"video_url!": {"url!": STRING}}},
        ),
        "assistant.content": text_or_parts("text", "refusal", skips_unknown=True),
        "assistant.reasoning_content": STRING,
        "assistant.annotations": v.Array(ANY_OBJECT),
        "assistant.parsed": v.AnyJson(),
        "assistant.audio.data": STRING,
        "assistant.audio.expires_at": v.Integer(),
        "assistant.audio.transcript": STRING,
        "assistant.function_call": ANY_OBJECT,
        "assistant.tool_calls": v.Array(TOOL_CALL, min_length=1),
    },
).build("chat", "messages")
ROLES = ("system", "assistant", "user", "tool", "developer")

NAMES = Rules(types={"function.function.name": NAME, "custom.custom.name": NAME})
TOOL_TABLES = NAMES.build("chat", "tools")
CHOICE_TABLES = NAMES.build("chat", "tool_choices")
TOOL = v.TaggedUnion(
    {type: TOOL_TABLES[type] for type in ("function", "custom")}, foreign_default="function"
)
TOOL_CHOICE = v.TypeUnion(
    "one of an object or 'none', 'auto', or 'required'",
    {
        str: v.StringEnum("none", "auto", "required", foreign=("any",)),
        dict: v.TaggedUnion(
            {type: CHOICE_TABLES[type] for type in ("function", "custom", "allowed_tools")}
        ),
    },
)
STOP = v.TypeUnion(
    "one of a string or array of strings",
    {
        str: v.String(min_length=1),
        list: v.Array(v.String(min_length=1), of="strings", max_length=4),
    },
)

CREATE_COMPLETION = Rules(
    order={
        "create": (
            "model messages tools tool_choice parallel_tool_calls response_format "
            "max_completion_tokens max_tokens stop stream? stream_options n temperature top_p "
            "presence_penalty frequency_penalty logit_bias logprobs top_logprobs seed "
            "reasoning_effort verbosity metadata modalities audio moderation prediction "
            "prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
            "service_tier store user web_search_options"
        ),
        "create.response_format": "text json_object json_schema",
        "create.stream_options": "include_usage",
    },
    types={
        **requests.SHARED_TYPES,
        "*.messages": v.Array(
            v.TaggedUnion({role: MESSAGES[role] for role in ROLES}, tag="role"), min_length=1
        ),
        "*.tools": v.Array(TOOL, skips_unknown=True),
        "*.tool_choice": TOOL_CHOICE,
        "*.response_format.json_schema.json_schema.name": NAME,
        "*.max_completion_tokens": v.Integer(minimum=1),
        "*.max_tokens": v.Integer(minimum=1),
        "*.stop": STOP,
        "*.n": v.Integer(minimum=1, maximum=128),
        "*.logit_bias": v.Map(v.Integer(minimum=-100, maximum=100)),
        "*.modalities": v.Array(v.StringEnum("text", "audio"), of="strings", min_length=1),
        "*.audio": ANY_OBJECT,
        "*.prediction.content.content": TEXT_CONTENT,
        "*.prompt_cache_options": requests.CREATE_RESPONSE["prompt_cache_options?"],
        "*.web_search_options": ANY_OBJECT,
    },
).build("chat", "parameters")["create"]
"""``POST /v1/chat/completions``."""

TOOL_WITHOUT_CALLS = ErrorTemplate(
    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
    "'tool_calls'.",
    param="messages.[{index}].role",
)
CALLS_UNANSWERED = ErrorTemplate(
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
    "'tool_call_id'. The following tool_call_ids did not have response messages: {ids}",
    param="messages.[{index}].role",
)
UNKNOWN_CALL_ID = ErrorTemplate(
    "Invalid parameter: 'tool_call_id' of '{id}' not found in 'tool_calls' of previous message.",
    param="messages.[{index}].tool_call_id",
)
NULL_CONTENT = ErrorTemplate(
    "Invalid value for 'content': expected a string, got null.", param="messages.[{index}].content"
)
REQUIRES_TOOLS = ErrorTemplate(
    "'{name}' is only allowed when 'tools' are specified.", param="{name}"
)
REQUIRES_STREAM = ErrorTemplate(
    "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
    param="stream_options",
)
JSON_NOT_MENTIONED = ErrorTemplate(
    "'messages' must contain the word 'json' in some form, to use 'response_format' of type "
    "'json_object'.",
    param="messages",
)
INVALID_FORMAT_SCHEMA = ErrorTemplate(errors.INVALID_FORMAT_SCHEMA.message, param="response_format")
CONFLICTING_TOKEN_LIMITS = ErrorTemplate(
    "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
    param="max_tokens",
    code="invalid_parameter_combination",
)
CONTEXT_LENGTH_EXCEEDED = ErrorTemplate(
    "This model's maximum context length is {window} tokens. However, your messages resulted in "
    "more than that. Please reduce the length of the messages.",
    param="messages",
    code="context_length_exceeded",
)

# Not from the hosted API: features that this server does not have.
MULTIPLE_CHOICES_UNSUPPORTED = ErrorTemplate(
    "This server returns one choice per request. Omit 'n', or send {n} requests.",
    param="n",
    code="unsupported_parameter",
)
AUDIO_UNSUPPORTED = ErrorTemplate(
    "This server returns text only. Remove 'audio' from 'modalities'.",
    param="modalities",
    code="unsupported_parameter",
)
FUNCTION_CALL_UNSUPPORTED = ErrorTemplate(
    "This server does not support 'function_call'. Send 'tool_calls', followed by tool messages.",
    param="messages.[{index}].function_call",
    code="unsupported_parameter",
)


Message = Mapping[str, Any]


def check_order(messages: Sequence[Message]) -> None:
    """Reject tool messages without a call, calls without a tool message, and empty answers."""
    pending: list[str] = []
    called: frozenset[str] = frozenset()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            _match_tool_message(message["tool_call_id"], pending, called, index)
            continue
        _check_answered(pending, index)
        pending = [call["id"] for call in message.get("tool_calls") or ()]
        called = frozenset(pending)
        if message["role"] == "assistant":
            _check_assistant(message, index)
    _check_answered(pending, len(messages))


def _match_tool_message(id: str, pending: list[str], called: frozenset[str], index: int) -> None:
    if not called:
        raise TOOL_WITHOUT_CALLS(index=index)
    if id not in called:
        raise UNKNOWN_CALL_ID(id=id, index=index)
    if id in pending:
        pending.remove(id)


def _check_answered(pending: Sequence[str], index: int) -> None:
    if pending:
        raise CALLS_UNANSWERED(ids=", ".join(pending), index=index)


def _check_assistant(message: Message, index: int) -> None:
    if message.get("function_call") is not None:
        raise FUNCTION_CALL_UNSUPPORTED(index=index)
    empty = message.get("content") is None and message.get("refusal") is None
    if empty and not message.get("tool_calls"):
        raise NULL_CONTENT(index=index)


Body = Mapping[str, Any]

_CREATE = requests.RequestSchema(CREATE_COMPLETION, legacy=("functions", "function_call"))

OTHER_PARAMETERS = {"tools", "tool_choice", "top_logprobs", "stream_options"}
"""Parameters with the same name and another form or condition in the Responses API."""
UNUSED_PARAMETERS = {"moderation", "prompt_cache_options"}
"""Parameters of both APIs that this server does not use."""
BOTH_PARAMETERS = _CREATE.members.keys() & requests.CREATE.members.keys()
SHARED_PARAMETERS = BOTH_PARAMETERS - OTHER_PARAMETERS - UNUSED_PARAMETERS | {"logit_bias", "seed"}
"""Parameters with the same form in the Responses API, and those that models have besides."""


def parse_request(body: dict[str, Any]) -> dict[str, Any]:
    """Validate a request to ``POST /v1/chat/completions`` and convert it to one of the Responses API."""
    checked = _CREATE.check_body(body)
    _check_combinations(checked)
    check_order(checked["messages"])
    params = _convert_parameters(checked)
    params["input"] = list(iter_items(checked["messages"]))
    if not v.is_ignoring_unknown():
        requests.check_json_mentioned(params, params["input"], JSON_NOT_MENTIONED)
    check_schemas(
        params,
        tool_path="tools[{index}].function.parameters",
        format_error=INVALID_FORMAT_SCHEMA,
    )
    requests.check_tool_choice(params, ())
    return params


def _check_combinations(body: dict[str, Any]) -> None:
    if not body["model"]:
        raise errors.MODEL_NOT_FOUND(model="")
    if (body.get("n") or 1) > 1:
        raise MULTIPLE_CHOICES_UNSUPPORTED(n=body["n"])
    if "audio" in (body.get("modalities") or ()):
        raise AUDIO_UNSUPPORTED()
    if body.get("max_tokens") and body.get("max_completion_tokens"):
        raise CONFLICTING_TOKEN_LIMITS()
    if body.get("stream_options") is not None and not body.get("stream"):
        raise REQUIRES_STREAM()
    for name in ("tool_choice", "parallel_tool_calls"):
        if name in body and not body.get("tools"):
            if not v.is_ignoring_unknown():
                raise REQUIRES_TOOLS(name=name)
            del body[name]  # it may be about tools that were ignored


def _convert_parameters(body: Body) -> dict[str, Any]:
    """Convert the parameters to those of the Responses API."""
    params = {
        name: value
        for name, value in body.items()
        if name in SHARED_PARAMETERS and value is not None
    }
    params["truncation"] = "disabled"
    params["stop"] = _list_stop_sequences(body.get("stop") or ())
    if body.get("tools"):
        params["tools"] = [_convert_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        params["tool_choice"] = _convert_tool_choice(body["tool_choice"])
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    if max_tokens:
        params["max_output_tokens"] = max_tokens
    if body.get("logprobs"):
        params["include"] = ["message.output_text.logprobs"]
        if body.get("top_logprobs") is not None:
            params["top_logprobs"] = body["top_logprobs"]
    if body.get("reasoning_effort") is not None:
        params["reasoning"] = {"effort": body["reasoning_effort"]}
    text = {
        "format": _convert_format(body.get("response_format")),
        "verbosity": body.get("verbosity"),
    }
    if any(text.values()):
        params["text"] = {name: value for name, value in text.items() if value is not None}
    return params


def _list_stop_sequences(stop: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop)


def _convert_tool(tool: Body) -> dict[str, Any]:
    kind: str = tool["type"]
    flat: dict[str, Any] = {"type": kind, **tool[kind]}
    if kind == "function":
        return {"strict": False, **flat}
    if flat.get("format", {}).get("type") == "grammar":
        flat["format"] = {"type": "grammar", **flat["format"]["grammar"]}
    return flat


def _convert_tool_choice(choice: str | Body) -> str | dict[str, Any]:
    if choice == "any":  # the name of other servers
        return "required"
    if isinstance(choice, str):
        return choice
    kind: str = choice["type"]
    converted: dict[str, Any] = {"type": kind, **choice[kind]}
    if kind == "allowed_tools":
        converted["tools"] = [_convert_allowed_tool(tool) for tool in converted["tools"]]
    return converted


def _convert_allowed_tool(tool: Body) -> dict[str, Any]:
    kind = str(tool.get("type"))
    value: Any = tool.get(kind)
    definition: Body = cast("Body", value) if isinstance(value, dict) else {}
    return {"type": kind, "name": definition.get("name")}


def _convert_format(response_format: Body | None) -> dict[str, Any] | None:
    if response_format is None:
        return None
    if response_format["type"] != "json_schema":
        return {"type": response_format["type"]}
    return {"type": "json_schema", "schema": {}, **response_format["json_schema"]}


def iter_items(messages: Sequence[Body]) -> Iterator[Item]:
    """Convert messages to items."""
    types: dict[str, str] = {}
    for message in messages:
        role: str = message["role"]
        if role == "assistant":
            for item in _iter_assistant_items(message):
                if "call_id" in item:
                    types[item["call_id"]] = f"{item['type']}_output"
                yield item
        elif role == "tool":
            id: str = message["tool_call_id"]
            yield {"type": types[id], "call_id": id, "output": _convert_content(message)}
        else:
            yield {"type": "message", "role": role, "content": _convert_content(message)}


def _convert_content(message: Body) -> str | list[Item]:
    content = message["content"]
    if isinstance(content, str):
        return content
    return [_convert_part(part) for part in content]


def _iter_assistant_items(message: Body) -> Iterator[Item]:
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "summary": [], "content": [text]}
    parts = list(_iter_assistant_parts(message))
    if parts:
        yield {"type": "message", "role": "assistant", "content": parts}
    for call in message.get("tool_calls") or ():
        kind: str = call["type"]
        type = "function_call" if kind == "function" else "custom_tool_call"
        yield {"type": type, "call_id": call["id"], **call[kind]}


def _iter_assistant_parts(message: Body) -> Iterator[Item]:
    content: str | Sequence[Body] = message.get("content") or ()
    if isinstance(content, str):
        yield {"type": "output_text", "text": content}
    else:
        for part in content:
            if part["type"] == "refusal":
                yield part
            else:
                yield {"type": "output_text", "text": part["text"]}
    if message.get("refusal"):
        yield {"type": "refusal", "refusal": message["refusal"]}


def _convert_part(part: Body) -> Item:
    match part["type"]:
        case "text":
            return {"type": "input_text", "text": part["text"]}
        case "image_url":
            image = part["image_url"]
            detail = image.get("detail", "auto")
            return {"type": "input_image", "image_url": image["url"], "detail": detail}
        case "video_url":
            return {"type": "input_file", "file_url": part["video_url"]["url"]}
        case "file":
            return {"type": "input_file", **part["file"]}
        case _:
            return {"type": "input_audio", "input_audio": part["input_audio"]}
