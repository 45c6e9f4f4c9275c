"""Record the requests that other programs send to the server of this process.

Each is recorded in the namespace of its user, so that other users do not see it; its content is stored only
if ``keep_bodies`` is set. Requests of the page are not recorded: they are shown with their conversation.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.requests import HTTPConnection
from starlette.types import Scope

from kedge.practice.context import extract_text, last_user_text
from kedge.server.access import CALLER_KEY
from kedge.server.request_log import RecordedRequest
from kedge.store import AccessToken, ProxiedRequest, Store
from kedge.store.proxied_requests import RequestRecorder
from kedge.text.json_text import decode, encode
from kedge.web.transcript import summarize_text

PAGE_HEADER = "x-kedge-page"
PAGE_KEY = secrets.token_hex(16)
"""A secret that identifies the requests of this process's page."""
_PATHS = frozenset({"/v1/responses", "/v1/chat/completions", "/v1/messages"})


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
        is_question = exchange.method == "POST" and exchange.path in _PATHS
        is_own = exchange.headers.get(PAGE_HEADER) == PAGE_KEY
        if not is_question or is_own or CALLER_KEY not in scope:  # of no known user
            return
        caller: AccessToken | None = scope[CALLER_KEY]
        self.add(_to_row(exchange, self._base_url), caller.namespace if caller else "")


def _to_row(exchange: RecordedRequest, base_url: str) -> ProxiedRequest:
    body = cast("dict[str, Any]", exchange.body) if isinstance(exchange.body, dict) else {}
    input_items = _read_input(body)
    is_list = isinstance(input_items, list)
    sent = len(cast("list[Any]", input_items)) if is_list else int(input_items is not None)
    context = exchange.context or ()
    anchor = _read_anchor(body)
    stored = context[: max(len(context) - sent, 0)] if anchor else ()
    return ProxiedRequest(
        created_at=time.time(),
        upstream=f"{base_url}{exchange.path.removeprefix('/v1')}",
        model=str(body.get("model") or ""),
        status=exchange.status,
        seconds=exchange.seconds,
        anchor=anchor,
        response_id=exchange.response_id or "",
        sent_blocks=sent,
        full_blocks=sent + len(stored),
        sent_bytes=len(exchange.raw),
        full_bytes=len(exchange.raw) + (len(encode(list(stored))) if stored else 0),
        reason="" if anchor else "new",
        request=exchange.raw,
        response=exchange.reply,
    )


def _read_input(body: Mapping[str, Any]) -> Any:
    return body.get("input", body.get("messages"))


def read_message(request: ProxiedRequest) -> str:
    """Return the beginning of the newest user message of a request whose body is stored; empty if there is none."""
    try:
        body: Any = decode(request.request or b"{}")
    except ValueError:
        return ""
    items = _read_input(cast("dict[str, Any]", body)) if isinstance(body, dict) else None
    if not isinstance(items, list):
        return summarize_text(extract_text(items))
    objects = [each for each in cast("list[dict[str, Any]]", items) if type(each) is dict]
    return summarize_text(last_user_text(objects))


def _read_anchor(body: dict[str, Any]) -> str:
    """Return the response or the conversation object that a request continues; empty if none."""
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = cast("dict[str, Any]", conversation).get("id")
    anchor: Any = body.get("previous_response_id") or conversation
    return anchor if isinstance(anchor, str) else ""


async def flush_requests(request: HTTPConnection) -> None:
    """Write the pending requests to the store, so that a list has all of them."""
    recorder: RequestRecorder | None = request.app.state.recorder
    if recorder is not None:
        await recorder.flush()


def find_chain(
    rows: Sequence[ProxiedRequest], row: ProxiedRequest
) -> tuple[list[ProxiedRequest], list[ProxiedRequest]]:
    """Return the requests that a request continues, oldest first, and those that continue it."""
    by_response = {each.response_id: each for each in rows if each.response_id}
    path: list[ProxiedRequest] = []
    seen = {row.id}
    anchor = by_response.get(row.anchor)
    while anchor is not None and anchor.id not in seen:
        path.append(anchor)
        seen.add(anchor.id)
        anchor = by_response.get(anchor.anchor)
    later = [each for each in rows if row.response_id and each.anchor == row.response_id]
    return path[::-1], sorted(later, key=lambda each: each.id)
