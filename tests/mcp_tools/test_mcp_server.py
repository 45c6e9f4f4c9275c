"""Tests of Kedge's MCP server, with the official client and with ``mcp_tools``."""

import base64
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import Client

from cli.sample_store import run_command
from kedge import Conversation, audio, file, image, mcp_tools, open_store
from kedge.cli import group
from kedge.errors import CannotConnect, UnconfirmedReference
from kedge.mcp.server import (
    MAX_BLOCK_CHARS,
    MAX_BODY_BYTES,
    MAX_OUTPUT,
    StoreTools,
    create_http_app,
    create_mcp_server,
)
from kedge.server.access import AccessPolicy
from kedge.server.settings import Limits
from kedge.store import ConversationRow, Store
from kedge.tools import Toolbox, run_calls, tool
from kedge.turns import tool_call
from mcp_tools import conftest
from mcp_tools.conftest import serve_app
from mcp_tools.tool_server import PNG

KEDGE_MCP = [sys.executable, "-m", "kedge", "mcp"]
READING = ["search", "list", "show"]


def test_request_with_half_of_an_emoji_is_answered(tmp_path: Path) -> None:
    """A text that is not valid Unicode is repaired; without that the client would wait for an answer."""
    client = {"name": "test", "version": "1"}
    parameters = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    requests: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": parameters},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "\ud83d"}},
    ]
    lines = "\n".join(json.dumps({"jsonrpc": "2.0", **each}) for each in requests)
    command = [*KEDGE_MCP, "--allow-write", "--store", str(tmp_path / "store.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{lines}\n".encode())
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdin.close()
    assert [each["id"] for each in answers] == [1, 2]
    assert "There is no tool '\ufffd'." in answers[1]["result"]["content"][0]["text"]


async def test_request_with_half_of_an_emoji_is_answered_over_http(store: Store) -> None:
    """A text that is not valid Unicode is repaired as on standard input."""
    client = {"name": "\ud83d", "version": "1"}
    parameters = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": parameters}
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
    }
    app = create_http_app(create_mcp_server(StoreTools(store).to_toolbox()), AccessPolicy(None))
    async with serve_app(app) as url, httpx2.AsyncClient() as http:
        response = await http.post(url, content=json.dumps(request), headers=headers)
    assert response.status_code == 200


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
MCP_HEADERS = {"accept": "application/json, text/event-stream"}
SESSION_HEADER = "mcp-session-id"


async def test_sessions_have_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot open any number of sessions; those that are open work, and one that ends makes room."""
    monkeypatch.setattr("kedge.mcp.server.MAX_SESSIONS", 2)
    app = create_http_app(create_mcp_server(StoreTools(store).to_toolbox()), AccessPolicy(None))
    async with serve_app(app) as url, httpx2.AsyncClient(headers=MCP_HEADERS) as http:
        opened = [await http.post(url, json=INITIALIZE) for _ in range(3)]
        assert [answer.status_code for answer in opened] == [200, 200, 503]
        assert "Too many open sessions" in opened[2].text
        session = {SESSION_HEADER: opened[0].headers[SESSION_HEADER]}
        assert (await http.post(url, json=PING, headers=session)).status_code == 200
        await http.delete(url, headers=session)
        assert (await http.post(url, json=INITIALIZE)).status_code == 200


async def test_a_session_without_requests_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that its client has left makes room for another one."""
    monkeypatch.setattr("kedge.mcp.server.MAX_SESSIONS", 1)
    monkeypatch.setattr("kedge.mcp.server.SESSION_SECONDS", 1e-6)
    app = create_http_app(create_mcp_server(StoreTools(store).to_toolbox()), AccessPolicy(None))
    async with serve_app(app) as url, httpx2.AsyncClient(headers=MCP_HEADERS) as http:
        assert (await http.post(url, json=INITIALIZE)).status_code == 200
        with anyio.fail_after(300):
            while (await http.post(url, json=INITIALIZE)).status_code != 200:
                pass


async def test_bodies_have_a_deadline(store: Store) -> None:
    """A request whose body does not arrive in time is answered, and its connection is closed."""
    server = create_mcp_server(StoreTools(store).to_toolbox())
    app = create_http_app(server, AccessPolicy(None), Limits(read_seconds=0.01))
    async with serve_app(app) as url:
        address = httpx2.URL(url)
        async with await anyio.connect_tcp(address.host, address.port or 0) as stream:
            head = (
                f"POST {address.path} HTTP/1.1\r\nhost: {address.host}\r\ncontent-length: 9\r\n\r\n"
            )
            await stream.send(head.encode())
            answer = b""
            with suppress(anyio.EndOfStream):
                while True:
                    answer += await stream.receive()
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    """Yield a store with one conversation."""
    async with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        conversation = await Conversation.create(
            "practice", store=opened, title="harbour", tags=["sea"]
        )
        await conversation.send("My ship is the Erebus.")
        await conversation.aclose()
        yield opened


async def choose_practice(_: object) -> str:
    """Return the name of the practice model."""
    return "practice"


async def call(server: Any, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool with the official client and return the text of its result."""
    async with Client(server) as client:
        result = await client.call_tool(name, arguments)
    [content] = result.content
    text = str(getattr(content, "text", ""))
    return f"error: {text}" if result.is_error else text


async def test_conversations_are_listed_searched_and_shown(store: Store) -> None:
    """The official client lists, searches and shows conversations by the ids in earlier results."""
    server = create_mcp_server(StoreTools(store).to_toolbox())
    async with Client(server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == READING
        assert client.instructions is not None
    [row] = json.loads(await call(server, "list", {"tag": "sea"}))
    assert (row["title"], row["tags"]) == ("harbour", ["sea"])
    assert row["first_message"] == "My ship is the Erebus."
    assert json.loads(await call(server, "list", {"tag": "land"})) == []
    hits = json.loads(await call(server, "search", {"query": "Erebus"}))
    assert {hit["conversation"] for hit in hits} == {row["conversation"]}
    assert {"title", "node", "kind", "excerpt"} < set(hits[0])
    transcript = await call(server, "show", {"conversation": row["conversation"]})
    start = "harbour, node 3, 2 blocks\n\n[user]\nMy ship is the Erebus.\n\n[assis"
    assert transcript.startswith(start)
    last = await call(server, "show", {"conversation": row["conversation"], "last": 1})
    assert last.startswith("harbour, node 3, 2 blocks, the last 1\n\n[assistant]")
    first = await call(server, "show", {"conversation": row["conversation"], "node": 2})
    assert "assistant" not in first


async def test_writing_needs_permission(store: Store) -> None:
    """A read-only server rejects tools that write, even if a client names them."""
    server = create_mcp_server(StoreTools(store).to_toolbox())
    assert "error: There is no tool 'ask'" in await call(server, "ask", {"message": "hi"})
    assert len(await store.conversations()) == 1


async def test_client_can_ask_and_fork(store: Store) -> None:
    """A client can ask in a stored or a new conversation, each with its model, and fork at an earlier node."""
    asked: list[str] = []

    async def choose(row: ConversationRow | None) -> str:
        asked.append(row.id if row else "")
        return "practice"

    server = create_mcp_server(StoreTools(store, choose).to_toolbox())
    [row] = await store.conversations()
    question = {"message": "What is my ship?", "conversation": row.id}
    answer = json.loads(await call(server, "ask", question))
    assert "Erebus" in answer["answer"]
    assert answer["conversation"] == row.id
    new = json.loads(await call(server, "ask", {"message": "What is 2+3?", "title": "sums"}))
    assert "5" in new["answer"]
    assert (await store.conversation(new["conversation"])).title == "sums"
    assert asked == [row.id, ""]
    await store.update(row.id, data={"model": "practice"})
    at = {"conversation": row.id, "node": 3, "title": "quay"}
    forked = json.loads(await call(server, "fork", at))
    assert (forked["title"], forked["forked_from"]) == ("quay", row.id)
    copy = await store.conversation(forked["conversation"])
    assert (copy.head, dict(copy.data)) == (3, {"model": "practice"})
    plain = json.loads(await call(server, "fork", {"conversation": new["conversation"]}))
    assert plain["title"] == "sums"


async def test_errors_and_output_are_bounded(store: Store) -> None:
    """Unknown ids and invalid arguments are errors, and long output is truncated."""
    server = create_mcp_server(StoreTools(store, choose_practice).to_toolbox())
    assert "error: show failed: NotInStore" in await call(server, "show", {"conversation": "x"})
    assert "error: The arguments of list are invalid" in await call(server, "list", {"limit": 999})
    not_json = {"tag": "\ud800"}
    assert "error: The call is invalid: arguments.tag" in await call(server, "list", not_json)
    blocks = ["z" * 20_000 for _ in range(30)]
    long = await Conversation.create("practice", store=store, blocks=blocks)
    text = await call(server, "show", {"conversation": long.id, "last": 100})
    assert len(text) < MAX_OUTPUT + 200
    assert f"{'z' * MAX_BLOCK_CHARS}\n[truncated: 20,000 characters]" in text
    await long.aclose()


async def test_images_files_and_custom_tools_are_served() -> None:
    """Images and files of a result are content, and the input of a custom tool is one argument."""

    def picture() -> list[Any]:
        return [image(PNG), file(b"%PDF-1", filename="a b.pdf"), image("https://example.com/a.png")]

    def shout(text: str) -> str:
        return text.upper()

    server = create_mcp_server(Toolbox(picture, tool(shout, custom=True)))
    async with Client(server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["picture", "shout"]
        [shown, document, link] = (await client.call_tool("picture", {})).content
        [loud] = (await client.call_tool("shout", {"input": "land"})).content
    assert isinstance(shown, types.ImageContent)
    assert (shown.mime_type, base64.b64decode(shown.data)) == ("image/png", PNG)
    assert isinstance(document, types.EmbeddedResource)
    assert isinstance(document.resource, types.BlobResourceContents)
    assert document.resource.uri == "file:///a%20b.pdf"
    assert document.resource.mime_type == "application/pdf"
    assert base64.b64decode(document.resource.blob) == b"%PDF-1"
    assert isinstance(link, types.TextContent)
    assert "https://example.com/a.png" in link.text
    assert isinstance(loud, types.TextContent)
    assert loud.text == "LAND"


async def test_audio_is_served_and_passed_on() -> None:
    """Audio of a result is audio content, also where the tool is that of another server; a model gets a description."""
    wave = b"RIFF\x00\x00\x00\x00WAVE"

    def sing() -> list[Any]:
        return [audio(wave), audio(b"ID3", media_type="audio/mpeg")]

    first = create_mcp_server(Toolbox(sing))
    async with (
        serve_app(create_http_app(first, AccessPolicy(None))) as url,
        mcp_tools(url) as remote,
    ):
        async with Client(create_mcp_server(Toolbox(remote))) as client:
            content = (await client.call_tool("sing", {})).content
        [result] = await run_calls(remote, [tool_call("sing", {})])
    sounds = [each for each in content if isinstance(each, types.AudioContent)]
    assert [each.mime_type for each in sounds] == ["audio/wav", "audio/mpeg"]
    assert [base64.b64decode(each.data) for each in sounds] == [wave, b"ID3"]
    assert result.text == (
        "[omitted: audio of type audio/wav, 12 bytes; models do not take it]"
        "[omitted: audio of type audio/mpeg, 3 bytes; models do not take it]"
    )


async def call_url(url: str, **headers: str) -> list[str]:
    """Return the names of the tools at a URL."""
    async with mcp_tools(url, headers=headers) as toolbox:
        return list(toolbox)


async def test_http_needs_loopback_host_or_token(store: Store) -> None:
    """Foreign hosts and origins are rejected, and with a token every request needs it."""
    server = create_mcp_server(StoreTools(store).to_toolbox())
    async with serve_app(create_http_app(server, AccessPolicy(None))) as url:
        assert await call_url(url) == READING
        async with httpx2.AsyncClient() as client:
            compressed = await client.post(url, json={}, headers={"content-encoding": "gzip"})
            assert compressed.status_code == 415
            large = await client.post(url, content=b" " * (MAX_BODY_BYTES + 1))
            assert (large.status_code, "1,000,000" in large.json()["error"]) == (413, True)
            many = await client.post(url, content=b"[%b]" % (b"1," * 20_000))
            assert (many.status_code, "20,000 JSON values" in many.json()["error"]) == (400, True)
            for header in (
                {"host": "evil.example"},
                {"origin": "http://evil.example"},
                {"sec-fetch-site": "cross-site"},
            ):
                assert (await client.post(url, headers=header)).status_code == 403
    server = create_mcp_server(StoreTools(store).to_toolbox())
    async with serve_app(create_http_app(server, AccessPolicy("secret"))) as url:
        assert await call_url(url, authorization="Bearer secret") == READING
        async with httpx2.AsyncClient() as client:
            rejected = await client.post(url)
            assert (rejected.status_code, "Bearer" in rejected.text) == (401, True)
        with pytest.raises(CannotConnect):
            await call_url(url, authorization="Bearer wrong")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of the command: an empty configuration and a data folder of the test."""
    (tmp_path / "config.toml").touch()
    return {
        "KEDGE_CONFIG": str(tmp_path / "config.toml"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "KEDGE_STORE": str(tmp_path / "store.db"),
    }


async def test_command_serves_standard_streams(environment: dict[str, str]) -> None:
    """``mcp_tools`` can use ``kedge mcp`` over standard streams."""
    command = [*KEDGE_MCP, "--allow-write"]
    async with mcp_tools(command, env=environment, connect_timeout=120, timeout=120) as toolbox:
        assert list(toolbox) == [*READING, "ask", "fork"]
        asked = await conftest.call(toolbox, "ask", message="My name is Ada.", title="names")
        answer = json.loads(asked.text)
        [row] = json.loads((await conftest.call(toolbox, "list")).text)
        assert (row["conversation"], row["title"]) == (answer["conversation"], "names")


@pytest.fixture
def command_environment(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Set the environment of the command in this process and return it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.mark.usefixtures("command_environment")
@pytest.mark.parametrize("http", [False, True])
def test_command_offers_tools_allowed_by_options(
    monkeypatch: pytest.MonkeyPatch, *, http: bool
) -> None:
    """Both transports offer the same tools, and over HTTP the URL is printed."""
    served: list[Any] = []

    async def serve(server: Any) -> None:
        async with Client(server) as client:
            served.append([each.name for each in (await client.list_tools()).tools])

    async def serve_http(app: Any, listener: Any, **_: Any) -> None:
        served.append(listener.getsockname()[0])

    monkeypatch.setattr("kedge.mcp.server.serve_stdio", serve)
    monkeypatch.setattr("kedge.cli.serve.run_uvicorn", serve_http)
    options = ["--http", "--port", "0", "--host", "::1"] if http else []
    done = run_command("mcp", "--allow-write", *options)
    assert done.exit_code == 0, done.output
    assert served == (["::1"] if http else [[*READING, "ask", "fork"]])
    assert done.output.startswith("Serving http://[::1]:" if http else "")


def test_public_address_needs_a_token() -> None:
    """A public address without a token is a usage error that names the options."""
    done = run_command("mcp", "--http", "--host", "0.0.0.0")  # noqa: S104 - it is rejected
    assert done.exit_code == 2
    assert "--token or KEDGE_MCP_TOKEN" in done.output


async def test_unconfirmed_address_in_store_is_not_used(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server cannot prompt for confirmation, so the error names the option that confirms."""
    import click

    from kedge.cli.store_options import resolve_model

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    [row] = await store.conversations()
    row = await store.update(row.id, data={"model": "responses:http://evil.example/v1#m"})
    with click.Context(group), pytest.raises(UnconfirmedReference, match="pass --model"):
        await resolve_model(store, row, may_ask=False)
