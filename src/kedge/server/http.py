"""Reading requests and writing answers, the same way for every endpoint."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response

from kedge.server import errors
from kedge.server.access import Exchange
from kedge.server.patience import Patience
from kedge.server.service import Service
from kedge.server.validation import parse_body
from kedge.server.weighing import LONG, count_ahead
from kedge.server.wire import Item, encode

if TYPE_CHECKING:
    from kedge.server.background import Background

ANSWER_HEADERS = {"content-type": "application/json"}


def service_of(request: HTTPConnection) -> Service:
    """Find the server that a request came to."""
    return request.app.state.service


def background_of(request: HTTPConnection) -> "Background":
    """Find what the server that a request came to does in the background."""
    return request.app.state.background


def exchange_of(request: Request) -> Exchange | None:
    """Find the record of a request, where somebody wants one."""
    return request.scope.get("kedge.exchange")


async def read_json(request: Request, *, empty: object = None) -> Any:
    """Read the body of a request as JSON, within the limits; ``empty`` stands for no body."""
    raw = await _read(request)
    exchange = exchange_of(request)
    if exchange is not None:
        exchange.raw = raw
    if not raw and empty is not None:
        return empty
    got = request.headers.get("content-type", "")
    if got.partition(";")[0].strip().lower() != "application/json":
        # Also what keeps a web page from posting here behind its reader's back.
        raise errors.WRONG_CONTENT_TYPE(got=got)
    body = parse_body(raw)
    if len(raw) >= LONG:
        await count_ahead(body)
    if exchange is not None:
        exchange.body = body
    return body


async def _read(request: Request) -> bytes:
    limits = service_of(request).settings.limits
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise errors.BODY_TOO_LARGE(most=limits.body_bytes)
    with Patience(limits.read_seconds):
        return await _gather(request, limits.body_bytes)
    raise errors.READ_TOO_SLOW(seconds=limits.read_seconds)


async def _gather(request: Request, most: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise errors.BODY_TOO_LARGE(most=most)
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)


def answer(body: bytes, status: int = 200) -> Response:
    """Answer with JSON that is already encoded."""
    return Response(body, status, ANSWER_HEADERS)


def answer_json(value: object) -> Response:
    """Answer with a JSON value."""
    return answer(encode(value))


LEAST_LIMIT, MOST_LIMIT, DEFAULT_LIMIT = 1, 100, 20
ORDERS = ("asc", "desc")


def page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Cut the asked-for page out of a list that is ordered oldest first."""
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise errors.WRONG_VALUE(path="order", value=order, supported="'asc' and 'desc'")
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    ordered = list(items) if order == "asc" else list(reversed(items))
    rest = ordered[_start(ordered, query.get("after")) :]
    return listed(rest[:limit], has_more=len(rest) > limit)


def listed(items: Sequence[Item], *, has_more: bool = False) -> dict[str, Any]:
    """Show items as a list object."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def whole_number(path: str, text: str) -> int:
    """Read an integer out of a query."""
    if not (text.isascii() and text.removeprefix("-").isdecimal()):
        raise errors.WRONG_TYPE(path=path, expected="an integer", got="a string")
    return int(text[:20])


def _limit(text: str) -> int:
    value = whole_number("limit", text)
    if value < LEAST_LIMIT:
        raise errors.INTEGER_TOO_SMALL(path="limit", least=LEAST_LIMIT, value=value)
    if value > MOST_LIMIT:
        raise errors.INTEGER_TOO_LARGE(path="limit", most=MOST_LIMIT, value=value)
    return value


def _start(items: Sequence[Item], after: str | None) -> int:
    if after is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == after:
            return index + 1
    raise errors.NO_SUCH_PLACE(id=after)
