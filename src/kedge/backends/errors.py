"""What the server says when the model behind it fails: the truth, but not the secrets.

A client of the server can mend its own request, and wait; it cannot mend a key, an address or a model
that is missing upstream. So a refusal of the request is passed on with the provider's words, and all
else is told as a failure of what stands behind this server, with what its owner can do.
"""

import logging
from collections.abc import Callable

from kedge.errors import (
    CannotConnect,
    EngineError,
    InvalidTurn,
    KedgeError,
    NotAuthorised,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
    Unsendable,
    UnsupportedBlock,
    UnsupportedParameter,
)
from kedge.server.errors import CONTEXT_TOO_LONG, RATE_LIMITED, ApiError

log = logging.getLogger("kedge.backends")

CONTEXT_LENGTH_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
CONTEXT_LENGTH_PHRASES = ("context length", "context window", "context size", "prompt is too long")
GENERIC_CODES = frozenset({"", "400", "error", "invalid_request_error"})
"""Codes that say no more than the status does."""
OVERLOADED_STATUSES = frozenset({503, 529})


def to_api_error(error: KedgeError) -> ApiError:
    """Say a failure of the model behind the server as the server's own error."""
    log.warning("the model behind this server failed: %s", _describe_error(error))
    for kind, say in _ERROR_MAPPERS:
        if isinstance(error, kind):
            return say(error)
    return _build_upstream_error(
        error, 502, "upstream_error", "failed in a way that this server does not know"
    )


def _describe_error(error: KedgeError) -> str:
    """Name a failure for the log, without words that may quote the conversation."""
    if not isinstance(error, EngineError):
        return type(error).__name__
    facts = (type(error).__name__, error.provider, error.status, error.code, error.request_id)
    return ", ".join(str(fact) for fact in facts if fact)


def _build_upstream_error(error: KedgeError, status: int, code: str, detail: str) -> ApiError:
    provider = getattr(error, "provider", "") or "upstream"
    after = getattr(error, "retry_after", None)
    return ApiError(
        f"The model behind this server ({provider}) {detail}.",
        status=status,
        type="server_error",
        code=code,
        headers={} if after is None else {"retry-after": f"{after:g}"},
    )


def _map_rate_limit(error: KedgeError) -> ApiError:
    after = getattr(error, "retry_after", None)
    said = RATE_LIMITED(seconds=f"{after or 1:g}")
    if after is not None:
        said.headers["retry-after"] = f"{after:g}"
    return said


def _map_auth_error(error: KedgeError) -> ApiError:
    # The words of the provider may hold a part of the key.
    what = "refused this server's key: whoever runs this server has to set it anew"
    return _build_upstream_error(error, 502, "upstream_not_authorised", what)


def _map_rejection(error: KedgeError) -> ApiError:
    assert isinstance(error, RequestRefused)  # noqa: S101 - as the table says
    if error.status == 404:
        return _build_upstream_error(
            error, 502, "upstream_not_found", f"was not found there: {error.message}"
        )
    if error.code in CONTEXT_LENGTH_CODES or any(
        word in error.message.lower() for word in CONTEXT_LENGTH_PHRASES
    ):
        return CONTEXT_TOO_LONG()
    return ApiError(
        f"The model behind this server ({error.provider}) refused the request: {error.message}",
        param=error.param or None,
        code="upstream_refused" if error.code in GENERIC_CODES else error.code,
    )


def _map_unsupported(error: KedgeError) -> ApiError:
    return ApiError(
        f"The model behind this server cannot be asked that: {error}",
        param=getattr(error, "param", None),
        code="unsupported_parameter",
    )


def _map_server_error(error: KedgeError) -> ApiError:
    if getattr(error, "status", None) in OVERLOADED_STATUSES:
        return _build_upstream_error(
            error, 503, "upstream_overloaded", "is overloaded; try again later"
        )
    return _build_upstream_error(
        error, 502, "upstream_failed", "failed; the same request may succeed later"
    )


def _map_unreachable(error: KedgeError) -> ApiError:
    assert isinstance(error, Unreachable)  # noqa: S101 - as the table says
    if "in time" in error.message:
        return _build_upstream_error(error, 504, "upstream_timeout", "did not answer in time")
    what = f"cannot be reached: {error.message}"
    return _build_upstream_error(error, 503, "upstream_unreachable", what)


def _map_stream_cut(error: KedgeError) -> ApiError:
    what = "broke off in the middle of its answer; the same request may succeed later"
    return _build_upstream_error(error, 502, "upstream_cut", what)


def _map_connect_error(error: KedgeError) -> ApiError:
    return _build_upstream_error(error, 503, "upstream_unreachable", f"cannot be reached: {error}")


_ERROR_MAPPERS: tuple[tuple[type[KedgeError], Callable[[KedgeError], ApiError]], ...] = (
    (RateLimited, _map_rate_limit),
    (NotAuthorised, _map_auth_error),
    (RequestRefused, _map_rejection),
    (ServerFailed, _map_server_error),
    (StreamCut, _map_stream_cut),
    (Unreachable, _map_unreachable),
    (UnsupportedParameter, _map_unsupported),
    (UnsupportedBlock, _map_unsupported),
    (Unsendable, _map_unsupported),
    (InvalidTurn, _map_unsupported),
    (CannotConnect, _map_connect_error),
)
"""How each kind of failure is said; the first that fits."""
