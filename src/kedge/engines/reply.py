"""The reply to one message, and the loop that repeats a request until its answer has the requested type.

A rejected answer stays in the Turn, followed by a message with its problems. The server has stored it, so
a Turn without it could not be chained on its newest anchor. With it, every attempt sends only the correction,
and the Turn that is returned (or carried by the error) is the conversation as the server has it. The
corrections have the origin ``output``, for programs that do not show them.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from typing_extensions import TypeVar

from kedge import turns
from kedge.engines.heal_rules import is_format_rejected
from kedge.engines.output_schema import OutputSchema, SchemaMismatch
from kedge.engines.request_log import record_healing
from kedge.errors import OutputInvalid, OutputRefused, RequestRefused
from kedge.events import Event, Usage
from kedge.events import run as run_events
from kedge.events.request_record import RequestRecord, sum_usage
from kedge.events.run import TurnFinished
from kedge.observe import count, get_logger
from kedge.planning import RequestPlan, find_problems, find_running
from kedge.turns import Turn
from kedge.turns.turn import find_answer_blocks

if TYPE_CHECKING:
    from kedge.engines.base import Engine
    from kedge.engines.request import Request

log = get_logger(__name__)

ReplyStatus = Literal["completed", "running"]
"""The status of a reply; a call that failed has no reply."""
ReplyT_co = TypeVar("ReplyT_co", covariant=True, default=None)


@dataclass(frozen=True, slots=True)
class Reply(Generic[ReplyT_co]):
    """The answer to one message.

    Attributes:
        text: The text of the answer.
        turn: The conversation up to and including the answer.
        node: The node of the tree with the answer; 0 for a reply of an engine.
        conversation: The id of the conversation; empty for a reply of an engine.
        requests: The records of all requests of this call, in order; of a stored answer, that of its request.
        plan: The plan of the last request.
        stored: Whether the answer was already stored and nothing was sent.
        output: The typed value of the answer, if ``output=`` requested one. It is None if the answer
            is a call of a tool that is left to the caller.
    """

    text: str
    turn: Turn
    node: int = 0
    conversation: str = ""
    requests: tuple[RequestRecord, ...] = field(default=(), repr=False)
    plan: RequestPlan | None = field(default=None, repr=False)
    stored: bool = False
    output: ReplyT_co = None  # pyright: ignore[reportAssignmentType] - the default of its type

    @property
    def usage(self) -> Usage:
        """The tokens of all responses of this call, also of those that were incomplete, failed or discarded."""
        return sum_usage(self.requests)

    @property
    def healed(self) -> tuple[str, ...]:
        """Why requests of this call were sent again in another form, in order; see ``Healed``."""
        return tuple(each.healed for each in self.requests if each.healed)

    @property
    def model(self) -> str:
        """The model of the last response, as the server names it."""
        if not self.requests:
            return ""
        return self.requests[-1].model

    @property
    def cost(self) -> float | None:
        """The cost of all responses of this call in dollars; None if there are none, or if a price is not known."""
        from kedge.usage.prices import (
            sum_costs,  # with the list of prices, which takes time to import
        )

        return sum_costs([each.cost for each in self.requests if each.usage])

    @property
    def status(self) -> ReplyStatus:
        """``completed``, or ``running`` if the server still generates the answer in the background."""
        if self.requests and self.requests[-1].status == "running":
            return "running"
        return "completed"

    @property
    def response_id(self) -> str:
        """The provider's id of the response that the answer ends with; empty if it has none."""
        running = find_running(self.turn)
        if running is not None:
            return running.response_id
        blocks = reversed(self.turn.blocks)
        answer = takewhile(lambda block: not isinstance(block, turns.UserBlock), blocks)
        return next((block.response_id for block in answer if block.response_id), "")

    @property
    def refusal(self) -> str:
        """The text of the model's refusal, if it refused."""
        return find_refusal(self.turn)

    @property
    def reasoning(self) -> str:
        """The reasoning of the last response, or its summary, as far as the provider returns it."""
        texts: list[str] = []
        for block in reversed(self.turn.blocks):
            if isinstance(block, turns.ReasoningBlock):
                texts += reversed(block.texts or block.summary)
            elif block.kind not in ("assistant", "tool_call", "opaque"):
                break
        return "\n\n".join(reversed(texts))


async def run_until_valid(
    engine: "Engine", inner: "Engine", turn: Turn, request: "Request"
) -> AsyncGenerator[Event, None]:
    """Yield the events of one run after the other, until an answer has the requested type.

    Args:
        engine: The engine, with its middleware.
        inner: The engine inside, which knows the models that are sent the schema as system text.
        turn: The Turn to send.
        request: The request, with the schema of the answer. The value is parsed from the filtered answer.

    Raises:
        OutputInvalid: No answer matched.
        OutputRefused: The model refused.
    """
    schema = cast("OutputSchema[Any]", request.output)
    model = request.model or inner.model
    prompted_models = inner.prompted_models
    attempt = 1
    while True:
        sent = turn
        has_answer = False
        try:
            sending = inner.prompt_for_output(request)
            async with aclosing(engine.events(sent, sending)) as events:
                async for event in events:
                    has_answer = has_answer or isinstance(event, run_events.AnswerFinished)
                    if isinstance(event, TurnFinished):
                        turn = event.turn
                    else:
                        yield event
        except RequestRefused as error:
            is_new = request.heal and model not in prompted_models and is_format_rejected(error)
            if has_answer or not is_new:  # a run with tools would run again
                raise
            prompted_models.add(model)
            record_healing("format", "")
            yield run_events.Healed(
                "format", status=error.status, code=error.reported_code, message=str(error)
            )
            continue
        if find_running(turn) or any(each.kind == "unanswered" for each in find_problems(turn)):
            yield TurnFinished(turn)  # the caller waits, or runs these calls, and sends it again
            return
        shown = request.filters.apply_to_turn(turn, ("output",))
        try:
            value = read_output(schema, shown, sent)
        except SchemaMismatch as mismatch:
            count("outputs_total", outcome="rejected")
            report = "answer %d does not match the schema: %d problem(s)"
            log.warning(report, attempt, len(mismatch.problems), turn_id=turn.id)
            text = answer_text(shown, sent)
            if attempt > request.output_retries:
                raise OutputInvalid(text, mismatch.problems, attempt, shown) from mismatch
            yield run_events.OutputRejected(attempt, mismatch.problems, text)
            turn = turn.append(schema.build_correction(mismatch))
            attempt += 1
        else:
            count("outputs_total", outcome="accepted")
            yield run_events.OutputAccepted(value)
            yield TurnFinished(turn)
            return


def read_output(schema: OutputSchema[Any], turn: Turn, sent: Turn | None = None) -> Any:
    """Return the typed value of the answer at the end of a Turn.

    Args:
        schema: The schema of the answer.
        turn: The Turn with the answer.
        sent: The Turn that was sent: its blocks are not part of the answer.

    Raises:
        SchemaMismatch: The answer does not match.
        OutputRefused: The model refused.
    """
    refusal = find_refusal(turn, sent)
    if refusal:
        count("outputs_total", outcome="refused")
        raise OutputRefused(refusal, turn)
    texts = [block.text for block in find_answer_blocks(turn, sent) if block.text]
    if len(texts) > 1:  # some models write a remark before the message with the value
        with suppress(SchemaMismatch):
            return schema.parse(texts[-1])
    return schema.parse("\n\n".join(texts))


def answer_text(turn: Turn, sent: Turn | None = None) -> str:
    """Return the text of the assistant blocks at the end of a Turn.

    Args:
        turn: The Turn with the answer.
        sent: The Turn that was sent: its blocks are not part of the answer.
    """
    texts = [block.text for block in find_answer_blocks(turn, sent)]
    return "\n\n".join(text for text in texts if text)


def find_refusal(turn: Turn, sent: Turn | None = None) -> str:
    """Return the text of the refusal in the model's last message; empty if there is none."""
    if sent is not None:
        blocks = list(find_answer_blocks(turn, sent))
    else:
        blocks = [block for block in turn.blocks if isinstance(block, turns.AssistantBlock)]
    if not blocks:
        return ""
    return blocks[-1].refusal
