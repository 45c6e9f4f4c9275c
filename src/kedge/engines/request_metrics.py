"""Log records and metrics of an engine's requests."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kedge.errors import EngineError
from kedge.events.items import ItemTable
from kedge.events.request_record import RequestRecord
from kedge.observe import count, get_logger
from kedge.observe.metrics import Value, measure_all
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
    results = {
        "by_id": record.results_by_id,
        "by_fallback": record.results_by_fallback,
        "unmatched": record.results_unmatched,
    }
    further = _list_amounts("tool_results_total", "outcome", results)
    if is_fallback_reason(record.reason):
        further.append(("responses_fallback_total", 1, (("reason", record.reason),)))
    if record.first_token_seconds is not None:
        further.append(("responses_first_output_seconds", record.first_token_seconds, ()))
    count_sent(record, ("responses_chain_depth", chain_depth, ()), *further)


def count_sent(record: "RequestRecord | ChainedRequest", *further: Value) -> None:
    """Count what was sent of a request, and record further values."""
    measure_all(
        (f"responses_{'chained' if record.anchor else 'stateless'}_requests_total", 1, ()),
        ("responses_delta_blocks_count", record.sent_blocks, ()),
        ("responses_bytes_sent_total", record.sent_bytes, ()),
        ("responses_bytes_full_total", record.full_bytes, ()),
        *further,
    )


def count_end(record: "RequestRecord | ChainedRequest") -> None:
    """Count the tokens of a request that has ended, and how long a request of an engine took."""
    tokens = {
        "input": record.input_tokens,
        "cached": record.cached_tokens,
        "output": record.output_tokens,
    }
    values = _list_amounts("tokens_total", "kind", tokens)
    if isinstance(record, RequestRecord) and record.status in ("completed", "lost"):
        values.append(("responses_duration_seconds", record.seconds, ()))
    measure_all(*values)


def _list_amounts(name: str, label: str, amounts: Mapping[str, int | None]) -> list[Value]:
    return [(name, amount, ((label, kind),)) for kind, amount in amounts.items() if amount]


def log_request(record: RequestRecord) -> None:
    """Write the log record of a request that has ended, with all figures."""
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
    outcomes = {
        "extracted": calls.extracted,
        "fallen_back": calls.fallen_back,
        "failed": calls.failed,
    }
    values = _list_amounts("tool_call_ids_total", "outcome", outcomes)
    if calls.inferred:
        values.append(("tool_call_names_inferred_total", calls.inferred, ()))
    if values:
        measure_all(*values)
