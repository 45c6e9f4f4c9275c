"""Send a message in a conversation, and stream the events of the turn."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.conversation import Conversation, Reply
from kedge.errors import InvalidSetting, KedgeError, NotInStore
from kedge.events import Event, ReasoningDelta, RefusalDelta, TextDelta
from kedge.events.run import (
    AnswerFinished,
    Healed,
    RequestPlanned,
    ServerForgot,
    ToolFinished,
    ToolStarted,
)
from kedge.formatting import HEALING_TEXTS
from kedge.planning import RequestPlan
from kedge.planning.explain import describe_rejection, format_headline
from kedge.turns import Block, TextPart, UserBlock, user
from kedge.web.schemas import NewTurn, PlanShape, RejectedShape, TurnShape, UsageShape
from kedge.web.service import ConversationService, OpenConversation, path_to
from kedge.web.transcript import iter_block_ranges


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A message, its conversation, and the node to continue from; None for the head.

    The head moves when the answer arrives, so a failed turn leaves it where it was.
    """

    conversation: Conversation
    blocks: Sequence[Block]
    at: int | None
    options: Mapping[str, Any]
    """The idempotency key and the options of the request."""


async def resolve_turn(service: ConversationService, name: str, given: NewTurn) -> TurnRequest:
    """Resolve the position to continue from, the model that answers there, and the message.

    Raises:
        KedgeError: If one of them is not available; nothing was written.
    """
    at = given.previous_response_id or ("" if given.at is None else str(given.at))
    opened = await service.open(name, at, given.model)
    options = {"key": given.key, **opened.options}
    if given.edit is not None:
        blocks, parent = await _edit_question(service, opened, given.edit, given.text)
        return TurnRequest(opened.conversation, blocks, parent, options)
    return TurnRequest(
        opened.conversation, [user(given.text)], opened.node if at else None, options
    )


async def _edit_question(
    service: ConversationService, opened: OpenConversation, block_id: str, text: str
) -> tuple[list[Block], int]:
    """Return the question that a block is part of, with new text, and the node before it."""
    blocks = (await service.store.load(opened.conversation.row, opened.node)).blocks
    for question, start, stop in iter_block_ranges(path_to(opened.tree, opened.node)):
        old = blocks[start:stop]
        if any(block.id == block_id for block in old):
            new = [_replace_text(block, text) if block.id == block_id else block for block in old]
            return new, question.parent
    raise NotInStore(f"there is no block {block_id!r} on the path to node {opened.node}")


def _replace_text(block: Block, text: str) -> Block:
    """Replace the text of a user block; images and files are retained."""
    if not isinstance(block, UserBlock):
        raise InvalidSetting("only user messages can be edited and sent again")
    rest = (part for part in block.parts if not isinstance(part, TextPart))
    return replace(block, id="", parts=(TextPart(text), *rest))


async def send_turn(request: TurnRequest) -> TurnShape:
    """Send the message and return the answer."""
    reply = await request.conversation.send(*request.blocks, at=request.at, **request.options)
    return to_turn_shape(reply)


async def stream_turn(request: TurnRequest) -> AsyncGenerator[dict[str, Any]]:
    """Send the message and yield events; the last one is ``done`` or ``error``."""
    try:
        async with request.conversation.stream(
            *request.blocks, at=request.at, **request.options
        ) as stream:
            async for event in stream:
                if encoded := _encode_event(event):
                    yield encoded
        reply = stream.reply
    except KedgeError as error:
        yield {"type": "error", "code": type(error).__name__, "message": str(error)}
        return
    url = f"/conversations/{request.conversation.id}?at={reply.node}"
    yield {"type": "done", "url": url, "turn": to_turn_shape(reply).model_dump(mode="json")}


def _encode_event(event: Event) -> dict[str, Any] | None:
    match event:
        case TextDelta(delta=delta) | RefusalDelta(delta=delta):
            return {"type": "text", "delta": delta}
        case ReasoningDelta(delta=delta):
            return {"type": "reasoning", "delta": delta}
        case RequestPlanned(plan=plan):
            return {"type": "plan", "words": format_headline(plan), "plan": _dump_plan(plan)}
        case ToolStarted(call=call):
            return {"type": "tool", "name": call.name, "call_id": call.call_id}
        case ToolFinished(call=call, outcome=outcome):
            return {"type": "tool_done", "name": call.name, "outcome": outcome}
        case Healed(reason=reason):
            return {"type": "healed", "reason": reason, "words": HEALING_TEXTS.get(reason, reason)}
        case ServerForgot():
            return {"type": "forgot", "words": "the server answered without the earlier context"}
        case AnswerFinished(outcome=outcome):
            return {"type": "answered", "response_id": outcome.response_id}
        case _:
            return None


def _dump_plan(plan: RequestPlan) -> dict[str, Any]:
    return to_plan_shape(plan).model_dump(mode="json")


def to_turn_shape(reply: Reply) -> TurnShape:
    """Convert a reply to its API form."""
    usage = reply.usage
    return TurnShape(
        conversation=reply.conversation,
        node=reply.node,
        response_id=reply.response_id,
        provider_response_id=reply.response_id,
        text=reply.text,
        usage=UsageShape(
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        ),
        plan=to_plan_shape(reply.plan) if reply.plan else None,
        stored=reply.stored,
    )


def to_plan_shape(plan: RequestPlan) -> PlanShape:
    """Convert a plan to its API form."""
    return PlanShape(
        mode=plan.mode,
        previous_response_id=plan.previous_response_id,
        delta_blocks=plan.delta_blocks,
        full_blocks=plan.full_blocks,
        delta_bytes=plan.delta_bytes,
        full_bytes=plan.full_bytes,
        rejected=[
            RejectedShape(
                response_id=each.response_id,
                reason=each.reason,
                words=describe_rejection(each, plan),
            )
            for each in plan.rejected
        ],
        problems=[str(problem) for problem in plan.problems],
        explanation=plan.explain(),
    )
