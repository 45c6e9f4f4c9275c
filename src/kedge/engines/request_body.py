"""Build the body of a request from its plan and how it is sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.engines.heal_rules import RequestSummary
from kedge.engines.request_options import split_extra_body
from kedge.planning import Mode, RequestPlan

ENCRYPTED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a request is sent; healing changes these options."""

    mode: Mode
    full: bool = False
    """Send everything, without an anchor."""
    reasoning: bool = True
    """Include encrypted reasoning."""
    include: bool = True
    """Request encrypted reasoning if the server does not store the response."""
    reason: str = ""
    """Why the mode differs from the requested one."""


def build_request_body(
    plan: RequestPlan,
    options: SendOptions,
    *,
    model: str,
    tools: tuple[Mapping[str, Any], ...],
    streaming: bool,
    params: Mapping[str, Any],
    conversation_id: str = "",
) -> dict[str, Any]:
    """Build the body of a request.

    ``params`` override what is set here, except for the members that the plan decides.
    """
    params, extra = split_extra_body(params)
    body: dict[str, Any] = {"model": model, "input": plan.input(), "stream": streaming}
    if plan.instructions is not None:
        body["instructions"] = plan.instructions
    if conversation_id:
        body["conversation"] = conversation_id
    elif plan.anchor:
        body["previous_response_id"] = plan.previous_response_id
    if tools:
        body["tools"] = list(tools)
    if options.mode == "stateless":
        body["store"] = False
    body |= {**params, **extra}
    if plan.cache:
        body.setdefault("prompt_cache_key", plan.cache.key)
    if body.get("store") is False and options.include:
        body["include"] = list(dict.fromkeys([*body.get("include", ()), ENCRYPTED_REASONING]))
    return body


def build_settings(
    plan: RequestPlan,
    *,
    model: str,
    tools: tuple[Mapping[str, Any], ...],
    params: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the members of a body that change how many tokens a server counts for its input."""
    params, extra = split_extra_body(params)
    settings: dict[str, Any] = {"model": model}
    if plan.instructions is not None:
        settings["instructions"] = plan.instructions
    if tools:
        settings["tools"] = list(tools)
    return {**settings, **params, **extra}


def summarize_request(body: Mapping[str, Any], options: SendOptions) -> RequestSummary:
    """Return the properties that decide whether a rejection of this request can be healed."""
    items = body["input"]
    return RequestSummary(
        previous_response_id=body.get("previous_response_id", ""),
        conversation_id=body.get("conversation", ""),
        has_reasoning=options.reasoning and any(item["type"] == "reasoning" for item in items),
        requests_reasoning=options.include and "include" in body,
        has_empty_input=not items,
    )
