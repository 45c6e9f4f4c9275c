"""Map failures of the model behind the server to errors of the API.

A client can correct its request or try again later; it cannot set a key, an address or a model name
upstream. A failure caused by the request is therefore a 4xx with the provider's reason, and every other
failure is a 5xx of "the model behind this server", with a remedy for its operator. The log has the
provider's reason of every failure except a rejected key.
"""

import logging

from kedge.errors import (
    CannotConnect,
    EngineError,
    InvalidTurn,
    KedgeError,
    NotAuthorized,
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
GENERIC_CODES = frozenset(
    {"", "400", "500", "501", "error", "invalid_request_error", "server_error", "api_error"}
)
"""Codes that have no more information than the status."""
OVERLOADED_STATUSES = frozenset({503, 529})
MAX_LOGGED_REASON = 500
"""Characters of a provider's message in the log; a message may quote a long input."""


def to_api_error(error: KedgeError) -> ApiError:
    """Log a failure of the model behind the server and map it to an error of the API.

    Args:
        error: The error of the engine.

    Returns:
        The error to send to the client.
    """
    log.warning("the model behind this server failed: %s", _describe_error(error))
    reason = _get_reason(error)
    match error:
        case RateLimited():
            mapped = RATE_LIMITED(seconds=f"{error.retry_after or 1:g}")
            mapped.headers |= _list_headers(error)
            return mapped
        case NotAuthorized():  # without the provider's message, which may contain a part of the key
            detail = "rejected this server's API key; the operator of this server has to replace it"
            return _build_upstream_error(error, 502, "not_authorized", detail)
        case RequestRefused() | ServerFailed():
            return _map_engine_error(error)
        case StreamCut():
            detail = "ended its stream before the answer was complete; the same request may succeed later"
            return _build_upstream_error(error, 502, "cut", detail)
        case Unreachable() | CannotConnect() if "in time" in reason:
            return _build_upstream_error(error, 504, "timeout", "did not answer in time")
        case Unreachable() | CannotConnect():
            return _build_upstream_error(error, 503, "unreachable", f"cannot be reached: {reason}")
        case UnsupportedParameter() | UnsupportedBlock() | Unsendable() | InvalidTurn():
            return ApiError(
                f"The model behind this server does not support this request: {error}",
                param=getattr(error, "param", None),
                code="unsupported_parameter",
            )
        case _:
            return _build_upstream_error(error, 502, "error", "failed in an unexpected way")


def _describe_error(error: KedgeError) -> str:
    """Name a failure for the log, with the provider's reason."""
    facts = [type(error).__name__]
    if isinstance(error, EngineError):
        fields = (error.provider, error.status, error.code, error.request_id)
        facts += [str(field) for field in fields if field]
    if isinstance(error, NotAuthorized):  # the message may contain a part of the key
        return ", ".join(facts)
    return f"{', '.join(facts)}: {_get_reason(error)[:MAX_LOGGED_REASON]}"


def _get_reason(error: KedgeError) -> str:
    return error.message if isinstance(error, EngineError) else str(error)


def _list_headers(error: KedgeError) -> dict[str, str]:
    after = getattr(error, "retry_after", None)
    return {} if after is None else {"retry-after": f"{after:g}"}


def _build_upstream_error(error: KedgeError, status: int, code: str, detail: str) -> ApiError:
    provider = getattr(error, "provider", "") or "upstream"
    return ApiError(
        f"The model behind this server ({provider}) {detail.rstrip('.')}.",
        status=status,
        code=f"upstream_{code}",
        headers=_list_headers(error),
    )


def _map_engine_error(error: EngineError) -> ApiError:
    """Map a rejection or a failure by whether the same request can succeed later."""
    reason = error.message
    if error.status in OVERLOADED_STATUSES:
        return _build_upstream_error(error, 503, "overloaded", "is overloaded; try again later")
    if error.status == 404:
        return _build_upstream_error(error, 502, "not_found", f"was not found there: {reason}")
    if error.code in CONTEXT_LENGTH_CODES or any(
        phrase in reason.lower() for phrase in CONTEXT_LENGTH_PHRASES
    ):
        return CONTEXT_TOO_LONG()
    if error.retryable:
        detail = "failed; the same request may succeed later"
        return _build_upstream_error(error, 502, "failed", detail)
    return ApiError(
        f"The model behind this server ({error.provider}) rejected the request: {reason}",
        param=error.param or None,
        code="upstream_refused" if error.code in GENERIC_CODES else error.code,
    )
