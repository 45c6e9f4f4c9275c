"""Convert the tools and results of an MCP server. All data of a server is untrusted and limited in size here.

Schemas are sent to the model and not evaluated: a pattern in a schema could take exponential time. For the same
reason, structured results are not checked against the output schema that the server declares for them.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import mcp_types as types
from mcp_types.methods import validate_server_result
from mcp_types.version import LATEST_HANDSHAKE_VERSION
from pydantic import TypeAdapter

from kedge._internal.arguments import check_positive_int, validate_seconds
from kedge._internal.display import sanitize_text
from kedge.errors import KedgeError, ToolFailed
from kedge.observe import get_logger
from kedge.tools import AnyTool, tool
from kedge.tools.toolbox import MAX_NAME_CHARS, edit_descriptions
from kedge.turns import Part, TextPart, audio, image
from kedge.turns.attachments import AUDIO_FORMATS, detect_media_type

log = get_logger("kedge.mcp")

MAX_TOOLS = 128
"""The maximum number of tools of one server; providers have similar limits."""
MAX_DESCRIPTION_CHARS = 4_000
MAX_SCHEMA_CHARS = 40_000
MAX_CONTENT_ITEMS = 100
MAX_LINK_CHARS = 500
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""The types of images that models accept."""

UNREADABLE_CONTENT = "[omitted: content that is not valid, or of an unknown type]"
CONTENT_ADAPTER: TypeAdapter[types.ContentBlock] = TypeAdapter(types.ContentBlock)
SCHEMA_MAPS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
"""Keywords of a schema whose members are schemas with names."""
SCHEMA_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords of a schema whose values are values, which may be null."""

# Control characters except tab and line breaks, and Unicode tags, which are invisible but which models read.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\U000e0000-\U000e007f]")

CallFunction = Callable[[str, Mapping[str, Any]], Awaitable[list[Part]]]


def repair_tool_list(result: dict[str, Any]) -> None:
    """Change a list of tools so that one tool does not make the official client reject the whole list.

    A schema without the type that the protocol requires gets it; a tool that cannot be used is left out; members
    that Kedge does not use, and keywords of a schema that are null, are removed.

    Args:
        result: The result of a request, which may have a list of tools.
    """
    listed: Any = result.get("tools")
    if isinstance(listed, list):
        result["tools"] = [
            tool for each in cast("list[Any]", listed) for tool in _repair_tool(each)
        ]


def _repair_tool(listed: Any) -> Iterator[dict[str, Any]]:
    try:
        texts = {name: listed.get(name) for name in ("name", "title", "description")}
        schema: dict[str, Any] = _drop_null_keywords(listed.get("inputSchema") or {})
        tool = {**texts, "inputSchema": {**schema, "type": "object"}}
        validate_server_result("tools/list", LATEST_HANDSHAKE_VERSION, {"tools": [tool]})
    except (AttributeError, TypeError, ValueError, RecursionError):
        start = sanitize_text(repr(listed)[:MAX_LINK_CHARS])
        log.warning("a tool of an MCP server is left out, because it is invalid: %s", start)
    else:
        yield tool


def repair_result(result: dict[str, Any]) -> None:
    """Change the result of a call so that members that Kedge does not need do not make it invalid.

    The tool has run, so what can be read of its result is used. Null is the same as no member.

    Args:
        result: The result of a request, which may be that of a call.
    """
    if result.get("content") is None and ("content" in result or "structuredContent" in result):
        result["content"] = []
    if "isError" in result and result["isError"] is None:
        del result["isError"]
    content: Any = result.get("content")
    if isinstance(content, list):
        result["content"] = [_repair_item(each) for each in cast("list[Any]", content)]


def _repair_item(item: Any) -> Any:
    try:
        plain = {name: item[name] for name in item if name not in ("annotations", "_meta", "icons")}
        CONTENT_ADAPTER.validate_python(plain, by_name=False)
    except (TypeError, ValueError, RecursionError):
        return {"type": "text", "text": UNREADABLE_CONTENT}
    return plain


def _drop_null_keywords(schema: Any) -> Any:
    """Return a schema without keywords that are null, which some programs write for an empty list or map."""
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", schema).items():
        if name in SCHEMA_VALUES:
            kept[name] = value
        elif name in SCHEMA_MAPS and isinstance(value, dict):
            schemas = cast("dict[str, Any]", value)
            kept[name] = {
                key: {} if each is None else _drop_null_keywords(each)
                for key, each in schemas.items()
            }
        elif isinstance(value, list):
            kept[name] = [_drop_null_keywords(each) for each in cast("list[Any]", value)]
        elif value is not None:
            kept[name] = _drop_null_keywords(value)
    return kept


@dataclass(frozen=True, slots=True)
class McpOptions:
    """The options of a connection; see ``mcp_tools``.

    Raises:
        InvalidSetting: A limit is not a positive number.
    """

    name: str
    timeout: float | None
    connect_timeout: float
    approval: bool | None
    concurrency: int | None

    def __post_init__(self) -> None:
        validate_seconds(self.timeout, "timeout")
        validate_seconds(self.connect_timeout, "connect_timeout")
        if self.concurrency is not None:
            check_positive_int("concurrency", self.concurrency)


def convert_tools(
    listed: Sequence[types.Tool], call: CallFunction, options: McpOptions
) -> tuple[AnyTool, ...]:
    """Return the tools of a server.

    Names are converted to the form that providers accept; those that would become equal get a hash of the
    server's name for the tool as a suffix, so they do not depend on the order of the list. Of two tools with one
    name, the first is used. A tool whose schema is too large or invalid is omitted.

    Args:
        listed: The tools in the server's list.
        call: A function that calls a tool of the server by its name.
        options: The options of the connection.
    """
    server = options.name
    uses = Counter(_convert_name(name) for name in {each.name for each in listed})
    tools: dict[str, AnyTool] = {}
    for each in listed:
        name = _convert_name(each.name)
        if name != each.name and uses[name] > 1:
            suffix = f"_{sha256(each.name.encode()).hexdigest()[:8]}"
            name = name[: MAX_NAME_CHARS - len(suffix)] + suffix
        if not name or name in tools or len(tools) == MAX_TOOLS:
            log.warning(
                "a tool of the MCP server %s is left out: no free name, or too many", server
            )
            continue
        try:
            tools[name] = _convert_tool(name, each, call, options)
        except (KedgeError, ValueError, TypeError, RecursionError) as error:
            reason = sanitize_text(str(error))[:MAX_LINK_CHARS]
            log.warning("the tool %s of the MCP server %s is left out: %s", name, server, reason)
    return tuple(tools.values())


def _convert_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:MAX_NAME_CHARS]


def _convert_tool(
    name: str, listed: types.Tool, call: CallFunction, options: McpOptions
) -> AnyTool:
    # The protocol allows a schema without properties; OpenAI rejects the whole request because of one.
    properties: Any = listed.input_schema.get("properties") or {}
    complete: Any = {**listed.input_schema, "type": "object", "properties": properties}
    schema = edit_descriptions(complete, _clean_description)
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise ValueError(f"its schema has more than {MAX_SCHEMA_CHARS:,} characters")

    async def call_remote(**arguments: Any) -> list[Part]:
        return await call(listed.name, arguments)

    return tool(
        call_remote,
        name=name,
        description=_clean_description(listed.description or listed.title or ""),
        parameters=schema,
        timeout=options.timeout,
        approval=options.approval,
        concurrency=options.concurrency,
    )


def _clean_description(text: str) -> str:
    shown = sanitize_text(text[: MAX_DESCRIPTION_CHARS + 1]).strip()
    if len(text) > MAX_DESCRIPTION_CHARS:
        return f"{shown[:MAX_DESCRIPTION_CHARS]}…"
    return shown


def clean_text(text: str) -> str:
    """Return the text of a result with control characters replaced."""
    return CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)


def convert_result(result: types.CallToolResult) -> list[Part]:
    """Return the parts of a result.

    A structured result is added as JSON, without what the content of the result already has, as the protocol
    recommends.

    Raises:
        ToolFailed: The result is an error; the message is its text.
    """
    items = result.content[:MAX_CONTENT_ITEMS]
    parts: list[Part] = [part for item in items for part in _convert_item(item)]
    if len(items) < len(result.content):
        parts.append(TextPart(f"[omitted: {len(result.content) - len(items):,} further items]"))
    structured = _remove_repeated(items, result.structured_content)
    if structured is not None:
        parts.append(TextPart(clean_text(json.dumps(structured, ensure_ascii=False))))
    if result.is_error:
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        raise ToolFailed("\n".join(texts) or "The tool failed without a message.")
    return parts or [TextPart("")]


def _remove_repeated(items: Sequence[types.ContentBlock], structured: Any) -> Any:
    """Return a structured result without what the content already has; None if nothing remains.

    The content may be the whole, the only member of an object (``{"content": …}``), or a text among others
    (``{"success": true, "message": …}``).
    """
    if _is_content(items, structured):
        return None
    members = cast("dict[str, Any]", structured) if isinstance(structured, dict) else {}
    repeated = [name for name, value in members.items() if _is_content(items, value)]
    if len(repeated) != 1 or not (len(members) == 1 or isinstance(members[repeated[0]], str)):
        return members or cast("Any", structured)
    rest = {name: members[name] for name in members if name not in repeated}
    return rest or None


def _is_content(items: Sequence[types.ContentBlock], value: Any) -> bool:
    """Return whether content is a value: as one text, as one text for each member of a list, or as it is."""
    texts = [item.text for item in items if isinstance(item, types.TextContent)]
    if any(_is_value(text, value) for text in texts):
        return True
    if not isinstance(value, list) or not items:
        return False
    members = cast("list[Any]", value)
    if len(members) == len(texts) and all(map(_is_value, texts, members)):
        return True
    return members == [item.model_dump(by_alias=True, exclude_none=True) for item in items]


def _is_value(text: str, value: Any) -> bool:
    """Return whether a text is a value, as it is or as JSON."""
    if text == value:
        return True
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return parsed == value and isinstance(parsed, bool) == isinstance(value, bool)


def _convert_item(item: types.ContentBlock) -> Iterator[Part]:
    match item:
        case types.TextContent():
            yield TextPart(clean_text(item.text))
        case types.ImageContent():
            yield _convert_image(item.data, item.mime_type)
        case types.AudioContent():
            yield _convert_audio(item.data, item.mime_type)
        case types.ResourceLink():
            yield TextPart(f"[link: {_shorten(item.name)} <{_shorten(item.uri)}>]")
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            yield TextPart(f"[resource: <{_shorten(resource.uri)}>]\n{clean_text(resource.text)}")
        case types.EmbeddedResource(resource=types.BlobResourceContents() as resource):
            media_type = resource.mime_type or "unknown"
            if media_type.lower().startswith("image/"):
                yield _convert_image(resource.blob, media_type)
            elif media_type.lower() in AUDIO_FORMATS:
                yield _convert_audio(resource.blob, media_type)
            else:
                kind = f"the resource <{_shorten(resource.uri)}>"
                yield _describe_content(kind, media_type, resource.blob)
        case _:
            yield TextPart(UNREADABLE_CONTENT)


def _convert_image(data: str, media_type: str) -> Part:
    """Return an image with the type of its content: a provider rejects every request with a wrong type."""
    try:
        content = base64.b64decode("".join(data.split()), validate=True)
    except ValueError:
        return TextPart("[omitted: an image that is not valid base64]")
    detected_type = detect_media_type(content)
    if detected_type not in IMAGE_TYPES:
        return _describe_content("an image", media_type, data)
    return image(content, media_type=detected_type)


def _convert_audio(data: str, media_type: str) -> Part:
    """Return audio of a type that parts have, which no model takes in a result, but other MCP clients do."""
    content = "".join(data.split())
    if media_type.lower() not in AUDIO_FORMATS:
        return _describe_content("audio", media_type, data)
    try:
        base64.b64decode(content, validate=True)
    except ValueError:
        return TextPart("[omitted: audio that is not valid base64]")
    return audio(f"data:{media_type.lower()};base64,{content}")


def _describe_content(kind: str, media_type: str, data: str) -> Part:
    size = f"{len(data) * 3 // 4:,} bytes"
    return TextPart(
        f"[omitted: {kind} of type {_shorten(media_type)}, {size}; models do not take it]"
    )


def _shorten(text: str) -> str:
    return sanitize_text(text[:MAX_LINK_CHARS])
