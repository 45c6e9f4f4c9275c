"""Log records and metrics of an engine's requests."""

import logging
from typing import TYPE_CHECKING

from kedge.errors import EngineError
from kedge.events.items import ItemTable
from kedge.events.request_record import RequestRecord
from kedge.observe import count, get_logger, measure
from kedge.planning.plan import is_fallback_reason, name_send

if TYPE_CHECKING:
    from kedge.store.proxied_requests import ChainedRequest

log = get_logger("kedge.engines")

KNOWN_CODES = frozenset(
    {
        "context_length_exceeded",
        "conversation_locked",
        "insufficient_quota",
        "invalid_api_key",
        "invalid_encrypted_content",
        "invalid_prompt",
        "invalid_request_error",
        "invalid_type",
        "invalid_value",
        "missing_required_parameter",
        "model_not_found",
        "previous_response_not_found",
        "rate_limit_exceeded",
        "server_error",
        "unknown_parameter",
        "unsupported_parameter",
        "unsupported_value",
    }
)
"""The codes that are counted by name. Servers may send any code, and the number of labels must be small."""


_SENT_MEMBERS = (
    "mode", "anchor", "reason", "healed", "sent_blocks", "full_blocks", "sent_bytes", "full_bytes",
)  # fmt: skip
_LOGGED_MEMBERS = (
    "provider", "model", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost", "status",
    "seconds",
)  # fmt: skip
"""The members of a record that are fields of its log record."""


def count_request(record: RequestRecord, chain_depth: int) -> None:
    """Count a request that was sent.

    Args:
        record: The record of the request.
        chain_depth: The number of responses that it continues.
    """
    count_sent(record)
    if is_fallback_reason(record.reason):
        count("responses_fallback_total", reason=record.reason)
    for outcome in ("by_id", "by_fallback", "unmatched"):
        if amount := getattr(record, f"results_{outcome}"):
            count("tool_results_total", amount, outcome=outcome)
    if record.first_token_seconds is not None:
        measure("responses_first_output_seconds", record.first_token_seconds)
    measure("responses_chain_depth", chain_depth)


def count_sent(record: "RequestRecord | ChainedRequest") -> None:
    """Count what was sent of a request."""
    count(f"responses_{'chained' if record.anchor else 'stateless'}_requests_total")
    measure("responses_delta_blocks_count", record.sent_blocks)
    count("responses_bytes_sent_total", record.sent_bytes)
    count("responses_bytes_full_total", record.full_bytes)


def count_tokens(record: "RequestRecord | ChainedRequest") -> None:
    """Count the tokens that the server counted for a request."""
    for kind in ("input", "cached", "output"):
        if amount := getattr(record, f"{kind}_tokens"):
            count("tokens_total", amount, kind=kind)


def record_request(record: RequestRecord) -> None:
    """Count the tokens of a request that has ended, and write its log record with all figures."""
    count_tokens(record)
    if record.status in ("completed", "lost"):
        measure("responses_duration_seconds", record.seconds)
    if not log.isEnabledFor(logging.INFO):
        return
    members, text, values = _LOGGED_MEMBERS, "request %s", (record.status,)
    if record.is_known:
        members, text = (*members, *_SENT_MEMBERS), f"{text}: %s, %d of %d bytes"
        values += (name_send(record.reason), record.sent_bytes, record.full_bytes)
    fields = {name: getattr(record, name) for name in members}
    log.info(text, *values, **fields, response_id=record.provider_response_id)


def record_error(error: EngineError) -> None:
    """Record that the server rejected a request, failed, or could not be reached."""
    kind = type(error).__name__
    code = error.code or str(error.status or kind)
    known = not error.code or error.code in KNOWN_CODES
    count("responses_rejected_total", code=code if known else "other")
    log.error("request failed: %s, %s", kind, code, request_id=error.request_id)


def record_healing(reason: str, response_id: str) -> None:
    """Record a rejected request that is sent again in another form."""
    count("responses_healed_total", reason=reason)
    log.warning("healing a request: %s", reason, response_id=response_id)


def record_lost_context(response_id: str) -> None:
    """Record that the server answered without the requested context, and the answer was shown."""
    count("responses_forgotten_total")
    log.warning(
        "the server answered without the requested context; the answer may be wrong, and "
        "later requests will send everything",
        response_id=response_id,
    )


def record_calls(calls: ItemTable) -> None:
    """Count the calls of a finished response by how their ids were determined."""
    for name in ("extracted", "fallen_back", "failed"):
        if number := getattr(calls, name):
            count("tool_call_ids_total", number, outcome=name)
    if calls.inferred:
        count("tool_call_names_inferred_total", calls.inferred)
