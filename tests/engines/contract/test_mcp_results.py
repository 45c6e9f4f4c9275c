"""Test tools of an MCP server with every engine: the same call, with a result in the form of the API."""

from collections.abc import AsyncIterator

import pytest

from kedge import mcp_tools
from kedge.engines import Engine
from kedge.tools import Toolbox
from kedge.turns import ImagePart, TextPart, ToolResultBlock, Turn, user
from mcp_tools.conftest import serve_app
from mcp_tools.tool_server import build_server


@pytest.fixture(scope="module")
async def toolbox() -> AsyncIterator[Toolbox]:
    """Yield the tools of an MCP server."""
    async with serve_app(build_server().streamable_http_app()) as url, mcp_tools(url) as opened:
        yield opened


async def test_a_tool_of_a_server_is_called(engine: Engine, toolbox: Toolbox) -> None:
    """``tools=`` of a run accepts the toolbox of an MCP server, and the result reaches the model."""
    requested = Turn([user('Call add with {"a": 2, "b": 3}')])
    turn = await engine.run(requested, tools=toolbox)
    [result] = [block for block in turn.blocks if isinstance(block, ToolResultBlock)]
    assert result.text == "5"
    assert "5" in str(turn.blocks[-1])


async def test_an_image_is_sent_or_described(engine: Engine, name: str, toolbox: Toolbox) -> None:
    """Where tool results are text only, an image is replaced by a description."""
    turn = await engine.run(Turn([user("Call picture with {}")]), tools=[toolbox])
    [result] = [block for block in turn.blocks if isinstance(block, ToolResultBlock)]
    caption, picture = result.parts
    assert caption == TextPart("a dot:")
    if name == "chat":
        assert isinstance(picture, TextPart)
        assert picture.text.startswith("[omitted: an image of type image/png, ")
    else:
        assert isinstance(picture, ImagePart)
