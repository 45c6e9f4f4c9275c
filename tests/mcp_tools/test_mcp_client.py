"""Tests of MCP servers built with the official package, over both transports."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from for_each import for_each
from kedge import Chat, mcp_tools
from kedge.errors import CannotConnect, InvalidSetting
from kedge.mcp import client
from kedge.mcp.transports import parse_address
from kedge.tools import Deny, Toolbox, run_calls
from kedge.turns import ImagePart, TextPart, ToolResultBlock, tool_call
from mcp_tools.conftest import RAW_SERVER, TOOL_SERVER, call, serve_app, wait_for
from mcp_tools.tool_server import ServerCalls, build_server

TRANSPORTS = ("stdio", "http")


@asynccontextmanager
async def open_official(transport: str, **options: Any) -> AsyncGenerator[Toolbox]:
    """Yield a toolbox connected to the server of the official package."""
    if transport == "stdio":
        async with mcp_tools(TOOL_SERVER, **options) as toolbox:
            yield toolbox
        return
    async with (
        serve_app(build_server().streamable_http_app()) as url,
        mcp_tools(url, **options) as toolbox,
    ):
        yield toolbox


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tools_of_a_server_are_listed_and_called(transport: str) -> None:
    """One connection handles definitions, values, images, errors and a changed list of tools."""
    async with open_official(transport, connect_timeout=120, timeout=120) as toolbox:
        names = ["add", "weather", "report", "picture", "fail", "wait", "grow"]
        assert list(toolbox) == names
        definition = toolbox["add"].definition()
        assert definition["description"] == "Add two numbers."
        assert definition["parameters"]["properties"]["b"]["description"] == "The second number."
        assert (await call(toolbox, "add", a=1, b=2)).text == "3"
        assert '"celsius": 21' in (await call(toolbox, "weather", city="Rome")).text
        assert (await call(toolbox, "report")).text == 'It is warm.{"celsius": 21}'
        caption, picture = (await call(toolbox, "picture")).parts
        assert caption == TextPart("a dot:")
        assert isinstance(picture, ImagePart)
        assert picture.url.startswith("data:image/png;base64,iVBOR")
        failed = await call(toolbox, "fail", text="out of paper")
        assert failed.metadata["kedge.outcome"] == "failed"
        assert "out of paper" in failed.text
        wrong = await call(toolbox, "add", a="x", b=2)
        assert wrong.metadata["kedge.outcome"] == "failed"
        calls = [tool_call("add", {"a": number, "b": 1}) for number in range(5)]
        parallel = await run_calls(toolbox, calls)
        assert [result.text for result in parallel] == ["1", "2", "3", "4", "5"]
        more = Toolbox(toolbox)
        assert (await call(toolbox, "grow")).text == "grown"
        await wait_for(lambda: "extra" in more)
        assert (await call(more, "extra")).text == "extra"


async def test_tools_are_listed_once_per_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change is followed by one listing, also right after the connection, and there is none without a change."""
    monkeypatch.setattr(client, "REFRESH_SECONDS", 0.0)
    caplog.set_level("INFO", "kedge.mcp")
    async with open_official("http", connect_timeout=120, timeout=120) as toolbox:
        await call(toolbox, "grow")
        await wait_for(lambda: "extra" in toolbox)
        for number in range(10):
            await call(toolbox, "add", a=number, b=1)
    listed = [record for record in caplog.messages if "changed its tools" in record]
    # One after the subscription, and one for each of the two ways in which the server reports the change.
    assert 1 <= len(listed) <= 3


async def test_cancelled_call_is_cancelled_at_the_server() -> None:
    """The server is notified of the cancellation, and the connection remains usable."""
    calls = ServerCalls()
    async with (
        serve_app(build_server(calls).streamable_http_app()) as url,
        mcp_tools(url, timeout=None) as toolbox,
    ):
        waiting = asyncio.create_task(call(toolbox, "wait"))
        await calls.started.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with anyio.fail_after(300):
            await calls.cancelled.wait()
        assert (await call(toolbox, "add", a=1, b=2)).text == "3"


class Relay:
    """A relay that forwards connections to a server, or closes them while the server is down."""

    def __init__(self, url: str) -> None:
        self.port = int(url.rpartition(":")[2].removesuffix("/mcp"))
        self.is_away = False
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection in both directions."""
        self.writers.append(writer)
        if not self.is_away:
            inner, outer = await asyncio.open_connection("127.0.0.1", self.port)
            self.writers.append(outer)
            with suppress(OSError):
                await asyncio.gather(self.copy(reader, outer), self.copy(inner, writer))
            outer.close()
        writer.close()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction."""
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    def go_away(self) -> None:
        """Close all connections and reject new ones."""
        self.is_away = True
        for writer in self.writers:
            writer.close()


async def test_http_server_is_reconnected() -> None:
    """Calls fail while the server is down, and a later call opens a new connection."""
    async with serve_app(build_server().streamable_http_app()) as url:
        relay = Relay(url)
        listener = await asyncio.start_server(relay.connect, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with mcp_tools(f"http://127.0.0.1:{port}/mcp", connect_timeout=300) as toolbox:
            assert (await call(toolbox, "add", a=1, b=2)).text == "3"
            relay.go_away()
            for _ in range(2):
                result = await call(toolbox, "add", a=1, b=2)
                assert result.metadata["kedge.outcome"] == "failed"
                assert "The MCP server" in result.text
            relay.is_away = False
            assert (await call(toolbox, "add", a=1, b=2)).text == "3"
        relay.go_away()
        listener.close()


class SessionServer:
    """An HTTP server with sessions, as before the protocol of 2026, which forgets the first session."""

    def __init__(self, status: int, code: int) -> None:
        self.rejection = (status, {"code": code, "message": "no such session"})
        self.sessions = 0
        self.called: list[str] = []

    async def answer(self, request: Request) -> Response:
        """Answer one message."""
        if request.method != "POST":
            return Response(status_code=405)
        message = await request.json()
        session = request.headers.get("mcp-session-id", "")
        number, headers = message.get("id"), {}
        result: dict[str, Any] = {}
        match message["method"]:
            case "initialize":
                self.sessions += 1
                headers = {"mcp-session-id": f"session-{self.sessions}"}
                result = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "sessions", "version": "1"},
                }
            case "tools/list":
                result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
            case "tools/call" if session == "session-1":
                status, error = self.rejection
                body = {"jsonrpc": "2.0", "id": number, "error": error}
                return JSONResponse(body, status)
            case "tools/call":
                self.called.append(session)
                result = {"content": [{"type": "text", "text": "hello"}]}
            case "server/discover":
                return Response(status_code=400)
            case _:
                return Response(status_code=202)
        return JSONResponse({"jsonrpc": "2.0", "id": number, "result": result}, headers=headers)


@asynccontextmanager
async def connect_to(answer: Any) -> AsyncGenerator[Toolbox]:
    """Yield a toolbox connected to a server that answers each HTTP request with a function."""
    app = Starlette(routes=[Route("/mcp", answer, methods=["GET", "POST", "DELETE"])])
    async with serve_app(app) as url, mcp_tools(url, connect_timeout=300) as toolbox:
        yield toolbox


async def test_lost_session_is_replaced() -> None:
    """A call in a session that the server does not know is sent again in a new one."""
    server = SessionServer(404, -32600)
    async with connect_to(server.answer) as toolbox:
        results = await run_calls(toolbox, [tool_call("echo", {}) for _ in range(3)])
        assert [result.text for result in results] == ["hello"] * 3
        assert server.called == ["session-2"] * 3


async def test_rejected_session_is_replaced_for_the_next_call() -> None:
    """A call that the server rejects with status 400 is not sent again; the next one has a new session."""
    async with connect_to(SessionServer(400, -32000).answer) as toolbox:
        rejected = (await call(toolbox, "echo")).text
        assert rejected == "The MCP server rejected the call: no such session (HTTP status 400)"
        assert (await call(toolbox, "echo")).text == "hello"


async def test_status_of_a_rejected_connection_is_reported() -> None:
    """The error of a server that requires authorization contains the HTTP status."""

    async def reject(_: Request) -> Response:
        return Response("no", status_code=401)

    app = Starlette(routes=[Route("/mcp", reject, methods=["POST"])])
    async with serve_app(app) as url:
        with pytest.raises(CannotConnect, match="HTTP status 401"):
            async with mcp_tools(url, connect_timeout=300):
                pass


async def test_chat_uses_mcp_tools() -> None:
    """Chat accepts the toolbox, and a denied call does not reach the server."""
    async with open_official("http", approval=True) as toolbox:
        chat = Chat("practice", tools=[toolbox], approve=lambda _: Deny("not today"))
        answer = await chat.chat_with_state(None, 'Call add with {"a": 1, "b": 2}')
        results = [b for b in answer.turn.blocks if isinstance(b, ToolResultBlock)]
        denied = "The call was denied and did not run: not today"
        assert [block.text for block in results] == [denied]


async def test_calls_from_another_event_loop_reach_the_server() -> None:
    """A toolbox can be used from another event loop of the program."""
    async with open_official("http") as toolbox:
        result = await asyncio.to_thread(asyncio.run, call(toolbox, "add", a=2, b=2))
        assert result.text == "4"


def test_toolbox_of_ended_loop_reports_the_reason() -> None:
    """A call after the toolbox's event loop has ended fails with a message."""

    async def open_box() -> Toolbox:
        async with open_official("http") as toolbox:
            return toolbox

    toolbox = asyncio.run(open_box())
    assert "event loop that has ended" in asyncio.run(call(toolbox, "add", a=1, b=1)).text


@for_each(
    ("server", "options", "problem"),
    [
        ("", {}, "is empty"),
        ("echo 'x", {}, "is malformed"),
        ("http:///mcp", {}, "no host name"),
        ("http://localhost", {"env": {"A": "b"}}, "env and cwd are for a command"),
        ("server", {"headers": {"A": "b"}}, "headers are for a URL"),
        ("server", {"timeout": 0}, "timeout must be a finite number of seconds above 0"),
        ("server", {"concurrency": 0}, "concurrency must be an integer of at least 1"),
    ],
)
def test_invalid_settings_are_rejected(
    server: str | Sequence[str], options: dict[str, Any], problem: str
) -> None:
    """Invalid settings are rejected before a server is started."""
    with pytest.raises(InvalidSetting, match=problem):
        mcp_tools(server, **options)


async def test_unreachable_server_is_reported() -> None:
    """A missing command and an address where nothing listens are reported without a password."""
    with pytest.raises(CannotConnect, match="no-such-command"):
        async with mcp_tools("no-such-command --flag"):
            pass
    with pytest.raises(CannotConnect, match=r"http://127\.0\.0\.1:9/mcp is not available"):
        async with mcp_tools("http://user:secret@127.0.0.1:9/mcp") as _:
            pass


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra to install."""
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(CannotConnect, match=r"pip install 'kedge-llm\[mcp\]'"):
        mcp_tools("server")


@for_each(
    ("server", "name"),
    [
        ("npx -y @modelcontextprotocol/server-filesystem /tmp", "server-filesystem"),
        (["/usr/bin/python3", "tools/my server.py"], "my_server"),
        ("uv run weather", "weather"),
        ("uvx", "uvx"),
        ("///", "mcp"),
        ("https://user:secret@mcp.example.com:8000/mcp?key=1", "mcp_example_com"),
    ],
)
def test_prefix_is_derived_from_command_or_url(server: Any, name: str) -> None:
    """The prefix is the program that a launcher starts, or the host, and contains no secret."""
    address = parse_address(server)
    assert address.default_name == name
    assert "secret" not in f"{address} {address!r}"


def test_package_is_imported_lazily() -> None:
    """Neither the root package nor the commands import the MCP package."""
    code = "import kedge.mcp, kedge.cli.chat_session, kedge.cli.serve, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert not {"mcp", "mcp_types"} & set(loaded.split())


def test_sync_code_can_use_mcp_tools(pid_file: Path) -> None:
    """The connection uses the event loop of the sync API."""
    with mcp_tools([*RAW_SERVER, "plain"], env={"PID_FILE": str(pid_file)}) as toolbox:
        chat = Chat("practice", tools=toolbox)
        answer = chat.sync.chat_with_state(None, 'Call echo with {"text": "hi"}')
        chat.sync.close()
    assert "hi" in answer.text
