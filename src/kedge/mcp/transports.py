"""Connections to MCP servers: a child process with messages on its standard streams, or streamable HTTP.

A server is not trusted. The standard streams are handled here and not by the official transport, which reads a
line of any length into memory and prints lines that are not messages, and the server's standard error, on the
terminal. The process is the leader of a process group, so that all its child processes end with it: first
its input is closed, then the group is terminated, then killed. Each wait is bounded and shielded from cancellation.
"""

import json
import os
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePath
from subprocess import PIPE
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.abc import ByteReceiveStream, ObjectReceiveStream, ObjectSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.client._transport import ReadStream, TransportStreams
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from kedge._internal.display import sanitize_text
from kedge.engines.response_bytes import resolve_limit
from kedge.errors import InvalidSetting
from kedge.mcp.content import repair_result, repair_tool_list
from kedge.observe import get_logger
from kedge.tools.errors import redact_secrets
from kedge.wire.fields import repair_surrogates

log = get_logger("kedge.mcp")

MAX_NOTE_CHARS = 500
MAX_NAME_CHARS = 32
MAX_INTEGER_CHARS = 100
GRACE_SECONDS = 2.0
"""Seconds in which a process must exit after its input is closed, after SIGTERM, and after SIGKILL."""
REAP_SECONDS = 30.0
"""Seconds to wait for the exit status of a killed process, which may be late on a busy machine."""
POLL_SECONDS = 0.01
INHERITED_VARIABLES = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ")
CONNECT_SECONDS = 30.0
READ_SECONDS = 300.0
"""The minimum number of seconds that an HTTP server may be silent while a request is open."""
SESSION_HEADER = "mcp-session-id"
_ENDS_OF_OUTPUT = (
    anyio.IncompleteRead,
    anyio.ClosedResourceError,
    anyio.BrokenResourceError,
    OSError,
)
"""What a read raises at the end of the output of a process."""
SESSION_STATUSES = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)
LAUNCHERS = frozenset(
    {
        "bunx",
        "deno",
        "docker",
        "env",
        "node",
        "npx",
        "pipx",
        "pnpx",
        "python",
        "python3",
        "run",
        "uv",
        "uvx",
    }
)
"""Programs and their subcommands that start another program, whose name is used instead."""


@dataclass(slots=True)
class ConnectionNotes:
    """Observations of a connection, for error messages; ``on_end`` is called when the server ends it."""

    on_end: Callable[[], None]
    stopping: bool = False
    ended: bool = False
    """Whether the server ended the connection before it was stopped."""
    exit_code: int | None = None
    stderr: str = ""
    stderr_ended: bool = False
    stray_output: str = ""
    problem: str = ""
    status: int = 0
    """The HTTP status of the last request that was rejected."""
    session_status: int = 0
    """The HTTP status (400 or 404) with which a request of the current session was rejected."""

    def describe(self) -> str:
        """Return a description of the known problems."""
        if self.problem:
            return self.problem
        problems: list[str] = []
        if self.exit_code is not None:
            problems.append(f"it exited with code {self.exit_code}")
        if self.status:
            problems.append(f"it answered with HTTP status {self.status}")
        stray_output = _to_line(self.stray_output)
        if stray_output:
            problems.append(f"its standard output is not MCP: {stray_output[:MAX_NOTE_CHARS]!r}")
        stderr = _to_line(self.stderr)
        if stderr:
            problems.append(f"its standard error: {stderr[-MAX_NOTE_CHARS:]!r}")
        return "; ".join(problems)


def _to_line(output: str) -> str:
    """Return the output of a server as one line, without control characters and secrets."""
    return " ".join(sanitize_text(redact_secrets(output)).split())


@dataclass(frozen=True, slots=True)
class StdioAddress:
    """A command whose standard streams carry messages."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: str | Path | None = None

    is_reusable = False
    """Whether a connection that ended can be opened again."""

    def __str__(self) -> str:
        return self.default_name

    @property
    def default_name(self) -> str:
        """The name of the program, after any launcher and its options."""
        words = (
            PurePath(word).name for word in self.command if word[:1] != "-" and "=" not in word
        )
        program = next((word for word in words if word and word not in LAUNCHERS), self.command[0])
        return to_prefix(program.removesuffix(".py"))

    @asynccontextmanager
    async def open(
        self, notes: ConnectionNotes, call_timeout: float | None
    ) -> AsyncGenerator[TransportStreams]:
        """Run a command and exchange messages with it; the process is ended on exit from the context.

        Raises:
            OSError: The command cannot be started.
        """
        process = await self._start()
        # No await before the task group is entered: a cancellation in between would leave the process running.
        received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as group, received, incoming, outgoing, to_send:
            group.start_soon(_read_messages, process, received, notes)
            group.start_soon(_read_errors, process, notes)
            group.start_soon(_write_messages, process, to_send)
            try:
                yield incoming, outgoing
            finally:
                notes.stopping = True
                incoming.close()
                with anyio.CancelScope(shield=True):
                    await stop_process(process)
                    await _wait_until(lambda: notes.stderr_ended, GRACE_SECONDS)
                    _close_transport(process)
                if notes.ended:
                    notes.exit_code = process.returncode
                group.cancel_scope.cancel()

    async def _start(self) -> Process:
        with anyio.CancelScope(shield=True):  # a cancelled start would leave the process running
            return await anyio.open_process(
                list(self.command),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=build_environment(self.env),
                cwd=self.cwd,
                start_new_session=True,
            )
        raise AssertionError("the scope was cancelled from outside")


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """The address of a server for streamable HTTP."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    is_reusable = True

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def default_name(self) -> str:
        """The host name."""
        return to_prefix(urlsplit(self.url).hostname or "")

    @asynccontextmanager
    async def open(
        self, notes: ConnectionNotes, call_timeout: float | None
    ) -> AsyncGenerator[TransportStreams]:
        """Open a client whose responses are bounded; no limit of the client is shorter than that of a call."""
        headers = {**self.headers, "accept-encoding": "identity"}
        # A server may be silent until it has the result of a call.
        read_timeout: float | None = None
        if call_timeout is not None:
            read_timeout = max(READ_SECONDS, call_timeout + CONNECT_SECONDS)
        limits = httpx2.Timeout(CONNECT_SECONDS, read=read_timeout)
        hooks: dict[str, list[Callable[..., Any]]] = {"response": [partial(_check_response, notes)]}
        received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=limits, event_hooks=hooks) as client,
            streamable_http_client(
                self.url, http_client=client, max_sse_event_size=resolve_limit()
            ) as (source, outgoing),
            anyio.create_task_group() as group,
            incoming,
        ):
            group.start_soon(_forward_messages, source, received, notes)
            try:
                yield incoming, outgoing
            finally:
                notes.stopping = True
                group.cancel_scope.cancel()


ServerAddress = StdioAddress | HttpAddress


def parse_address(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> ServerAddress:
    """Parse a command line, a list of arguments or a URL.

    Raises:
        InvalidSetting: It is empty or malformed, or an option does not apply to it.
    """
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        if env or cwd:
            raise InvalidSetting("env and cwd are for a command; a URL takes headers")
        with suppress(ValueError):
            if urlsplit(server).hostname:
                return HttpAddress(server, dict(headers or {}))
        raise InvalidSetting("the URL of the MCP server has no host name")
    if headers:
        raise InvalidSetting("headers are for a URL; a command takes env")
    try:
        words = shlex.split(server) if isinstance(server, str) else map(str, server)
        command = tuple(words)
    except ValueError as error:
        raise InvalidSetting(f"the command of the MCP server is malformed: {error}") from error
    if not command or not command[0]:
        raise InvalidSetting("the command of the MCP server is empty; give a command or a URL")
    return StdioAddress(command, dict(env or {}), cwd)


def to_prefix(text: str) -> str:
    """Return a text as a prefix of tool names: letters, digits, ``_`` and ``-``."""
    allowed = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in text)
    return allowed.strip("_-")[:MAX_NAME_CHARS] or "mcp"


def build_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: paths, user, terminal and language, and the added variables.

    API keys and other settings of this process are not part of it.
    """
    language = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    return {**get_default_environment(), **language, **added}


async def _read_messages(
    process: Process,
    received: ObjectSendStream[SessionMessage | Exception],
    notes: ConnectionNotes,
) -> None:
    """Pass on the messages on standard output; other lines are recorded and skipped."""
    max_bytes = resolve_limit()
    lines = BufferedByteReceiveStream(cast("ByteReceiveStream", process.stdout))
    try:
        with suppress(*_ENDS_OF_OUTPUT):
            while True:
                message = _parse_message(await lines.receive_until(b"\n", max_bytes), notes)
                # After the receiver is closed, output is discarded: a server that cannot write cannot exit.
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    if message:
                        await received.send(message)
    except anyio.DelimiterNotFound:
        notes.problem = f"it sent a message of more than {max_bytes:,} bytes"
    with suppress(ProcessLookupError):
        if notes.problem:
            process.kill()
    notes.ended = not notes.stopping  # before the calls fail that wait for a response
    await received.aclose()
    notes.on_end()


def _parse_message(line: bytes, notes: ConnectionNotes) -> SessionMessage | None:
    if not line.strip():
        return None
    try:
        message = validate_message(line)
    except (ValueError, RecursionError):
        notes.stray_output = notes.stray_output or line[:MAX_NOTE_CHARS].decode(errors="replace")
        log.debug("an MCP server wrote a line that is not a message, %d bytes", len(line))
        return _build_rejection(line)
    return _repair_message(SessionMessage(message))


def _build_rejection(line: bytes) -> SessionMessage | None:
    """Return an error for the request that an invalid response belongs to, which would wait for its time limit."""
    try:
        # Floats: Python does not parse an integer of thousands of digits, of which the response may have one.
        response: Any = json.loads(line, parse_int=_parse_short_integer)
        is_response = response["jsonrpc"] == "2.0" and ("result" in response or "error" in response)
        error = ErrorData(code=INTERNAL_ERROR, message="its response is not valid")
        message = JSONRPCError(jsonrpc="2.0", id=response["id"], error=error)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if not is_response:
        return None
    return SessionMessage(message)


def _parse_short_integer(text: str) -> int | float:
    if len(text) < MAX_INTEGER_CHARS:
        return int(text)
    return float(text)


def _repair_message(message: SessionMessage) -> SessionMessage:
    if isinstance(message.message, JSONRPCResponse):
        repair_tool_list(message.message.result)
        repair_result(message.message.result)
    return message


def validate_message(line: bytes) -> JSONRPCMessage:
    """Parse a message; a text that is not valid Unicode, such as half of an emoji, is repaired."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return jsonrpc_message_adapter.validate_json(repair_json(line), by_name=False)


def repair_json(text: bytes) -> bytes:
    """Return JSON whose texts are valid Unicode.

    Raises:
        ValueError: It is not JSON.
    """
    value = json.loads(text.decode(errors="replace"))
    return repair_surrogates(json.dumps(value, ensure_ascii=False)).encode()


async def _read_errors(process: Process, notes: ConnectionNotes) -> None:
    """Read standard error, so that the server does not block, and retain the last part of it."""
    try:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            async for chunk in process.stderr or ():
                text = notes.stderr + chunk.decode(errors="replace")
                notes.stderr = text[-4 * MAX_NOTE_CHARS :]
    finally:
        notes.stderr_ended = True


async def _write_messages(process: Process, to_send: ObjectReceiveStream[SessionMessage]) -> None:
    """Write messages until the process no longer reads; the reader reports the end."""
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        async for each in to_send:
            line = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            if process.stdin:
                await process.stdin.send(line.encode() + b"\n")


async def stop_process(process: Process) -> None:
    """End a process and everything in its group; return when it has exited."""
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        if process.stdin:
            await process.stdin.aclose()
    await _wait_until(lambda: process.returncode is not None, GRACE_SECONDS)
    if hasattr(os, "killpg"):
        await terminate_posix_process_tree(process, GRACE_SECONDS)
    elif process.returncode is None:  # pragma: no cover - Windows has no process groups
        process.kill()
    await _wait_until(lambda: process.returncode is not None, REAP_SECONDS)


def _close_transport(process: Process) -> None:
    """Close the pipes, which a process outside of the group may still have open."""
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    with suppress(PermissionError):
        if transport is not None:
            transport.close()


async def _wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    with anyio.move_on_after(seconds):
        while not is_true():  # noqa: ASYNC110 - there is no event for the end of a process group
            await anyio.sleep(POLL_SECONDS)


async def _forward_messages(
    source: ReadStream[SessionMessage | Exception],
    received: ObjectSendStream[SessionMessage | Exception],
    notes: ConnectionNotes,
) -> None:
    """Pass on messages until the connection ends, and record the end."""
    async with received:
        try:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async for message in source:
                    if isinstance(message, SessionMessage):
                        message = _repair_message(message)  # noqa: PLW2901 - the message to pass on
                    await received.send(message)
        finally:
            notes.ended = not notes.stopping
    notes.on_end()


async def _check_response(notes: ConnectionNotes, response: httpx2.Response) -> None:
    """Record the status of a rejected request, and limit the size of a body; a stream has a limit for each event.

    404 and 400 are the answers to an unknown session.
    """
    status = response.status_code
    request = response.request
    if request.method == "POST":
        notes.status = status if response.is_error else 0
        if SESSION_HEADER in request.headers and status in SESSION_STATUSES:
            notes.session_status = status
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("the server compressed its response", request=request)
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _LimitedStream(response.stream)


class _LimitedStream(httpx2.AsyncByteStream):
    """A body that fails when it exceeds the maximum size of a message."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        max_bytes = resolve_limit()
        size = 0
        async for chunk in self.stream:
            size += len(chunk)
            if size > max_bytes:
                raise httpx2.StreamError(f"it sent more than {max_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()
