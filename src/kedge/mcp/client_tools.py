"""Connect to an MCP server, and return its tools as a toolbox."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_type
from kedge._internal.event_loops import run_sync
from kedge.errors import CannotConnect, describe_extra
from kedge.tools import Toolbox

DEFAULT_TIMEOUT = 60.0
DEFAULT_CONNECT_TIMEOUT = 30.0


class McpTools:
    """A context manager that connects to an MCP server and returns a toolbox, for async and sync code.

    Args:
        open_tools: A function that opens the connection.
    """

    def __init__(self, open_tools: Callable[[], AbstractAsyncContextManager[Toolbox]]) -> None:
        self._open_tools = open_tools
        self._opened: list[AbstractAsyncContextManager[Toolbox]] = []

    async def __aenter__(self) -> Toolbox:
        opened = self._open_tools()
        box = await opened.__aenter__()
        self._opened.append(opened)
        return box

    async def __aexit__(self, *error: object) -> None:
        opened: Any = self._opened.pop()
        await opened.__aexit__(*error)

    def __enter__(self) -> Toolbox:
        return run_sync(self.__aenter__())

    def __exit__(self, *_: object) -> None:
        run_sync(self.__aexit__(None, None, None))


@checked
def mcp_tools(
    server: str | Sequence[str],
    *,
    name: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
    approval: bool | None = None,
    concurrency: int | None = None,
) -> McpTools:
    """Connect to an MCP server and use its tools.

    A command is started as a child process, without a shell and with a minimal environment; it ends with the
    context. When the server changes its tools, the toolbox is updated, and the next request offers the new
    ones. Data of a server is not trusted: names, descriptions and results are limited in size, and the rules
    of a ``guard`` apply to them.

    Args:
        server: A command (``"npx -y some-server"`` or ``["npx", "-y", "some-server"]``), or the address of a
            server for streamable HTTP (``"https://example.com/mcp"``).
        name: The prefix of its tools whose names are used twice; by default from the command or the address.
        env: Further environment variables of the command.
        cwd: The working directory of the command.
        headers: HTTP headers, such as ``Authorization``.
        timeout: Maximum seconds of one call; the server is notified of the cancellation.
        connect_timeout: Maximum seconds until the server has listed its tools.
        approval: As for ``kedge.tools.tool``: True requires approval of every call, False never does, None does
            if an approver is configured.
        concurrency: Maximum number of concurrent calls of each tool.

    Returns:
        An async context manager that returns a toolbox for ``tools=``. In sync code use it with ``with``: the
        connection then uses the event loop of ``chat.sync`` and similar facades.

    Raises:
        CannotConnect: The extra ``mcp`` is missing, or, on entering, the server could not be reached.
        InvalidSetting: The command or an option is invalid.

    Example:
        ```python
        async with mcp_tools("npx -y @modelcontextprotocol/server-filesystem .") as files:
            chat = Chat("openai:gpt-5.1", tools=files)
        ```
    """
    check_type("name", str, name)
    require_mcp()
    from kedge.mcp.client import open_tools
    from kedge.mcp.content import McpOptions
    from kedge.mcp.transports import parse_address

    address = parse_address(server, env=env, cwd=cwd, headers=headers)
    options = McpOptions(
        name or address.default_name, timeout, connect_timeout, approval, concurrency
    )
    return McpTools(lambda: open_tools(address, options))


def require_mcp() -> None:
    """Check that the official package is installed.

    Raises:
        CannotConnect: It is not.
    """
    try:
        from mcp import Client as _  # noqa: F401 - versions before 2 do not have it
    except ImportError as error:
        raise CannotConnect(describe_extra("mcp")) from error
