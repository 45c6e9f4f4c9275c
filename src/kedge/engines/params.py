"""Parameters of a request: the members of its body that a caller may set, their checks and their JSON.

A misspelled parameter that is sent to the server changes an answer without notice, and a parameter such as
``previous_response_id`` makes the server continue from a context that the Turn does not have. Both are rejected by
name before anything is sent. Body members that Kedge does not know must be in the mapping ``extra_body``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from kedge.errors import InvalidSetting, UnsupportedParameter

Params = Mapping[str, Any]
"""Parameters of a request: members of its body."""


class BodyParams(TypedDict, total=False):
    """Body members of the Responses, Chat Completions and Messages APIs that a caller may set."""

    background: bool
    cache_control: Mapping[str, Any]
    context_management: Sequence[Mapping[str, Any]]
    frequency_penalty: float
    include: Sequence[str]
    logit_bias: Mapping[str, float]
    logprobs: bool
    max_completion_tokens: int
    max_output_tokens: int
    max_tokens: int
    max_tool_calls: int
    metadata: Mapping[str, Any]
    moderation: Mapping[str, Any]
    n: int
    output_config: Mapping[str, Any]
    parallel_tool_calls: bool
    presence_penalty: float
    prompt: Mapping[str, Any]
    prompt_cache_key: str
    prompt_cache_retention: str
    reasoning: Mapping[str, Any]
    reasoning_effort: str
    response_format: Mapping[str, Any]
    safety_identifier: str
    seed: int
    service_tier: str
    stop: str | Sequence[str]
    stop_sequences: Sequence[str]
    store: bool
    stream_options: Mapping[str, Any]
    temperature: float
    text: Mapping[str, Any]
    thinking: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    top_k: int
    top_logprobs: int
    top_p: float
    truncation: str
    user: str
    verbosity: str


KNOWN_PARAMS = frozenset(BodyParams.__optional_keys__)
"""The names of all body members that a caller may set."""
EXTRA_BODY = "extra_body"
"""The option whose mapping is merged into the request body unchanged."""
PLANNED_PARAMS: Mapping[str, str] = {
    "previous_response_id": "the plan chooses the anchor from the Turn's records",
    "conversation": "use mode='conversation', or set the state of the Turn",
    "input": "append the blocks to the Turn",
    "messages": "append the blocks to the Turn",
    "instructions": "put a system block at the start of the Turn",
    "system": "put a system block at the start of the Turn",
    "stream": "use streaming=True or streaming=False",
}
"""Body members that follow from the plan, with the alternative to each."""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_PARAM_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def check_params(
    params: Mapping[str, Any],
    *,
    known_options: frozenset[str] = frozenset(),
    foreign: frozenset[str] = frozenset(),
) -> None:
    """Reject parameters that the plan decides, parameters of unknown names, and values that are not JSON.

    This is checked before a run starts: a conversation stores a question before its request is encoded, and
    a question that can never be sent would stay in it as pending.

    Args:
        params: Parameters of a request, or of an engine for all its requests.
        known_options: Further names to suggest for a misspelled one.
        foreign: Names that are not suggested; see ``Engine.foreign_params``.

    Raises:
        UnsupportedParameter: A name is decided by the plan or is unknown.
        InvalidSetting: A value is not JSON.
    """
    members, extra = combine_params(params)
    for name in params:
        if name not in KNOWN_PARAMS and name != EXTRA_BODY:
            from difflib import get_close_matches

            remedy = f"use extra_body={{{name!r}: …}} to send a body member of this name"
            similar = get_close_matches(name, (KNOWN_PARAMS | known_options) - foreign, 2)
            if similar:
                remedy = f"did you mean {' or '.join(map(repr, similar))}? If not, {remedy}"
            raise UnsupportedParameter(name, remedy, f"there is no option {name!r}")
    encode_params({**members, **extra})


def encode_params(members: Mapping[str, Any]) -> bytes:
    """Return members of a body as JSON, without the braces of their object.

    The standard library encodes them, because it rejects values that are not JSON; parameters are arbitrary objects
    of the caller.

    Raises:
        InvalidSetting: A value is not JSON.
    """
    try:
        return _PARAM_ENCODER.encode(members)[1:-1].encode()
    except (TypeError, ValueError, RecursionError) as error:
        if len(members) > 1:
            for name in members:
                encode_params({name: members[name]})  # which names the invalid one
        message = f"{next(iter(members))} cannot be sent as JSON: {error}; pass plain values"
        raise InvalidSetting(message) from error


def combine_params(*groups: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Combine the parameters of an engine and of a request; return them without ``extra_body``, and its members.

    Raises:
        UnsupportedParameter: A parameter or a member of ``extra_body`` is decided by the plan.
    """
    params: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for group in groups:
        members = {**group}
        extra_members = members.pop(EXTRA_BODY, None)
        if not isinstance(extra_members, Mapping | None):
            raise UnsupportedParameter(EXTRA_BODY, "pass a mapping from member names to values")
        params |= members
        extra |= cast("Mapping[str, Any]", extra_members or {})
    for name in PLANNED_PARAMS.keys() & {*params, *extra}:
        problem = f"the plan decides {name!r}, so that it cannot be set"
        raise UnsupportedParameter(name, PLANNED_PARAMS[name], problem)
    return params, extra
