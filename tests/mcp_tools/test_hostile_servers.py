"""Tests with faulty MCP servers: failures are bounded and reported, and no process remains."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kedge import mcp_tools
from kedge.errors import CannotConnect
from kedge.mcp import content, transports
from kedge.tools import MAX_OUTPUT, run_calls
from kedge.turns import TextPart, tool_call
from mcp_tools.conftest import OpenRaw, call, read_pids, wait_for


async def test_server_environment_is_minimal(
    open_raw: OpenRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of this process are not passed to the server; variables of ``env`` are."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("TZ", "UTC")
    async with open_raw("environment", env={"GIVEN": "yes"}) as toolbox:
        environment = json.loads((await call(toolbox)).text)
    assert "OPENAI_API_KEY" not in environment
    assert environment["GIVEN"] == "yes"
    assert environment["TZ"] == "UTC"
    assert environment["PATH"]


async def test_command_does_not_run_in_a_shell(pid_file: Path, tmp_path: Path) -> None:
    """Shell quotes and operators are passed as ordinary arguments."""
    with pytest.raises(CannotConnect, match="exited with code"):
        async with mcp_tools(f"ls {tmp_path} ; touch {tmp_path}/made && true"):
            pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("exit", r"it exited with code 3; its standard error: 'cannot start: token=\[redacted\]"),
        ("garbage_only", r"it exited with code 4; its standard output is not MCP: 'not json'"),
        ("silent", r"no answer within 0\.5 s$"),
    ],
)
async def test_server_that_does_not_start_is_reported(
    open_raw: OpenRaw, mode: str, problem: str, pid_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the exit code, output or time limit, with secrets redacted."""
    timeout, grace = (0.5, 0.2) if mode == "silent" else (300.0, 300.0)
    monkeypatch.setattr(transports, "GRACE_SECONDS", grace)
    with pytest.raises(CannotConnect, match=problem) as error:
        async with open_raw(mode, connect_timeout=timeout):
            pass
    assert "\x1b" not in str(error.value)


async def test_crash_fails_calls_and_removes_tools(
    open_raw: OpenRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running and later calls get a result, and the tools are no longer offered."""
    monkeypatch.setattr(transports, "GRACE_SECONDS", 300.0)
    async with open_raw("crash") as toolbox:
        first, second = await run_calls(toolbox, [tool_call("echo", {}), tool_call("echo", {})])
        for result in (first, second):
            assert result.metadata["kedge.outcome"] == "failed"
            assert "it exited with code 7" in result.text
            assert "hunter22" not in result.text
        assert list(toolbox) == []
        crashed = toolbox.sources[0]
        with pytest.raises(Exception, match="not available: it exited with code 7"):
            await crashed.call_tool("echo", {})  # type: ignore[attr-defined]


async def test_call_without_a_response_times_out(open_raw: OpenRaw) -> None:
    """After the timeout, the tool result has the outcome timeout."""
    async with open_raw("hang", timeout=0.2) as toolbox:
        assert (await call(toolbox)).metadata["kedge.outcome"] == "timeout"


async def test_large_results_are_truncated(open_raw: OpenRaw) -> None:
    """Large text is cut as in other tool results, and the number of omitted items is added."""
    async with open_raw("huge") as toolbox:
        text = (await call(toolbox)).text
        assert len(text) < MAX_OUTPUT + 100
        assert "truncated" in text
    async with open_raw("items") as toolbox:
        result = await call(toolbox)
        assert len(result.parts) == content.MAX_CONTENT_ITEMS + 1
        assert result.text.endswith("[omitted: 4,900 further items]")


async def test_endless_message_closes_the_connection(
    open_raw: OpenRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message above the size limit is not read into memory."""
    monkeypatch.setenv("KEDGE_MAX_RESPONSE_BYTES", str(2_000_000))
    async with open_raw("endless") as toolbox:
        assert "it sent a message of more than 2,000,000 bytes" in (await call(toolbox)).text


async def test_control_characters_are_replaced(open_raw: OpenRaw) -> None:
    """Control characters and invisible tags are replaced in names, descriptions, schemas and results."""
    async with open_raw("control") as toolbox:
        [definition] = toolbox.definitions()
        assert definition["name"] == "e_cho"
        assert definition["description"] == "echo�]0;x� �� �end"
        assert definition["parameters"]["properties"]["text"]["description"] == "a�b"
        assert (await call(toolbox, "e_cho")).text == "a�[2Jb�c\u200dd\te\n�"


async def test_names_are_made_unique_and_valid(
    open_raw: OpenRaw, caplog: pytest.LogCaptureFixture
) -> None:
    """Invalid characters are replaced; names that become equal by this, or by their length, get a suffix."""
    async with open_raw("duplicates") as toolbox:
        called = {name: (await call(toolbox, name)).text for name in toolbox}
    long = "x" * 55
    assert called == {
        "echo": "echo",
        "a_b_2e7336dc": "a.b",
        "a_b_c14cddc0": "a/b",
        "a_b": "a_b",
        "c_d": "c.d",
        f"{long}_09ecb6eb": "x" * 100,
        f"{long}_c675a2e6": "x" * 101,
    }
    assert caplog.text.count("no free name") == 2  # the second "echo", and the one without a name
    async with open_raw("reordered") as toolbox:
        assert set(toolbox) == {"a_b", "a_b_2e7336dc", "a_b_c14cddc0"}


async def test_number_of_tools_is_bounded(open_raw: OpenRaw) -> None:
    """The number of tools is limited, even if the pages of the list never end."""
    async with open_raw("many") as toolbox:
        assert len(toolbox) == content.MAX_TOOLS
    async with open_raw("pages") as toolbox:
        assert len(toolbox) == 100


async def test_large_schemas_and_descriptions_are_bounded(open_raw: OpenRaw) -> None:
    """A tool with a too large or too deep schema is omitted, and a long description is truncated."""
    async with open_raw("schemas") as toolbox:
        assert list(toolbox) == ["long"]
        assert len(toolbox["long"].description) == content.MAX_DESCRIPTION_CHARS + 1


TEXT = {"type": "text", "text": "a"}


READABLE = [
    ("garbage", {"text": "hi"}, "ok", '{"text": "hi"}'),
    ("input", {}, "failed", "The server requires input from the user, which is not supported."),
    ("reject", {}, "failed", "The MCP server rejected the call: no such method"),
]
GIVEN = [
    ({"content": "no list"}, "failed", "The server returned an invalid result."),
    (5, "failed", "The MCP server rejected the call: its response is not valid"),
    ({"content": None, "structuredContent": {"n": 1}, "isError": None}, "ok", '{"n": 1}'),
    ({"content": None}, "ok", ""),
    ({"content": [{**TEXT, "annotations": {"priority": 5}, "_meta": 5}]}, "ok", "a"),
    (
        {"content": [TEXT, {"type": "video", "data": "AAAA"}]},
        "ok",
        "a\n[omitted: content that is not valid, or of an unknown type]",
    ),
]
"""Results that a server returns, and the outcome and the text of each call."""


async def test_what_can_be_read_of_a_result_is_used(open_raw: OpenRaw) -> None:
    """Output that is no message is skipped, invalid members are ignored, and an error is a failed call."""
    calls = [
        *((mode, [(arguments, *expected)]) for mode, arguments, *expected in READABLE),
        ("given", [({"result": result}, *expected) for result, *expected in GIVEN]),
    ]
    for mode, expected in calls:
        async with open_raw(mode) as toolbox:
            for arguments, outcome, text in expected:
                received = await call(toolbox, **arguments)
                assert received.metadata["kedge.outcome"] == outcome
                parts = [part.text for part in received.parts if isinstance(part, TextPart)]
                assert "\n".join(parts) == text


async def test_result_with_an_enormous_integer_fails_at_once(open_raw: OpenRaw) -> None:
    """A response with an integer that Python does not parse ends its call, which would wait for its time limit."""
    async with open_raw("enormous") as toolbox:
        assert "its response is not valid" in (await call(toolbox)).text
        assert (await call(toolbox)).metadata["kedge.outcome"] == "failed"


async def test_error_code_of_the_server_keeps_the_connection(open_raw: OpenRaw) -> None:
    """An error with the code -32000, which servers use for errors of their own, does not end the server."""
    async with open_raw("code") as toolbox:
        assert "rate limited" in (await call(toolbox)).text
        assert (await call(toolbox, text="a")).text == '{"text": "a"}'


async def test_text_that_is_not_unicode_is_repaired(open_raw: OpenRaw) -> None:
    """Half of an emoji, in the arguments of a model or in a result, is replaced."""
    async with open_raw("surrogates") as toolbox:
        [result] = await run_calls(toolbox, [tool_call("echo", r'{"text": "\ud83d"}')])
        assert result.text == r'{"text": "\ufffd"} ' + "\ufffd"


async def test_schemas_have_properties_and_no_null_keywords(open_raw: OpenRaw) -> None:
    """Schemas that OpenAI rejects are corrected, and the tools can be called; a server may have no tools."""
    async with open_raw("propertyless") as toolbox:
        for name in ("bare", "null"):
            parameters = toolbox[name].definition()["parameters"]
            assert parameters == {"type": "object", "properties": {}}
        assert toolbox["nil"].definition()["parameters"] == {
            "type": "object",
            "properties": {
                "any": {},
                "inner": {"type": "object"},
                "required": {"enum": ["a", None], "default": None},
            },
        }
        assert (await call(toolbox, "nil")).metadata["kedge.outcome"] == "ok"
    async with open_raw("toolless") as toolbox:
        assert list(toolbox) == []


async def test_invalid_listing_is_described(open_raw: OpenRaw) -> None:
    """The error of a server with an invalid list of tools names the place of the problem."""
    with pytest.raises(CannotConnect, match=r"tools: Input should be a valid list"):
        async with open_raw("unlisted"):
            pass


async def test_invalid_tools_are_left_out(
    open_raw: OpenRaw, caplog: pytest.LogCaptureFixture
) -> None:
    """A schema without a type is that of an object; an invalid tool is reported, and the others work."""
    async with open_raw("untyped") as toolbox:
        assert list(toolbox) == ["untyped", "missing", "echo"]
        assert toolbox["untyped"].parameters["type"] == "object"
        assert (await call(toolbox)).metadata["kedge.outcome"] == "ok"
    assert caplog.text.count("is left out, because it is invalid") == 4


async def test_failed_listing_retains_the_tools(
    open_raw: OpenRaw, caplog: pytest.LogCaptureFixture
) -> None:
    """The first change is applied; after the second one the server fails to list its tools."""
    async with open_raw("change") as toolbox:
        await call(toolbox)
        await wait_for(lambda: list(toolbox) == ["echo", "more"])
        await call(toolbox)
        await wait_for(lambda: "did not list its tools: MCPError" in caplog.text)
        assert list(toolbox) == ["echo", "more"]


async def test_server_is_stopped_if_cancelled_repeatedly(
    open_raw: OpenRaw, pid_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further cancellations do not interrupt stopping the process."""
    monkeypatch.setattr(transports, "GRACE_SECONDS", 0.5)
    entered = asyncio.Event()

    async def own() -> None:
        async with open_raw("stubborn") as toolbox:
            entered.set()
            await call(toolbox)
            await asyncio.Event().wait()

    owner = asyncio.create_task(own())
    await entered.wait()
    while not owner.done():
        owner.cancel()
        await asyncio.wait([owner], timeout=0.05)
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert len(read_pids(pid_file)) == 2


async def test_server_is_stopped_if_cancelled_at_startup(
    open_raw: OpenRaw, pid_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has not yet responded is stopped when its owner is cancelled."""
    monkeypatch.setattr(transports, "GRACE_SECONDS", 0.2)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def connect() -> None:
                async with open_raw("silent"):
                    pass

            group.start_soon(connect)
            await wait_for(pid_file.exists)
            scope.cancel()


async def test_server_is_stopped_if_cancelled_while_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose owner is cancelled while its process is opened is stopped."""
    started: list[Any] = []
    open_process = anyio.open_process

    async def open_late(*args: Any, **options: Any) -> Any:
        started.append(await open_process(*args, **options))
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        return started[0]

    monkeypatch.setattr(anyio, "open_process", open_late)
    notes = transports.ConnectionNotes(lambda: None)
    with anyio.CancelScope() as scope:
        async with transports.parse_address("cat").open(notes, None):
            await anyio.sleep_forever()
    assert started[0].returncode is not None


def test_server_is_stopped_with_the_event_loop(open_raw: OpenRaw) -> None:
    """A connection that is never closed is closed with its event loop."""
    toolboxes: list[Any] = []

    async def forget() -> None:
        context = open_raw("plain")
        toolboxes.append(context)
        toolboxes.append(await context.__aenter__())

    asyncio.run(forget())
    with suppress(RuntimeError):
        asyncio.run(toolboxes[0].__aexit__(None, None, None))
