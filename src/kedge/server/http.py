"""Read credentials and bodies of requests, and build responses, for all endpoints.

If there are tokens, every route except ``/healthz`` needs one. A named token gives its caller access to the
responses of its namespace, within its limits; the server's own token gives access to the administrator's.

Everything below ``/v1/messages`` is Anthropic's API, and so is a route that both APIs have if the
request has Anthropic's version header. Everything else is OpenAI's.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope

from kedge._internal.json_text import encode
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import compute
from kedge.server import access, errors, request_log
from kedge.server.access import AccessPolicy, Credentials, Rejection
from kedge.server.object_forms import Item
from kedge.server.prepare import precount_request
from kedge.server.request_log import FrontEnd, Headers, RecordedRequest
from kedge.server.routes.message_errors import error_body, error_status
from kedge.server.schema.requests import INCLUDE, has_many_items, parse_body
from kedge.server.schema.validators import Integer, ignore_unknown
from kedge.server.state import ServerState

if TYPE_CHECKING:
    from kedge._internal.access_tokens import AccessToken
    from kedge.server.faults import Faults

SERVICE_KEY = "kedge.service"
"""The key of a request's scope for the state of the server in the namespace of its caller."""
IGNORED_HEADER = b"x-kedge-ignored-parameters"
MAX_LOGGED_PARAMETERS = 1_000
"""The maximum number of different ignored parameters that a server logs."""

log = logging.getLogger("kedge.server")
T = TypeVar("T")


def get_service(request: HTTPConnection) -> ServerState:
    """Return the state of the server that received a request, in the namespace of its caller."""
    view: ServerState | None = request.scope.get(SERVICE_KEY)
    if view is not None:
        return view
    service: ServerState = request.app.state.service
    caller: AccessToken | None = request.scope.get(access.CALLER_KEY)
    if caller is not None:
        service = service.view_as(caller)
    request.scope[SERVICE_KEY] = service
    return service


class CheckedBody(NamedTuple, Generic[T]):
    """The body of a request that was checked.

    ``result`` is what the check returned, ``is_long`` whether a pass over the body takes more than some milliseconds.
    """

    body: Any
    result: T
    is_long: bool


async def read_checked(
    request: Request, check: Callable[[dict[str, Any]], T], *, empty: Any = None
) -> CheckedBody[T]:
    """Read the body of a request as JSON and check it, in a thread if that takes long.

    Args:
        request: The request; its response gets a header that lists ignored parameters.
        check: Validates the body with the server's setting for unknown parameters, and may convert it.
        empty: The value of an empty body; None rejects it.

    Raises:
        ApiError: If the body is too large, too slow, compressed, or not JSON, or for the first violation.
    """
    service = get_service(request)
    raw = await _read_json_bytes(request, may_be_empty=empty is not None)
    is_long = len(raw) > LARGE_BYTES
    body = empty
    if raw or empty is None:
        body = await compute(partial(parse_body, raw), is_long=is_long)
        record: RecordedRequest | None = request.scope.get(request_log.RECORD_KEY)
        if record is not None:
            record.body = body
    is_long = is_long or has_many_items(body)
    ignores_unknown = service.ignores_unknown
    checking = partial(_check_body, check, body, ignores_unknown=ignores_unknown)
    result, ignored = await compute(checking, is_long=is_long)
    if ignored:
        header = (IGNORED_HEADER, ", ".join(ignored).encode("ascii"))
        request.scope.get(request_log.RESPONSE_HEADERS_KEY, []).append(header)
        _log_ignored(service, ignored)
    return CheckedBody(body, result, is_long)


async def _read_json_bytes(request: Request, *, may_be_empty: bool) -> bytes:
    limits = get_service(request).settings.limits
    raw = await collect_body(request.scope, request.receive, limits.body_bytes, limits.read_seconds)
    record: RecordedRequest | None = request.scope.get(request_log.RECORD_KEY)
    if record is not None:
        record.raw = raw
    if not raw and may_be_empty:
        return raw
    content_type = access.read_header(request.scope, b"content-type").decode("latin-1")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        # This also prevents requests from forms of other web sites.
        raise errors.UNSUPPORTED_CONTENT_TYPE(got=content_type)
    return raw


def _check_body(
    check: Callable[[dict[str, Any]], T], body: dict[str, Any], *, ignores_unknown: bool
) -> tuple[T, Iterable[str]]:
    """Return the result of a check, and the paths of the parameters that it ignored."""
    if not ignores_unknown:
        return check(body), ()
    with ignore_unknown() as ignored:
        result = check(body)
    return result, ignored


def _log_ignored(service: ServerState, paths: Iterable[str]) -> None:
    for path in paths:
        if path in service.logged_parameters:
            continue
        if len(service.logged_parameters) >= MAX_LOGGED_PARAMETERS:
            return
        service.logged_parameters.add(path)
        log.warning(
            "ignoring the unknown parameter %s (--unknown-parameters reject rejects it)", path
        )


async def collect_body(scope: Scope, receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: If it is compressed, larger than ``max_bytes``, or does not arrive within these seconds.
        ClientDisconnect: If it is incomplete.
    """
    if access.is_compressed(scope):
        encoding = access.read_header(scope, b"content-encoding").decode("latin-1")
        raise errors.UNSUPPORTED_CONTENT_ENCODING(got=encoding)
    declared = access.read_header(scope, b"content-length")
    if declared.isdigit() and int(declared) > max_bytes:
        raise errors.BODY_TOO_LARGE(most=max_bytes)
    body = bytearray()
    has_more = True
    try:
        async with asyncio.timeout(seconds):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise errors.BODY_TOO_LARGE(most=max_bytes)
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise errors.REQUEST_TIMEOUT(seconds=seconds) from None
    return bytes(body)


def respond_encoded(body: bytes) -> Response:
    """Build a response from encoded JSON."""
    return Response(body, media_type="application/json")


def respond_json(value: object) -> Response:
    """Build a response from a JSON value."""
    return respond_encoded(encode(value))


Endpoint = Callable[[Request], Awaitable[Response]]


def in_database(
    check: Callable[[dict[str, Any]], object] | None = None, *, empty: object = None
) -> Callable[[Callable[..., object]], Endpoint]:
    """Make an endpoint from a function that reads or writes the database and returns a JSON value.

    Args:
        check: Checks the body, which the function then gets besides the state and the request; None for no body.
        empty: The value of an empty body; None rejects it.
    """

    def decorate(work: Callable[..., object]) -> Endpoint:
        @wraps(work)
        async def answer(request: Request) -> Response:
            arguments: list[Any] = [get_service(request), request]
            if check is not None:
                checked = await read_checked(request, check, empty=empty)
                await precount_request(checked.body, is_long=checked.is_long)
                arguments.append(checked.body)
            return respond_json(await get_service(request).run(work, *arguments, is_long=True))

        return answer

    return decorate


def check_include(request: Request) -> None:
    """Reject values of ``include`` in the query that the API does not have.

    Raises:
        ApiError: The first of them.
    """
    query = request.query_params
    INCLUDE.check([*query.getlist("include"), *query.getlist("include[]")], (None, "include"))


LIMIT = Integer(minimum=1, maximum=100)
DEFAULT_LIMIT = 20
ORDERS = ("asc", "desc")


def paginate(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the requested page of a list that is ordered oldest first."""
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise errors.INVALID_VALUE(path="order", value=order, supported="'asc' and 'desc'")
    limit = parse_integer("limit", query.get("limit", str(DEFAULT_LIMIT)), LIMIT)
    ordered = list(items)
    if order == "desc":
        ordered.reverse()
    rest = ordered[_find_start(ordered, query.get("after")) :]
    return build_list(rest[:limit], has_more=len(rest) > limit)


def build_list(items: Sequence[Item], *, has_more: bool = False) -> dict[str, Any]:
    """Build a list object of the API."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


_INTEGER = re.compile(r"(-?)0*([0-9]{1,20})[0-9]*")
"""A sign, and the digits that matter: Python rejects thousands of them."""


def parse_integer(path: str, text: str, allowed: Integer) -> int:
    """Parse an integer of a query string."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        raise errors.INVALID_TYPE(path=path, expected="an integer", got="a string")
    value = int(match[1] + match[2])
    allowed.check(value, (None, path))
    return value


def _find_start(items: Sequence[Item], after: str | None) -> int:
    if after is None:
        return 0
    ids = [item["id"] for item in items]
    if after not in ids:
        raise errors.CURSOR_NOT_FOUND(id=after)
    return ids.index(after) + 1


JSON_HEADERS = {"content-type": "application/json"}
MODELS_PATHS = "/v1/models/"
MESSAGES_PATHS = "/v1/messages/"
"""The beginning of the paths of these routes, with a slash at their end."""


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request uses Anthropic's API."""
    path = f"{scope['path']}/"
    if path.startswith(MESSAGES_PATHS):
        return True
    is_shared = path.startswith(MODELS_PATHS)
    return is_shared and any(name == b"anthropic-version" for name, _ in scope["headers"])


def render_error(scope: Scope, error: errors.ApiError) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error response."""
    if is_anthropic(scope):
        return error_status(error), error_body(error, scope.get(request_log.REQUEST_ID_KEY))
    return error.status, error.body()


def build_error_response(scope: Scope, error: errors.ApiError) -> Response:
    """Build the response for an error."""
    status, body = render_error(scope, error)
    return Response(encode(body), status, JSON_HEADERS | error.headers)


def format_allowed_methods(routes: Iterable[Route], scope: Scope) -> str:
    """Return the ``allow`` header for a path: the methods of all routes that it matches."""
    fitting = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
    return ", ".join(sorted(set[str]().union(*(route.methods or () for route in fitting))))


PUBLIC_PATHS = frozenset({"/healthz"})
METRICS_PATH = "/metrics"
IDENTITY_HEADER = b"kedge-server"
IDENTITY = b"kedge"
IDENTITY_WITHOUT_ENCRYPTION = b"kedge; encryption=none"
"""The identity of a server that does not return encrypted reasoning, so that clients do not request it."""


class ServerFrontEnd(FrontEnd):
    """The front end of the server, with the errors of the API that a request uses.

    Each response and WebSocket handshake has the identity header: a client that recognizes this server does not need
    evidence that it uses stored context.

    Args:
        policy: Decides who may send requests.
        faults: The faults to inject; while one of them hides the server, the header is omitted.
        encrypts: Whether the server encrypts reasoning.
    """

    def __init__(
        self, policy: AccessPolicy, faults: "Faults | None", *, encrypts: bool = True
    ) -> None:
        super().__init__(policy)
        self._faults = faults
        self._identity = IDENTITY if encrypts else IDENTITY_WITHOUT_ENCRYPTION

    def read_credentials(self, scope: Scope) -> Credentials:
        """Read the bearer token or, for Anthropic's API, the key in the ``x-api-key`` header."""
        key = b""
        if is_anthropic(scope):
            key = access.read_header(scope, b"x-api-key").strip()
        return Credentials(
            key or access.read_bearer_token(scope),
            needed="metrics" if scope["path"] == METRICS_PATH else "server",
            is_public=scope["path"] in PUBLIC_PATHS,
        )

    def build_rejection(self, scope: Scope, rejection: Rejection) -> Response:
        """Return the error of the API."""
        return build_error_response(scope, rejection.error(**rejection.values))

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error of the API."""
        return build_error_response(scope, errors.INTERNAL_ERROR())

    def list_headers(self, scope: Scope) -> Headers:
        """Return the id of a request, and the identity of the server."""
        id = scope[request_log.REQUEST_ID_KEY].encode()
        headers: Headers = [(b"x-request-id", id)]
        if is_anthropic(scope):
            headers.append((b"request-id", id))
        if self._faults is None or not self._faults.hides_server:
            headers.append((IDENTITY_HEADER, self._identity))
        return headers
