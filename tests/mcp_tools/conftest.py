"""MCP servers for the tests: in this process over HTTP, and as child processes."""

import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn

from kedge import mcp_tools
from kedge.server.uvicorn_server import bind, stop_listening
from kedge.tools import Toolbox, run_calls
from kedge.turns import ToolResultBlock, tool_call

HERE = Path(__file__).parent
RAW_SERVER = [sys.executable, str(HERE / "raw_server.py")]
TOOL_SERVER = [sys.executable, str(HERE / "tool_server.py")]

OpenRaw = Callable[..., AbstractAsyncContextManager[Toolbox]]


def is_running(pid: str) -> bool:
    """Return whether a process exists and is not a zombie, which only its parent can remove."""
    if not Path("/proc/self/stat").exists():
        command = ["ps", "-o", "stat=", "-p", pid]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return bool(output) and not output.startswith("Z")
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def read_pids(file: Path) -> list[str]:
    """Return the process ids of a test."""
    return file.read_text().split() if file.exists() else []


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    """Yield the file with the process ids of a test, and wait until all of them have ended."""
    file = tmp_path / "pids"
    yield file
    for pid in read_pids(file):
        deadline = time.monotonic() + 300
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} is still running"
            time.sleep(0.05)


@pytest.fixture
def open_raw(pid_file: Path) -> OpenRaw:
    """Return a function that connects to ``raw_server.py`` in a given mode."""

    def open_server(mode: str, **options: Any) -> AbstractAsyncContextManager[Toolbox]:
        env = {"PID_FILE": str(pid_file), **options.pop("env", {})}
        limits: dict[str, Any] = {"connect_timeout": 300, "timeout": 300} | options
        return mcp_tools([*RAW_SERVER, mode], env=env, **limits)

    return open_server


class McpServer(uvicorn.Server):
    """A uvicorn server that leaves no accepted connection open when it is stopped."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening before the connections are closed."""
        await stop_listening(self, sockets or [])
        await super().shutdown(sockets)


@asynccontextmanager
async def serve_app(app: Any) -> AsyncGenerator[str]:
    """Serve an app in this event loop and yield its URL."""
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1)
    server = McpServer(config)
    with bind("127.0.0.1", 0) as listener:
        async with anyio.create_task_group() as group:
            # The private method is used because signals belong to pytest.
            group.start_soon(server._serve, [listener])
            try:
                with anyio.fail_after(300):
                    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                        await anyio.sleep(0.01)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
            finally:
                server.should_exit = True


async def call(toolbox: Toolbox, name: str = "echo", **arguments: Any) -> ToolResultBlock:
    """Run one tool call and return its result."""
    [result] = await run_calls(toolbox, [tool_call(name, arguments)])
    return result


async def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    with anyio.fail_after(300):
        while not condition():  # noqa: ASYNC110 - the tools of a server have no event
            await anyio.sleep(0.01)
