"""Tests of the conversion of MCP results to parts, and of its limits."""

import base64
import json
from typing import Any

import mcp_types as types
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from for_each import for_each
from kedge import Chat, mcp_tools
from kedge.errors import CannotConnect, ToolFailed
from kedge.mcp.content import MAX_LINK_CHARS, convert_result
from kedge.middleware import guard, redact
from kedge.turns import ImagePart, Part, TextPart, ToolResultBlock
from kedge.turns.attachments import read_audio
from mcp_tools.conftest import OpenRaw, serve_app
from mcp_tools.tool_server import PNG

DATA = base64.b64encode(PNG).decode()


def convert(*content: Any, **members: Any) -> list[Part]:
    """Convert a result with this content."""
    return convert_result(types.CallToolResult(content=list(content), **members))


def convert_text(*content: Any, **members: Any) -> str:
    """Convert a result and return the text of its only part."""
    [part] = convert(*content, **members)
    assert isinstance(part, TextPart)
    return part.text


def text(value: str) -> types.TextContent:
    """Return a text content of a result."""
    return types.TextContent(text=value)


def test_supported_images_become_image_parts() -> None:
    """Supported images are image parts; others are described by their type and size."""
    [part] = convert(types.ImageContent(data=DATA, mime_type="image/png"))
    assert isinstance(part, ImagePart)
    assert part.url == f"data:image/png;base64,{DATA}"
    blob = types.BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob=DATA)
    assert convert(types.EmbeddedResource(resource=blob)) == [part]
    drawing = convert_text(types.ImageContent(data="AAAA", mime_type="image/svg+xml"))
    assert drawing == "[omitted: an image of type image/svg+xml, 3 bytes; models do not take it]"
    claimed = convert_text(types.ImageContent(data="aGVsbG8=", mime_type="image/png"))
    assert claimed.startswith(
        "[omitted: an image of type image/png, "
    )  # a provider would reject it
    broken = convert_text(types.ImageContent(data="?", mime_type="image/png"))
    assert broken == "[omitted: an image that is not valid base64]"


def test_audio_of_known_types_becomes_an_audio_part() -> None:
    """WAV and MP3 are parts, as content or as a resource."""
    blob = types.BlobResourceContents(uri="file:///a", mime_type="audio/x-wav", blob="AA AA\n")
    for content in (
        types.AudioContent(data="AAAA", mime_type="AUDIO/WAV"),
        types.EmbeddedResource(resource=blob),
    ):
        [part] = convert(content)
        assert read_audio(part) == ("audio/wav", "AAAA")


@for_each("media_type", ["image/jpg", "IMAGE/PNG", "image/*"])
def test_content_determines_the_type_of_an_image(media_type: str) -> None:
    """An image has the type of its content, which a provider requires, whatever the server declares."""
    lines = base64.encodebytes(PNG).decode()
    blob = types.BlobResourceContents(uri="file:///a", mime_type=media_type, blob=lines)
    for content in (
        types.ImageContent(data=lines, mime_type=media_type),
        types.EmbeddedResource(resource=blob),
    ):
        [part] = convert(content)
        assert isinstance(part, ImagePart)
        assert part.url == f"data:image/png;base64,{DATA}"


def test_other_content_becomes_text() -> None:
    """Links, resources and unknown audio become text, with addresses shortened and sanitized."""
    audio = types.AudioContent(data="AAAA", mime_type="audio/ogg")
    assert "audio of type audio/ogg, 3 bytes" in convert_text(audio)
    broken = types.AudioContent(data="?", mime_type="audio/wav")
    assert convert_text(broken) == "[omitted: audio that is not valid base64]"
    link = types.ResourceLink(name="a\x1b", uri="file:///" + "a" * 1_000)
    assert convert_text(link) == f"[link: a� <{('file:///' + 'a' * 1_000)[:MAX_LINK_CHARS]}>]"
    resource = types.TextResourceContents(uri="file:///a.txt", text="hello\x07")
    converted = convert_text(types.EmbeddedResource(resource=resource))
    assert converted == "[resource: <file:///a.txt>]\nhello�"
    blob = types.BlobResourceContents(uri="file:///a.bin", blob="AAAA")
    converted = convert_text(types.EmbeddedResource(resource=blob))
    assert converted.startswith("[omitted: the resource <file:///a.bin> of type unknown, 3 bytes")


@for_each(
    ("content", "structured", "expected"),
    [
        ([], None, [""]),
        ([], {"a": "é"}, ['{"a": "é"}']),
        (['{"a":1}'], {"a": 1}, ['{"a":1}']),
        (["3"], {"result": 3}, ["3"]),
        (["It is 3."], {"result": 3}, ["It is 3.", '{"result": 3}']),
        (["x"], [1], ["x", "[1]"]),
        (["1", "2"], {"result": [1, 2]}, ["1", "2"]),
        (['{"a": 1}'], {"result": [{"a": 1}]}, ['{"a": 1}']),
        (["1"], {"result": [1, 2]}, ["1", '{"result": [1, 2]}']),
        ([], {"result": []}, ['{"result": []}']),
        (["hello"], {"content": "hello"}, ["hello"]),
        (['[{"a": 1}]'], {"entities": [{"a": 1}]}, ['[{"a": 1}]']),
        (["hello"], {"content": [{"type": "text", "text": "hello"}]}, ["hello"]),
        (["Done."], {"success": True, "message": "Done."}, ["Done.", '{"success": true}']),
        (["1"], {"page": 1, "rows": [1]}, ["1", '{"page": 1, "rows": [1]}']),
        (["1"], {"flag": True}, ["1", '{"flag": true}']),
    ],
)
def test_structured_result_is_sent_once(
    content: list[str], structured: Any, expected: list[str]
) -> None:
    """A structured result is added as JSON, without what the text parts already have."""
    parts = convert(*map(text, content), structured_content=structured)
    assert parts == [TextPart(each) for each in expected]


def test_structured_image_is_sent_once() -> None:
    """An image whose content is repeated in the structured result is one part."""
    image = types.ImageContent(data=DATA, mime_type="image/png")
    repeated = {"content": [{"type": "image", "data": DATA, "mimeType": "image/png"}]}
    [part] = convert(image, structured_content=repeated)
    assert isinstance(part, ImagePart)


def test_error_result_raises_tool_failed() -> None:
    """An error result raises ToolFailed with its text as the message."""
    with pytest.raises(ToolFailed, match="no paper\nno ink"):
        convert(text("no paper"), text("no ink"), is_error=True)
    with pytest.raises(ToolFailed, match="without a message"):
        convert(is_error=True)


async def test_guard_rules_apply_to_mcp_results(open_raw: OpenRaw) -> None:
    """The guard redacts MCP results in the same way as other tool results."""
    async with open_raw("plain") as toolbox:
        chat = Chat("practice", tools=toolbox, middleware=[guard(redact("sk-[0-9]+"))])
        answer = await chat.chat_with_state(None, 'Call echo with {"text": "sk-123"}')
    [result] = [block for block in answer.turn.blocks if isinstance(block, ToolResultBlock)]
    assert "[redacted]" in result.text
    assert "sk-123" not in str(answer.turn)


def respond(request_id: Any, mode: str, method: str) -> Response:
    """Return the response of a hostile HTTP server."""
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id}
    if method == "server/discover" and mode != "large":
        return Response(json.dumps({**body, "error": {"code": -32601, "message": "unknown"}}))
    body["result"] = {"x": "y" * 3_000_000}
    headers = {"content-encoding": "gzip"} if mode == "compressed" else {}
    return Response(json.dumps(body), media_type="application/json", headers=headers)


@pytest.mark.parametrize(("mode", "problem"), [("large", "bytes"), ("compressed", "compressed")])
async def test_http_responses_are_bounded(
    mode: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large response is not read completely, and a compressed one is not decompressed."""
    monkeypatch.setenv("KEDGE_MAX_RESPONSE_BYTES", str(1_000_000))

    async def answer(request: Request) -> Response:
        message = await request.json()
        return respond(message.get("id"), mode, message["method"])

    app = Starlette(routes=[Route("/mcp", answer, methods=["POST"])])
    async with serve_app(app) as url:
        with pytest.raises(CannotConnect, match=problem):
            async with mcp_tools(url):
                pass
