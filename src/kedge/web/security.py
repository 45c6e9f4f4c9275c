"""Access control and security headers of the page and the API.

A page on loopback has no token, but any web site in a browser on the same machine can try to reach it:
with a host name that resolves to 127.0.0.1 (so the ``Host`` must be a loopback name), or by posting forms
(so a write must be sent by the page, as JSON, which forms of other sites cannot send). On other addresses a
token is required: programs send it as a bearer token; in browsers it is entered once, and a signed cookie is
stored. If text of a model were inserted into the page as HTML, it would be harmless: the content security
policy allows only scripts and resources of the page.
"""

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from kedge.server import access, errors
from kedge.server.request_log import EscapedJSONResponse, FrontEnd
from kedge.store import AccessToken, Store, TokenRegistry

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
    "cache-control": "no-store",
}
SESSION_COOKIE = "kedge_page"
SESSION_SECONDS = 30 * 86_400
MAX_LOGIN_FAILURES = 5
"""The number of times that an address may fail to log in within ``LOGIN_WINDOW_SECONDS``."""
MAX_ALL_LOGIN_FAILURES = 100
"""The number of times that all addresses together may fail."""
LOGIN_WINDOW_SECONDS = 60.0
PUBLIC_PATHS = ("/static/", "/login", "/logout")
SESSION_KEY = "kedge.has_session"
"""The key of a request's scope for whether it was sent by a browser with a session."""


@dataclass(frozen=True, slots=True)
class PageAuth(access.AccessPolicy):
    """The access policy of the server, with sessions for browsers.

    A session of the server's own token is signed with this token. A session of a named token is a random
    value whose hash is in the store, so it ends when the token is revoked.
    """

    registry: TokenRegistry | None = None
    clock: Callable[[], float] = time.time

    async def find_sender(self, presented: access.Credentials) -> access.FoundCaller | None:
        """Return who sent a request, by its token or its session."""
        # ``super()`` without arguments needs a class that is not replaced by one with slots.
        sender = await access.AccessPolicy.find_sender(self, presented)
        if sender is not None:
            return sender
        session = presented.session
        if self.is_signed_session(session) and not await self._has_ended(session):
            return access.FoundCaller(None, is_session=True)
        if self.registry is None:
            return None
        caller = await self.registry.find_session(session)
        if caller is None:
            return None
        return access.FoundCaller(caller, is_session=True)

    async def _has_ended(self, session: str) -> bool:
        """Return whether a signed session was ended by its user."""
        return self.registry is not None and await self.registry.is_ended(session)

    async def is_valid(self, grant: access.Grant) -> bool:
        """Return whether the token or the session of a request has not ended."""
        if not grant.session:
            return await access.AccessPolicy.is_valid(self, grant)
        sender = await self.find_sender(access.Credentials(session=grant.session))
        return sender is not None and sender.caller == grant.caller

    async def log_in(self, token: str) -> str | None:
        """Start a session for a token, or return None if it is wrong or lacks the scope ``page``."""
        if self.matches_token(token.encode()):
            return self.new_session()
        if self.registry is None:
            return None
        caller = await self.registry.find(token)
        if caller is None or "page" not in caller.scopes:
            return None
        return await self.registry.start_session(caller.name, SESSION_SECONDS)

    async def log_out(self, session: str) -> None:
        """End a session, so that copies of its cookie are invalid as well."""
        if self.registry is None:
            return
        # A signed session is in no table: that it has ended is stored until its signature expires.
        is_signed = self.is_signed_session(session)
        await self.registry.end_session(session, SESSION_SECONDS if is_signed else None)

    def sign_session(self, expires: str) -> str:
        """Return a signed session: its expiry and a random text, followed by the signature."""
        mac = hmac.new(
            (self.token or "").encode(), f"kedge.page/1 {expires}".encode(), hashlib.sha256
        )
        return f"{expires}.{mac.hexdigest()}"

    def new_session(self) -> str:
        """Return a new signed session."""
        return self.sign_session(
            f"{int(self.clock()) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        )

    def is_signed_session(self, value: str) -> bool:
        """Return whether a cookie is a session that this server signed, and has not expired."""
        signed, _, _ = value.rpartition(".")
        expected = self.sign_session(signed)
        if self.token is None or not hmac.compare_digest(value.encode(), expected.encode()):
            return False
        return int(signed.partition(".")[0]) > self.clock()


class DelegatedTokens(TokenRegistry):
    """The named tokens of a store, and the tokens with which a page calls the server for their owners."""

    def __init__(self, store: Store, *, required: bool = True) -> None:
        super().__init__(store, required=required)
        self._callers: dict[str, AccessToken] = {}
        self._delegated: dict[AccessToken, AccessToken] = {}

    def issue(self, caller: AccessToken) -> str:
        """Return a token for requests of the page on behalf of a caller."""
        secret = secrets.token_urlsafe(32)
        self._callers[secret] = caller
        return secret

    async def find(self, token: str) -> AccessToken | None:
        """Return the caller of a token, unless it was revoked."""
        caller = self._callers.get(token)
        if caller is None:
            return await super().find(token)
        if not await super().is_valid(caller):
            return None
        # The request to the page was counted; its scopes were checked there.
        delegated = replace(caller, requests_per_minute=None, scopes=frozenset({"server"}))
        self._delegated[delegated] = caller
        return delegated

    async def is_valid(self, token: AccessToken) -> bool:
        """Return whether a token that was found before has not been revoked."""
        return await super().is_valid(self._delegated.get(token, token))


class LoginThrottle:
    """A limit for failed logins of each address and of all addresses, so that a token cannot be guessed.

    An attempt counts from its start until it succeeds: parallel ones are limited as well.

    Args:
        clock: The current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: list[tuple[str, float]] = []

    def count_attempt(self, address: str) -> int:
        """Count an attempt and return 0, or return the seconds for which the address must wait."""
        now = self._clock()
        since = now - LOGIN_WINDOW_SECONDS
        self._attempts = [(other, at) for other, at in self._attempts if at > since]
        everyone = [at for _, at in self._attempts]
        own = [at for other, at in self._attempts if other == address]
        if len(own) >= MAX_LOGIN_FAILURES:
            return math.ceil(own[-MAX_LOGIN_FAILURES] - since)
        if len(everyone) >= MAX_ALL_LOGIN_FAILURES:
            return math.ceil(everyone[-MAX_ALL_LOGIN_FAILURES] - since)
        self._attempts.append((address, now))
        return 0

    def forget(self, address: str) -> None:
        """Do not count the newest attempt of an address, which did not fail."""
        for index in range(len(self._attempts) - 1, -1, -1):
            if self._attempts[index][0] == address:
                del self._attempts[index]
                return


REJECTIONS: Mapping[errors.ErrorTemplate, tuple[str, str]] = {
    errors.HEADERS_TOO_LARGE: ("headers_too_large", "the headers of the request are too large"),
    errors.HOST_NOT_ALLOWED: ("wrong_host", "this page accepts loopback host names only"),
    errors.ORIGIN_NOT_ALLOWED: ("cross_site", "a write must be sent by the page itself, as JSON"),
    errors.API_KEY_MISSING: ("token_needed", "send the server's token as Authorization: Bearer …"),
    errors.API_KEY_INVALID: ("token_needed", "send the server's token as Authorization: Bearer …"),
    errors.TOKEN_SCOPE_MISSING: ("scope_missing", ""),
    errors.RATE_LIMITED: ("rate_limited", ""),
    errors.TOKENS_LIMITED: ("rate_limited", ""),
    errors.DATABASE_UNAVAILABLE: ("store", ""),
}
"""The code and the message of each rejection; an empty message stands for the own message of the rejection."""


class PageFrontEnd(FrontEnd):
    """The front end of the page and its API, which adds the security headers to each response."""

    default_headers = tuple(
        (name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()
    )

    def read_credentials(self, scope: Scope) -> access.Credentials:
        """Read the bearer token and the cookie of a session."""
        session = read_session_cookie(Headers(scope=scope))
        scope[SESSION_KEY] = bool(session)
        path = scope["path"]
        return access.Credentials(
            access.read_bearer_token(scope),
            session,
            needed="api" if path.startswith("/api/") else "page",
            is_public=path.startswith(PUBLIC_PATHS),
            checks_origin=scope["method"] not in access.SAFE_METHODS,
        )

    def build_rejection(self, scope: Scope, rejection: access.Rejection) -> Response:
        """Return an error of the API, or redirect a browser to the login."""
        is_page = scope["method"] in access.SAFE_METHODS and not scope["path"].startswith("/api/")
        if is_page and rejection.status == 401 and rejection is not access.REVOKED:
            return RedirectResponse("/login", 303)
        code, message = REJECTIONS[rejection.error]
        return error_response(rejection.status, code, message or rejection.message)

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error."""
        return error_response(500, "bug", "internal error; the log has the details")


def is_json(headers: Headers) -> bool:
    """Return whether the content type is JSON; forms of other sites cannot send it."""
    kind = headers.get("content-type", "").partition(";")[0]
    return kind.strip().lower() == "application/json"


def error_response(status: int, code: str, message: str) -> Response:
    """Return an error response of the JSON API."""
    return EscapedJSONResponse({"error": {"code": code, "message": message}}, status)


def read_session_cookie(headers: Headers) -> str:
    """Return the session in the cookies of a request, or an empty text."""
    # Not ``http.cookies``: it ignores everything after a cookie that it rejects, such as JSON of another app.
    return cookie_parser(headers.get("cookie", "")).get(SESSION_COOKIE, "")
