"""Who may use the page, and what the page may do: a fence around every route.

A page on loopback has no token, yet any web site in a browser on the same machine can try to reach it:
by a name of its own that resolves to 127.0.0.1 (so the ``Host`` must be a loopback name), or by posting
forms (so a write must come from the page itself, and as JSON, which no foreign form can send). Elsewhere
a token is needed: as a bearer from programs, or typed once and kept as a signed cookie by browsers. What
a model wrote can do nothing even if it got into the page as HTML: the policy runs no script and loads
nothing but our own.
"""

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.server.access import AccessPolicy, is_same_origin, read_bearer_token
from kedge.server.request_log import log_failure

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}
SESSION_COOKIE = "kedge_page"
SESSION_SECONDS = 30 * 86_400
MAX_LOGIN_FAILURES = 5
LOGIN_WINDOW_SECONDS = 60.0
"""An address may fail to log in this often within this time."""
MAX_THROTTLED_ADDRESSES = 10_000
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SAFE_SITES = frozenset({"same-origin", "none"})
PUBLIC_PATHS = ("/static/", "/login")


@dataclass(frozen=True, slots=True)
class PageAuth(AccessPolicy):
    """The access policy of the server, with sessions for browsers."""

    clock: Callable[[], float] = time.time

    def sign_session(self, expires: int) -> str:
        """Return a signed session that is valid until then."""
        mac = hmac.new(
            (self.token or "").encode(), f"kedge.page/1 {expires}".encode(), hashlib.sha256
        )
        return f"{expires}.{mac.hexdigest()}"

    def new_session(self) -> str:
        """Return a new session."""
        return self.sign_session(int(self.clock()) + SESSION_SECONDS)

    def is_valid_session(self, value: str) -> bool:
        """Return whether a cookie is a valid session."""
        expires, _, _ = value.partition(".")
        if not (expires.isascii() and expires.isdecimal()) or len(expires) > 15:
            return False
        return int(expires) > self.clock() and _is_equal(value, self.sign_session(int(expires)))

    def is_valid_token(self, value: str) -> bool:
        """Return whether this is the token."""
        return self.matches_token(value.encode())


class LoginThrottle:
    """Limits failed logins of each address, so that a token cannot be guessed.

    Args:
        clock: The current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def retry_after(self, address: str) -> int:
        """Return the seconds for which an address must wait; 0 if it may try."""
        recent = self._recent(address)
        if len(recent) < MAX_LOGIN_FAILURES:
            return 0
        return math.ceil(recent[-MAX_LOGIN_FAILURES] + LOGIN_WINDOW_SECONDS - self._clock())

    def record_failure(self, address: str) -> None:
        """Count a failed login."""
        self._failures[address] = [*self._recent(address), self._clock()]
        self._failures.move_to_end(address)
        if len(self._failures) > MAX_THROTTLED_ADDRESSES:
            self._failures.popitem(last=False)

    def _recent(self, address: str) -> list[float]:
        since = self._clock() - LOGIN_WINDOW_SECONDS
        return [each for each in self._failures.get(address, ()) if each > since]


class PageAuthMiddleware:
    """Middleware that checks access and adds the security headers."""

    def __init__(self, app: ASGIApp, terms: PageAuth) -> None:
        self._app = app
        self._auth = terms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or reject it, with the security headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self.check_request(scope) or self._app
        guarded = _SecuredSend(send)
        try:
            await app(scope, receive, guarded)
        except Exception as error:
            # Its words may quote a conversation: they are for debugging only.
            log_failure("internal error of the page", error)
            if guarded.started:
                raise  # too late to say anything: the connection must break
            await error_response(500, "bug", "internal error; the log has the details")(
                scope, receive, guarded
            )

    def check_request(self, scope: Scope) -> Response | None:
        """Return the rejection of a request, or None."""
        if not self._auth.allows_host(scope):
            return error_response(403, "wrong_host", "this page answers to loopback names only")
        if scope["method"] not in SAFE_METHODS and not is_same_origin_write(scope):
            return error_response(
                403, "cross_site", "a write must come from the page itself, as JSON"
            )
        if self._auth.token is None or scope["path"].startswith(PUBLIC_PATHS):
            return None
        if self._is_authenticated(scope):
            return None
        if scope["path"].startswith("/api/") or scope["method"] not in SAFE_METHODS:
            return error_response(
                401, "token_needed", "send the server's token as Authorization: Bearer …"
            )
        return RedirectResponse("/login", 303)

    def _is_authenticated(self, scope: Scope) -> bool:
        if self._auth.matches_token(read_bearer_token(scope)):
            return True
        return self._auth.is_valid_session(_read_session_cookie(Headers(scope=scope)))


def is_same_origin_write(scope: Scope) -> bool:
    """Return whether a write comes from the page or a program, not from another web site."""
    site = Headers(scope=scope).get("sec-fetch-site", "none")
    return site in SAFE_SITES and is_same_origin(scope)


def is_json(headers: Headers) -> bool:
    """Return whether the content type is JSON; forms of other sites cannot send it."""
    kind = headers.get("content-type", "").partition(";")[0]
    return kind.strip().lower() == "application/json"


def error_response(status: int, code: str, message: str) -> Response:
    """Return an error response of the JSON API."""
    return JSONResponse({"error": {"code": code, "message": message}}, status)


def _read_session_cookie(headers: Headers) -> str:
    cookie = SimpleCookie()
    try:
        cookie.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookie[SESSION_COOKIE].value if SESSION_COOKIE in cookie else ""


def _is_equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


class _SecuredSend:
    """Sends messages with the security headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await self._send(message)
