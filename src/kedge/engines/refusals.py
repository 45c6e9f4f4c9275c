"""When a server refuses a request that another way of sending might save.

Servers say "I do not remember that response" in many shapes. The decision goes by status, code and
param first and by wording last, because wording changes without notice. Everything here concerns a
request that was sent on a server's memory; any other refusal is an error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from kedge.errors import EngineError
from kedge.events.run import HealReason


@dataclass(frozen=True, slots=True)
class Sent:
    """What matters of the request that was refused."""

    previous_response_id: str = ""
    conversation_id: str = ""
    has_reasoning: bool = False
    asks_reasoning: bool = False
    is_empty: bool = False

    @property
    def chained(self) -> bool:
        """Whether the request relied on the server's memory."""
        return bool(self.previous_response_id or self.conversation_id)


Rule = Callable[[EngineError, Sent], bool]

_CLIENT_ERRORS = frozenset({400, 404, 410, 422, 501})
_CHAIN_PARAMS = frozenset({"previous_response_id", "response_id"})
_GONE_CODES = frozenset({"previous_response_not_found", "response_not_found"})
_OTHER_404 = frozenset({"model_not_found", "invalid_model", "unknown_url", "not_found_route"})
_UNSUPPORTED_WORDS = re.compile(
    r"zero data retention|(does not|doesn't|not) support|unsupported|not implemented|stateless"
    r"|cannot be used",
    re.IGNORECASE,
)
_CHAIN_WORDS = re.compile(r"previous[_ ]response", re.IGNORECASE)
_PAIRING_WORDS = re.compile(r"no tool (call|output) found for", re.IGNORECASE)
_SEALED_WORDS = re.compile(r"encrypted[_ ]content", re.IGNORECASE)


def _speaks_of_chain(error: EngineError) -> bool:
    return error.param in _CHAIN_PARAMS or bool(_CHAIN_WORDS.search(error.message))


def _is_unsupported(error: EngineError, sent: Sent) -> bool:
    if not sent.previous_response_id or error.code in _GONE_CODES:
        return False
    if error.code == "unsupported_parameter" and error.param in _CHAIN_PARAMS:
        return True
    return _speaks_of_chain(error) and bool(_UNSUPPORTED_WORDS.search(error.message))


def _is_gone(error: EngineError, sent: Sent) -> bool:
    if not sent.previous_response_id:
        return False
    if error.code in _GONE_CODES or error.param in _CHAIN_PARAMS:
        return True
    if error.status == 404:
        return error.code not in _OTHER_404 and error.param != "model"
    named = sent.previous_response_id in error.message
    # A chain that adds up here and not there is one that the server remembers only in part.
    return named or bool(_CHAIN_WORDS.search(error.message) or _PAIRING_WORDS.search(error.message))


def _is_conversation(error: EngineError, sent: Sent) -> bool:
    if not sent.conversation_id or error.code == "conversation_locked":
        return False
    return error.status in (404, 410) or bool(_PAIRING_WORDS.search(error.message))


def _is_sealed(error: EngineError, sent: Sent) -> bool:
    refused = error.code == "invalid_encrypted_content"
    return sent.has_reasoning and (refused or bool(_SEALED_WORDS.search(error.message)))


def _is_include(error: EngineError, sent: Sent) -> bool:
    about = error.param.startswith("include") or bool(_SEALED_WORDS.search(error.message))
    return sent.asks_reasoning and about


def _is_empty_input(error: EngineError, sent: Sent) -> bool:
    return sent.is_empty and sent.chained and error.param in ("input", "")


RULES: tuple[tuple[HealReason, Rule], ...] = (
    ("reasoning", _is_sealed),
    ("include", _is_include),
    ("unsupported", _is_unsupported),
    ("empty_input", _is_empty_input),
    ("gone", _is_gone),
    ("conversation", _is_conversation),
)
"""Every refusal that can be healed, in the order in which they are looked for."""


def classify(error: EngineError, sent: Sent) -> HealReason | None:
    """How to heal this refusal, or ``None`` if it is an error like any other."""
    if error.status is not None and error.status not in _CLIENT_ERRORS:
        return None
    for reason, applies in RULES:
        if applies(error, sent):
            return reason
    return None
