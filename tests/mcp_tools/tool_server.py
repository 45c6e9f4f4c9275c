"""An MCP server that uses the official package; ``python tool_server.py`` serves it over standard streams."""

import base64
from typing import Annotated, Any

import anyio
import mcp_types as types
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class ServerCalls:
    """Events of the server, for tests in the same process."""

    def __init__(self) -> None:
        self.started = anyio.Event()
        self.cancelled = anyio.Event()


def build_server(calls: ServerCalls | None = None) -> MCPServer[Any]:
    """Return a server with one tool for each kind of result."""
    state = calls or ServerCalls()
    server = MCPServer[Any]("official", log_level="ERROR")

    @server.tool()
    def add(a: int, b: Annotated[int, Field(description="The second number.")]) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def weather(city: str) -> dict[str, Any]:
        """The weather of a city."""
        return {"city": city, "celsius": 21}

    @server.tool()
    def report() -> types.CallToolResult:
        """A text for people, and the same as data."""
        text = types.TextContent(text="It is warm.")
        return types.CallToolResult(content=[text], structured_content={"celsius": 21})

    @server.tool(structured_output=False)
    def picture() -> list[Any]:
        """A picture with a caption."""
        return ["a dot:", Image(data=PNG, format="png")]

    @server.tool()
    def fail(text: str) -> str:
        """Fail."""
        raise ToolError(text)

    @server.tool()
    async def wait(ctx: Context[Any, Any]) -> str:
        """Wait until the call is cancelled."""
        state.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            state.cancelled.set()
        return "never"

    @server.tool()
    async def grow(ctx: Context[Any, Any]) -> str:
        """Add a tool."""

        def extra() -> str:
            """A tool that was not there before."""
            return "extra"

        server.add_tool(extra)
        await ctx.notify_tools_changed()
        await ctx.session.send_tool_list_changed()
        return "grown"

    return server


if __name__ == "__main__":
    build_server().run("stdio")
