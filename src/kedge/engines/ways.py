"""In which way a request is sent, and the body that this makes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.engines.refusals import Sent
from kedge.planning import Mode, RequestPlan

SEALED = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Way:
    """In which way a request is sent: what healing changes."""

    mode: Mode
    full: bool = False
    """Send everything, whatever anchors there are."""
    reasoning: bool = True
    """Send encrypted reasoning along."""
    include: bool = True
    """Ask for encrypted reasoning where the server will not keep its own."""


def make_body(
    plan: RequestPlan,
    way: Way,
    *,
    model: str,
    tools: tuple[Mapping[str, Any], ...],
    streaming: bool,
    params: Mapping[str, Any],
    conversation_id: str = "",
) -> dict[str, Any]:
    """The body of the request; ``params`` of the caller beat what is set here."""
    body: dict[str, Any] = {"model": model, "input": plan.input(), "stream": streaming}
    if plan.instructions is not None:
        body["instructions"] = plan.instructions
    if conversation_id:
        body["conversation"] = conversation_id
    elif plan.anchor:
        body["previous_response_id"] = plan.previous_response_id
    if tools:
        body["tools"] = list(tools)
    if way.mode == "stateless":
        body["store"] = False
    body |= params
    if body.get("store") is False and way.include:
        body["include"] = list(dict.fromkeys([*body.get("include", ()), SEALED]))
    return body


def what_matters(body: Mapping[str, Any], way: Way) -> Sent:
    """What decides whether a refusal of this request can be healed."""
    items = body["input"]
    return Sent(
        previous_response_id=body.get("previous_response_id", ""),
        conversation_id=body.get("conversation", ""),
        has_reasoning=way.reasoning and any(item["type"] == "reasoning" for item in items),
        asks_reasoning=way.include and "include" in body,
        is_empty=not items,
    )
