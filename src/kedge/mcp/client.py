"""A connection to an MCP server, as a source of tools.

The connection runs in a separate task. The contexts of the official client belong to the task that entered
them, but a toolbox is used from many tasks: a chat runs each line in another task, and parallel calls have one
task each. Also, a caller that is cancelled, even twice, must not interrupt the termination of a child process.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import anyio
import mcp_types as types
from mcp import Client, MCPError
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

import kedge
from kedge.errors import CannotConnect, ToolFailed
from kedge.mcp.content import MAX_TOOLS, McpOptions, clean_text, convert_result, convert_tools
from kedge.mcp.transports import ConnectionNotes, ServerAddress
from kedge.observe import get_logger
from kedge.tools import Toolbox, ToolSource
from kedge.tools.errors import redact_secrets
from kedge.turns import Part
from kedge.wire.fields import repair_surrogates

log = get_logger("kedge.mcp")

MAX_PAGES = 100
MAX_ERROR_CHARS = 2_000
CLOSE_SECONDS = 5.0
"""The maximum number of seconds for closing an HTTP session; a child process has other limits."""
REFRESH_SECONDS = 0.1
"""The minimum time between two listings, also if a server reports many changes."""
LISTEN_SECONDS = 5.0
"""The time before a lost subscription to changes is opened again."""
ENDED = "it ended the connection"
RESULT_ADAPTER: TypeAdapter[types.CallToolResult | types.InputRequiredResult] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)


@asynccontextmanager
async def open_tools(address: ServerAddress, options: McpOptions) -> AsyncGenerator[Toolbox]:
    """Connect to a server and yield its tools; see ``mcp_tools``."""
    connection = McpConnection(address, options)
    task = asyncio.create_task(connection.run(), name=f"kedge.mcp {options.name}")
    try:
        await connection.wait_until_ready()
        yield Toolbox(connection)
    finally:
        connection.stop()
        await _join(task)


async def _join(task: asyncio.Task[None]) -> None:
    """Wait until a task has ended, also if this task is cancelled meanwhile."""
    interrupted: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                interrupted = error
    if interrupted:
        raise interrupted


class McpConnection(ToolSource):
    """A connection to a server: its current tools, and their calls."""

    def __init__(self, address: ServerAddress, options: McpOptions) -> None:
        self.name = options.name
        self.address = address
        self.options = options
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._settled = asyncio.Event()
        """Set unless a connection is being opened or closed."""
        self._wake = asyncio.Event()
        """Set when the task of the connection has to stop or to connect again."""
        self._is_wanted = False
        """Whether a call waits for a new connection."""
        self._calls = 0
        self._idle = asyncio.Event()
        """Set unless calls wait for their results."""
        self._idle.set()
        self._changed = asyncio.Event()
        self._stopping = False
        self._scope: anyio.CancelScope | None = None
        self._failure = ""
        self.notes = ConnectionNotes(self._wake.set)

    async def run(self) -> None:
        """Maintain the connection until it is stopped; over HTTP, connect again when a call needs it."""
        _silence_loggers()
        try:
            while not self._stopping:
                try:
                    await self._connect()
                except* Exception as errors:  # noqa: BLE001 - any failure ends the connection only
                    self._failure = self._describe_failure(errors)
                if not self.address.is_reusable:
                    self.tools = ()
                    return
                while not (self._is_wanted or self._stopping):
                    self._wake.clear()
                    self._settled.set()
                    await self._wake.wait()
        finally:
            self._settled.set()

    async def wait_until_ready(self) -> None:
        """Wait for the first listing.

        Raises:
            CannotConnect: The server could not be started or reached, or does not speak MCP.
        """
        await self._settled.wait()
        if self._client is None:
            raise CannotConnect(f"the MCP server {self.address} is not available: {self._failure}")

    def stop(self) -> None:
        """End the connection."""
        self._stopping = True
        self._wake.set()
        if self._client is None and self._scope is not None:
            self._scope.cancel()

    async def _connect(self) -> None:
        """Open a connection, and maintain it until it ends or is stopped."""
        self.notes = ConnectionNotes(self._wake.set)
        self._wake.clear()
        self._is_wanted = False
        with anyio.move_on_after(self.options.connect_timeout) as scope:
            self._scope = scope
            async with Client(
                self.address.open(self.notes, self.options.timeout),
                message_handler=self._handle_message,
                client_info=types.Implementation(name="kedge", version=kedge.__version__),
                cache=None,
            ) as client:
                self.tools = await self._list_tools(client)
                scope.deadline = math.inf
                try:
                    await self._hold(client)
                finally:
                    self._client = None
                    self._settled.clear()
                    scope.deadline = anyio.current_time() + CLOSE_SECONDS
        reasons = [self.notes.describe()]
        if scope.cancelled_caught and not self._stopping:
            reasons.insert(0, f"no answer within {self.options.connect_timeout:g} s")
        self._failure = "; ".join(filter(None, reasons)) or ENDED

    async def _hold(self, client: Client) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_changes, client)
            self._client = client
            self._failure = ""
            self._settled.set()
            log.debug("connected to the MCP server %s, %d tools", self.name, len(self.tools))
            await self._wake.wait()
            group.cancel_scope.cancel()
        if self.notes.session_status and not self._stopping:
            # Concurrent calls are about to be rejected as well; without an answer they could not be sent again.
            with anyio.move_on_after(CLOSE_SECONDS):
                await self._idle.wait()

    def _describe_failure(self, errors: BaseExceptionGroup[Exception]) -> str:
        """Return a description of a failed connection, in one line."""
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        match error:
            case MCPError(code=types.CONNECTION_CLOSED):
                reason = ""
            case ValidationError():  # the place of the first problem, without values
                first = error.errors(include_context=False, include_input=False)[0]
                place = ".".join(map(str, first["loc"]))
                reason = f"it sent an invalid message: {place}: {first['msg']}"
            case _:
                reason = str(error) or type(error).__name__
        text = "; ".join(filter(None, (reason, self.notes.describe())))
        return " ".join(clean_text(redact_secrets(text)).split())[:MAX_ERROR_CHARS] or ENDED

    async def _list_tools(self, client: Client) -> tuple[Any, ...]:
        listed: list[types.Tool] = []
        cursor: str | None = None
        if client.server_capabilities.tools is None:
            return ()
        for _ in range(MAX_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor)
            page = await client.session.list_tools(params=params)
            listed += page.tools
            cursor = page.next_cursor
            if not cursor or len(listed) > MAX_TOOLS:
                break
        return convert_tools(listed, self.call_tool, self.options)

    async def _handle_message(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._changed.set()

    async def _follow_changes(self, client: Client) -> None:
        """List the tools again after each change that the server reports."""
        tools = client.server_capabilities.tools
        async with anyio.create_task_group() as group:
            if tools and tools.list_changed and client.protocol_version in MODERN_PROTOCOL_VERSIONS:
                group.start_soon(self._subscribe, client)
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    with anyio.fail_after(self.options.connect_timeout):
                        self.tools = await self._list_tools(client)
                except (MCPError, TimeoutError, ValidationError) as error:
                    reason = type(error).__name__
                    log.warning("the MCP server %s did not list its tools: %s", self.name, reason)
                else:
                    log.info("the MCP server %s changed its tools: %d", self.name, len(self.tools))
                await anyio.sleep(REFRESH_SECONDS)

    async def _subscribe(self, client: Client) -> None:
        """Receive changes from servers of the current protocol, which report them only to subscribers."""
        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    self._changed.set()  # changes before the subscription were not reported
                    async for _ in changes:
                        self._changed.set()
            except (MCPError, SubscriptionLost, TimeoutError) as error:
                reason = type(error).__name__
                log.debug("the subscription to the MCP server %s ended: %s", self.name, reason)
            await anyio.sleep(LISTEN_SECONDS)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> list[Part]:
        """Call a tool of the server, from any event loop.

        Raises:
            ToolFailed: The call failed; the message is for the model.
        """
        if asyncio.get_running_loop() is self._loop:
            return await self._call_tool(name, arguments)
        if not self._loop.is_running():
            raise ToolFailed("The MCP connection belongs to an event loop that has ended.")
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._call_tool(name, arguments), self._loop)
        )

    async def _call_tool(
        self, name: str, arguments: Mapping[str, Any], *, is_repeated: bool = False
    ) -> list[Part]:
        client, notes = await self._get_client()
        try:
            return await self._send_call(client, name, arguments)
        except MCPError as error:
            if is_repeated or not _has_lost_session(error, notes):
                raise ToolFailed(await self._describe_call_error(error, client, notes)) from error
            self._disconnect(client)
            if notes.session_status != HTTPStatus.NOT_FOUND:
                raise ToolFailed(_describe_rejection(error, notes)) from error
        # With this status the server did not run the call, so it is sent again in a new session.
        return await self._call_tool(name, arguments, is_repeated=True)

    async def _send_call(
        self, client: Client, name: str, arguments: Mapping[str, Any]
    ) -> list[Part]:
        # A lone surrogate, which a model may write as half of an emoji, cannot be sent.
        sent = json.loads(repair_surrogates(json.dumps(dict(arguments), ensure_ascii=False)))
        params = types.CallToolRequestParams(name=name, arguments=sent)
        self._calls += 1
        self._idle.clear()
        try:
            result = await client.session.send_request(
                types.CallToolRequest(params=params), RESULT_ADAPTER
            )
        except ValidationError as error:
            raise ToolFailed("The server returned an invalid result.") from error
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
        if isinstance(result, types.InputRequiredResult):
            raise ToolFailed("The server requires input from the user, which is not supported.")
        return convert_result(result)

    def _disconnect(self, client: Client) -> None:
        """End a connection that is of no use, unless its task has already noticed it."""
        if self._client is client:
            self._client = None
            self._settled.clear()
            self._wake.set()

    async def _get_client(self) -> tuple[Client, ConnectionNotes]:
        """Return the client and its notes; connect again first if the connection can be opened again."""
        if self._client is None and not self._stopping:
            if self.address.is_reusable:
                self._is_wanted = True
                self._settled.clear()
                self._wake.set()
            await self._settled.wait()
        if self._client is None:
            raise ToolFailed(f"The MCP server is not available: {self._failure or ENDED}")
        return self._client, self.notes

    async def _describe_call_error(
        self, error: MCPError, client: Client, notes: ConnectionNotes
    ) -> str:
        if error.code != types.CONNECTION_CLOSED:
            return _describe_rejection(error, notes)
        if notes.ended or notes.stopping:
            self._disconnect(client)
            await self._settled.wait()  # the reason is known when the process has ended
            reason = self._failure or ENDED
        else:  # servers use this code for errors of their own
            reason = clean_text(error.message[:MAX_ERROR_CHARS])
        return f"The call failed, it may have had an effect. The MCP server: {reason}"


def _has_lost_session(error: MCPError, notes: ConnectionNotes) -> bool:
    """Return whether an HTTP server does not know the session anymore, such as after a restart.

    The protocol requires status 404; many servers send 400 with the code of a closed connection instead.
    """
    if error.code != types.CONNECTION_CLOSED:
        return notes.session_status == HTTPStatus.NOT_FOUND
    # With this code, the call may also have been running when another one ended the connection.
    return bool(notes.session_status) and not (notes.ended or notes.stopping)


def _describe_rejection(error: MCPError, notes: ConnectionNotes) -> str:
    message = clean_text(error.message[:MAX_ERROR_CHARS])
    if notes.status:
        message = f"{message} (HTTP status {notes.status})"
    return f"The MCP server rejected the call: {message}"


def _silence_loggers() -> None:
    """Prevent the official package from writing to standard error if logging is not configured."""
    for name in ("mcp", "client"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            logger.addHandler(logging.NullHandler())
