"""Decide whether a rejected request can be sent in another form.

Servers report an unknown response in many forms. The decision uses status, code and param first and
wording last, because wording changes without notice. It concerns only requests that rely on a server's
memory; any other rejection is an error.
"""

import re
from collections.abc import Callable

import msgspec

from kedge.errors import ChainRefused, EngineError, RequestRefused
from kedge.events import StreamFailed, Usage
from kedge.events.run import ResendReason
from kedge.planning import ConversationState, RequestPlan
from kedge.turns import Turn


class HealableError(Exception):
    """A request failed before any output was shown, and may be sent again in another form."""

    def __init__(self, reason: ResendReason, error: EngineError, turn: Turn | None = None) -> None:
        super().__init__(reason)
        self.reason: ResendReason = reason
        self.error = error
        """The error to raise if the request cannot be healed."""
        self.turn = turn
        """The Turn to heal, if it is not the one that was sent."""


def is_server_error(status: int | None) -> bool:
    """Return whether an HTTP status reports a failure of the server."""
    return status is not None and status >= 500


class RequestSummary(msgspec.Struct, frozen=True):
    """The properties of the rejected request that matter for healing."""

    previous_response_id: str = ""
    conversation_id: str = ""
    has_reasoning: bool = False
    requests_reasoning: bool = False
    has_empty_input: bool = False

    @property
    def is_chained(self) -> bool:
        """Whether the request relied on the server's memory."""
        return bool(self.previous_response_id or self.conversation_id)


HealRule = Callable[[EngineError, RequestSummary], bool]

CHAIN_REJECTION_STATUSES = frozenset({400, 404, 410, 422, 501})
"""The HTTP statuses with which servers reject what a request relies on."""
OBJECT_LOCKED = "conversation_locked"
"""The code with which a server rejects a request to a conversation object that another one uses."""
_CHAIN_PARAMS = frozenset({"previous_response_id", "response_id"})
_GONE_CODES = frozenset({"previous_response_not_found", "response_not_found"})
_UNRELATED_CODES = frozenset({"model_not_found", "invalid_model", "unknown_url", "not_found_route"})
_UNSUPPORTED_PATTERN = re.compile(
    r"zero data retention|(does not|doesn't|not) support|unsupported|not implemented|stateless"
    r"|cannot be used",
    re.IGNORECASE,
)
_CHAIN_PATTERN = re.compile(r"previous[_ ]response", re.IGNORECASE)
_PAIRING_PATTERN = re.compile(r"no tool (call|output) found for", re.IGNORECASE)
_ENCRYPTED_PATTERN = re.compile(r"encrypted[_ ]content", re.IGNORECASE)


def _is_chaining_unsupported(error: EngineError, summary: RequestSummary) -> bool:
    if not summary.previous_response_id or error.code in _GONE_CODES:
        return False
    if error.code == "unsupported_parameter" and error.param in _CHAIN_PARAMS:
        return True
    mentions_chain = error.param in _CHAIN_PARAMS or _CHAIN_PATTERN.search(error.message)
    return bool(mentions_chain and _UNSUPPORTED_PATTERN.search(error.message))


def _is_response_missing(error: EngineError, summary: RequestSummary) -> bool:
    if not summary.previous_response_id:
        return False
    if error.code in _GONE_CODES or error.param in _CHAIN_PARAMS:
        return True
    if error.status == 404:
        return error.code not in _UNRELATED_CODES and error.param != "model"
    text = error.message
    if summary.previous_response_id in text:
        return True
    # If the chain is valid here and the server rejects it, the server remembers only a part of it.
    return bool(_CHAIN_PATTERN.search(text) or _PAIRING_PATTERN.search(text))


def _is_conversation_unusable(error: EngineError, summary: RequestSummary) -> bool:
    if not summary.conversation_id:
        return False
    is_gone = error.status in (404, 410) or error.code == OBJECT_LOCKED
    return is_gone or bool(_PAIRING_PATTERN.search(error.message))


def _is_reasoning_rejected(error: EngineError, summary: RequestSummary) -> bool:
    rejected = error.code in ("invalid_encrypted_content", "encryption_unavailable")
    return summary.has_reasoning and (rejected or bool(_ENCRYPTED_PATTERN.search(error.message)))


def _is_include_rejected(error: EngineError, summary: RequestSummary) -> bool:
    mentions_include = error.param.startswith("include") or _ENCRYPTED_PATTERN.search(error.message)
    return summary.requests_reasoning and bool(mentions_include)


def _is_empty_input_rejected(error: EngineError, summary: RequestSummary) -> bool:
    return summary.has_empty_input and summary.is_chained and error.param in ("input", "")


HEAL_RULES: tuple[tuple[ResendReason, HealRule], ...] = (
    ("reasoning", _is_reasoning_rejected),
    ("include", _is_include_rejected),
    ("unsupported", _is_chaining_unsupported),
    ("empty_input", _is_empty_input_rejected),
    ("gone", _is_response_missing),
    ("conversation", _is_conversation_unusable),
)
"""Every rejection that can be healed, in the order in which they are checked."""


_FORMAT_PATTERN = re.compile(
    r"\bresponse[_ ]format|\btext\.format|\boutput_config|\boutput_format|\bjson_schema\b"
    r"|structured outputs?\b",
    re.IGNORECASE,
)
_SCHEMA_PATTERN = re.compile(r"invalid (json )?schema|\.schema\b", re.IGNORECASE)


def is_format_rejected(error: EngineError) -> bool:
    """Return whether a server or model does not support the parameter for the format of an answer.

    An error about the schema itself does not count, because another schema would be accepted.
    """
    described = f"{error.param} {error.message}"
    return (
        error.status in CHAIN_REJECTION_STATUSES
        and error.code != "invalid_json_schema"
        and not _SCHEMA_PATTERN.search(described)
        and bool(_FORMAT_PATTERN.search(described))
    )


def classify_error(error: EngineError, summary: RequestSummary) -> ResendReason | None:
    """Return how to heal this rejection, or ``None`` if it cannot be healed."""
    if error.status is not None and error.status not in CHAIN_REJECTION_STATUSES:
        return None
    return next((reason for reason, applies in HEAL_RULES if applies(error, summary)), None)


def as_healable(error: EngineError, summary: RequestSummary) -> HealableError | None:
    """Return the failure of a request that can be sent in another form, or ``None``."""
    reason = classify_error(error, summary)
    if reason is None:
        return None
    if reason in ("gone", "unsupported", "conversation"):
        error = _as_chain_refused(error)
    return HealableError(reason, error)


def lost_context(
    reason: ResendReason,
    provider: str,
    response_id: str = "",
    usage: Usage | None = None,
    turn: Turn | None = None,
) -> HealableError:
    """Return the failure of a request that was answered without the context that it continues.

    Args:
        reason: How the loss was found.
        provider: The provider.
        response_id: The id of the answer, which is discarded.
        usage: Token counts of the answer, if the server sent any.
        turn: The Turn to heal, if it is not the one that was sent.
    """
    message = "the server answered without the context that the request continues"
    if reason == "conversation":
        message = "the conversation object has items of other requests; send the Turn in full to a new one"
    error = ChainRefused(message, provider=provider)
    error.response_id = response_id
    error.usage = usage
    return HealableError(reason, error, turn)


def error_from_event(event: StreamFailed, provider: str) -> EngineError:
    """Return the error that a stream reports as an event."""
    error = RequestRefused(event.message, provider=provider, status=event.status)
    error.code = event.code
    error.param = event.param
    return error


def find_lost(state: ConversationState, plan: RequestPlan, *, all_older: bool) -> tuple[str, ...]:
    """Return the responses that are lost with a plan's anchor.

    A server that does not have a response is likely to have lost the older ones as well; asking for
    each of them would cost a rejected request every time.
    """
    anchor = plan.anchor
    if anchor is None:
        return ()
    if not all_older or is_live_only(state, plan):
        return (anchor.response_id,)
    older = (
        each.response_id
        for each in state.anchors
        if each.scope == anchor.scope
        and each.status == "completed"
        and each.created_at <= anchor.created_at
    )
    return tuple(dict.fromkeys((anchor.response_id, *older)))


def is_live_only(state: ConversationState, plan: RequestPlan) -> bool:
    """Return whether only a connection remembered the anchor, so that it was never stored."""
    if plan.anchor is None:
        return False
    record = state.anchor(plan.anchor.response_id, plan.anchor.scope)
    return record is not None and not record.stored


def _as_chain_refused(error: EngineError) -> EngineError:
    rejection = ChainRefused(
        error.message,
        provider=error.provider,
        status=error.status,
        code=error.code,
        param=error.param,
        request_id=error.request_id,
        body=error.body,
    )
    rejection.__cause__ = error.__cause__
    return rejection
