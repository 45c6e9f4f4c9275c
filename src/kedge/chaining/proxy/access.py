"""Access to a proxy: tokens, users and rate limits, and the errors of the proxy itself.

A client's ``Authorization`` header is for the upstream, so it sends the token of the proxy in a separate
header, ``x-kedge-token``, which is not forwarded. This is the token that the proxy was started with, or a
named token of a user from the proxy's store.
"""

from starlette.responses import Response
from starlette.types import Scope

from kedge.server import access, errors
from kedge.server.http_protocol import MAX_INCOMPLETE_BYTES
from kedge.server.request_log import EscapedJSONResponse, FrontEnd
from kedge.store import AccessToken, TokenRegistry

TOKEN_HEADER = "x-kedge-token"
PLAN_KEY = "kedge.plan"
"""The key of a request's scope for what was sent to the upstream."""
METRICS_PATHS = frozenset({"/metrics", "/report"})


class ProxyFrontEnd(FrontEnd):
    """The front end of a proxy, with errors in the form of OpenAI's API."""

    description_key = PLAN_KEY

    def read_credentials(self, scope: Scope) -> access.Credentials | None:
        """Read the token of the proxy; the health of the proxy is public."""
        if scope["path"] == "/healthz":
            return None
        token = access.read_header(scope, TOKEN_HEADER.encode())
        if scope["path"] in METRICS_PATHS:
            return access.Credentials(token, needed="metrics")
        return access.Credentials(token, needed="server")

    def build_rejection(self, scope: Scope, rejection: access.Rejection) -> Response:
        """Return an error of the proxy."""
        return build_rejection(rejection, scope)

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error of the proxy."""
        return build_error(500, "internal error; the log has the details")

    def list_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return no headers: the headers of the upstream are passed on."""
        return []


def create_policy(
    token: str, registry: TokenRegistry | None, *, any_host: bool = False
) -> access.AccessPolicy:
    """Return the access policy of a proxy.

    Args:
        token: The token that the proxy was started with, which is the administrator's; empty for none.
        registry: The named tokens that are accepted as well, or None.
        any_host: Accept any `Host` header while no token is needed.
    """
    return access.AccessPolicy(token or None, any_host, registry, MAX_INCOMPLETE_BYTES)


def build_rejection(rejection: access.Rejection, scope: Scope) -> Response:
    """Return a rejection as an error of the proxy."""
    match rejection.error:
        case errors.HEADERS_TOO_LARGE:
            message = "the headers of the request are too large"
        case errors.HOST_NOT_ALLOWED:
            name = access.parse_host_name(access.read_header(scope, b"host"))
            message = f"host {name!r} is not allowed; use a loopback name, or set a token"
        case errors.ORIGIN_NOT_ALLOWED:
            message = "requests from web pages of another origin are not allowed without a token"
        case errors.API_KEY_MISSING | errors.API_KEY_INVALID:
            message = rejection.message or f"send a token of the proxy in the {TOKEN_HEADER} header"
        case _:
            message = rejection.message
    code = "proxy_error"
    if rejection.status == 429:
        code = "rate_limit_exceeded"
    response = build_error(rejection.status, message, code)
    response.headers.update(rejection.headers)
    return response


def is_limited(caller: AccessToken | None) -> bool:
    """Return whether a caller has a limit of tokens."""
    return caller is not None and caller.tokens_per_minute is not None


def build_error(status: int, message: str, code: str = "proxy_error") -> Response:
    """Return an error of the proxy itself, in the form of OpenAI's API."""
    error = {"message": message, "type": "kedge_proxy", "param": None, "code": code}
    return EscapedJSONResponse({"error": error}, status)
