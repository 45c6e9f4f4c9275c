"""How the server reads the credentials of requests, and formats rejections.

If there are tokens, every route except ``/healthz`` needs one. A named token gives its caller access to the
responses of its namespace, within its limits; the server's own token gives access to the administrator's.
"""

from starlette.responses import Response
from starlette.types import Scope

from kedge.server import errors
from kedge.server.access import (
    AccessPolicy,
    Credentials,
    Rejection,
    read_bearer_token,
    read_header,
)
from kedge.server.error_response import (
    build_access_error,
    build_error_response,
    is_anthropic,
)
from kedge.server.faults.spec import Faults
from kedge.server.request_log import REQUEST_ID_KEY, FrontEnd, Headers

PUBLIC_PATHS = frozenset({"/healthz"})
METRICS_PATH = "/metrics"
IDENTITY_HEADER = (b"kedge-server", b"kedge")


class ServerFrontEnd(FrontEnd):
    """The front end of the server, with the errors of the API that a request uses.

    Each response and WebSocket handshake has the identity header: a client that recognizes this server does not need
    evidence that it uses stored context. While a fault of stored state is active the header is omitted, so that
    the client does not recognize the server.

    Args:
        policy: Decides who may send requests.
        faults: The faults of the server, or None.
    """

    def __init__(self, policy: AccessPolicy, faults: Faults | None) -> None:
        super().__init__(policy)
        self._faults = faults

    def read_credentials(self, scope: Scope) -> Credentials:
        """Read the bearer token or, for Anthropic's API, the key in the ``x-api-key`` header."""
        key = read_header(scope, b"x-api-key").strip() if is_anthropic(scope) else b""
        return Credentials(
            key or read_bearer_token(scope),
            needed="metrics" if scope["path"] == METRICS_PATH else "server",
            is_counted=scope["type"] == "http",  # on a WebSocket each message is counted
            is_public=scope["path"] in PUBLIC_PATHS,
        )

    def build_rejection(self, scope: Scope, rejection: Rejection) -> Response:
        """Return the error of the API."""
        return build_error_response(scope, build_access_error(rejection, self.policy))

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error of the API."""
        return build_error_response(scope, errors.INTERNAL_ERROR())

    def list_headers(self, scope: Scope) -> Headers:
        """Return the id of a request, and the identity of the server."""
        headers = super().list_headers(scope)
        if is_anthropic(scope):
            headers.append((b"request-id", scope[REQUEST_ID_KEY].encode()))
        if self._faults is None or not self._faults.hides_server:
            headers.append(IDENTITY_HEADER)
        return headers
