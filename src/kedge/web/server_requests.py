"""The requests that other programs send to the server of this process, which the page lists.

They are recorded in the namespace of their user, so that other users do not see them; their content is stored only if
``keep_bodies`` is set. Requests of the page are not recorded: they are shown with their conversation.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.requests import HTTPConnection
from starlette.types import Scope

from kedge._internal.json_text import decode_object, encode
from kedge.engines.http_errors import parse_error
from kedge.engines.request_log import MAX_CODE_LENGTH, MAX_ERROR_LENGTH
from kedge.server.access import CALLER_KEY
from kedge.server.practice_model.items import last_user_text
from kedge.server.request_log import RecordedRequest
from kedge.store import AccessToken, ProxiedRequest, Store
from kedge.store.proxied_requests import MAX_PROXIED, RequestRecorder
from kedge.web.transcript import summarize_text
from kedge.wire.fields import get_text, list_objects, read_conversation_id

PAGE_HEADER = "x-kedge-page"
PAGE_KEY = secrets.token_hex(16)
"""A secret that identifies the requests of this process's page."""
GENERATING_PATHS = frozenset({"/v1/responses", "/v1/chat/completions", "/v1/messages"})
"""The paths of requests that generate a response."""


class ServerRequests(RequestRecorder):
    """The requests of other programs to one server.

    Args:
        store: The store, without a namespace.
        base_url: The address of the server's API.
    """

    def __init__(self, store: Store, base_url: str) -> None:
        super().__init__(store)
        self._base_url = base_url

    @property
    def reply_bytes(self) -> int:
        """The number of bytes of each response to record."""
        return self.store.body_bytes if self.store.keep_bodies else 0

    def record(self, exchange: RecordedRequest, scope: Scope) -> None:
        """Record a finished request, if another program sent it to generate a response."""
        if exchange.method != "POST" or exchange.path not in GENERATING_PATHS:
            return
        if exchange.headers.get(PAGE_HEADER) == PAGE_KEY:
            return
        if CALLER_KEY not in scope:  # of no known user
            return
        caller: AccessToken | None = scope[CALLER_KEY]
        namespace = caller.namespace if caller else ""
        self.add(_build_row(exchange, self._base_url), namespace)


def _build_row(exchange: RecordedRequest, base_url: str) -> ProxiedRequest:
    body: dict[str, Any] = {}
    if isinstance(exchange.body, dict):
        body = cast("dict[str, Any]", exchange.body)
    sent_count = _count_input(body)
    anchor = get_text(body, "previous_response_id") or read_conversation_id(body) or ""
    stored_context: Sequence[Any] = ()
    reason = "new"
    if anchor:
        context = exchange.context or ()
        stored_context = context[: max(len(context) - sent_count, 0)]
        reason = ""
    stored_bytes = 0
    if stored_context:
        stored_bytes = len(encode(list(stored_context)))
    error_code, error_message = _read_error(exchange)
    return ProxiedRequest(
        created_at=time.time(),
        upstream=f"{base_url}{exchange.path.removeprefix('/v1')}",
        model=str(body.get("model") or ""),
        status=exchange.status,
        seconds=exchange.seconds,
        anchor=anchor,
        response_id=exchange.response_id or "",
        sent_blocks=sent_count,
        full_blocks=sent_count + len(stored_context),
        sent_bytes=len(exchange.raw),
        full_bytes=len(exchange.raw) + stored_bytes,
        reason=reason,
        is_refused=400 <= exchange.status < 500,
        error_code=error_code,
        error=error_message,
        request=exchange.raw,
        response=exchange.reply,
    )


def _read_input(body: Mapping[str, Any]) -> Any:
    return body.get("input", body.get("messages"))


def _count_input(body: Mapping[str, Any]) -> int:
    """Return the number of items or messages in a request; a text is one."""
    content = _read_input(body)
    if content is None:
        return 0
    if isinstance(content, list):
        return len(cast("list[Any]", content))
    return 1


def _read_error(exchange: RecordedRequest) -> tuple[str, str]:
    """Return the code and the message of an error; empty for an answer."""
    if not exchange.error:
        return "", ""
    error = parse_error(exchange.error.decode(errors="replace"))
    if not error:
        return "", ""
    code = error.get("code") or str(exchange.status)
    return code[:MAX_CODE_LENGTH], error.get("message", "")[:MAX_ERROR_LENGTH]


def read_message(request: ProxiedRequest) -> str:
    """Return the beginning of the newest user message of a request whose body is stored; empty if there is none."""
    content = _read_input(decode_object(request.request or b""))
    if isinstance(content, str):
        return summarize_text(content)
    return summarize_text(last_user_text(list_objects(content)))


async def flush_requests(request: HTTPConnection) -> None:
    """Write the pending requests to the store, so that a list has all of them."""
    recorder: RequestRecorder | None = request.app.state.recorder
    if recorder is not None:
        await recorder.flush()


async def load_request(
    request: HTTPConnection, store: Store
) -> tuple[ProxiedRequest, list[ProxiedRequest], list[ProxiedRequest]]:
    """Return the request whose number is in a path, the requests before it in its chain, and the requests after it."""
    await flush_requests(request)
    row = await store.get_proxied(request.path_params["number"])
    before, after = find_chain(await store.list_proxied(limit=MAX_PROXIED), row)
    return row, before, after


def find_chain(
    rows: Sequence[ProxiedRequest], row: ProxiedRequest
) -> tuple[list[ProxiedRequest], list[ProxiedRequest]]:
    """Return the requests before a request in its chain, oldest first, and the requests that continue it."""
    by_response = {other.response_id: other for other in rows if other.response_id}
    before: list[ProxiedRequest] = []
    visited = {row.id}
    previous = by_response.get(row.anchor)
    while previous is not None and previous.id not in visited:
        before.append(previous)
        visited.add(previous.id)
        previous = by_response.get(previous.anchor)
    before.reverse()

    after: list[ProxiedRequest] = []
    if row.response_id:
        after = [other for other in rows if other.anchor == row.response_id]
    return before, sorted(after, key=lambda other: other.id)
