"""Response models: the JSON form of conversations, nodes, plans and replies, for the API and for ``--json``.

The members of most models are members of a record, with the types that they have there. A model is completed when it
is first used (``defer_build``): a page that starts needs none of them.
"""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, create_model

from kedge._internal.display import capitalize, format_size, pluralize
from kedge.analytics import Analytics, Bucket, ConversationStats
from kedge.events import Usage
from kedge.planning.anchors import REASONS, is_unusable_status
from kedge.planning.explain import describe_full_send, describe_rejection
from kedge.presentation.wording import HEALING_TEXTS, LOST_TEXTS
from kedge.store import ConversationRow, Hit, Node, ProxiedRequest, RequestRecord
from kedge.store.proxied_requests import ProxyTotals
from kedge.store.summaries import ConversationSummary
from kedge.workflows.history import Workflow, WorkflowChain, WorkflowExchange

if TYPE_CHECKING:
    from kedge.conversation import Reply
    from kedge.planning import RequestPlan

EXPIRING_SECONDS = 86_400.0
"""Seconds before its expiry from which a conversation is shown as expiring."""


class ApiModel(BaseModel):
    """Base of responses."""

    model_config = ConfigDict(frozen=True, from_attributes=True, defer_build=True)

    @classmethod
    def of(cls, source: object, **others: Any) -> Self:
        """Return the model with the attributes of an object, and other members."""
        names = cls.model_fields.keys() - others.keys()
        return cls.model_validate({**{name: getattr(source, name) for name in names}, **others})


M = TypeVar("M", bound=ApiModel)


def members_of(record: type, names: str, **descriptions: str) -> Callable[[type[M]], type[M]]:
    """Return a decorator that adds members of a record to a response model, with their types.

    Args:
        record: The class of the record.
        names: The members of the model in their order, also those that it defines itself.
        **descriptions: The descriptions of members.
    """

    def add(model: type[M]) -> type[M]:
        own = model.model_fields
        types = get_type_hints(record)
        members: dict[str, Any] = {}
        for name in names.split():
            if name in own:
                members[name] = (own[name].annotation, own[name])
            else:
                members[name] = (types[name], Field(description=descriptions.get(name)))
        return create_model(
            model.__name__,
            __base__=cast("type[M]", model.__base__),
            __doc__=model.__doc__,
            __module__=__name__,
            **members,
        )

    return add


class ErrorDetail(ApiModel):
    """The code and message of an error."""

    code: str
    message: str


class ErrorResponse(ApiModel):
    """The body of every error response."""

    error: ErrorDetail


@members_of(
    ConversationRow,
    "id title tags archived mode retention head forked_from forked_at created_at updated_at ttl",
)
class ConversationShape(ApiModel):
    """A conversation."""


@members_of(
    ConversationSummary,
    "first_words last_answer status responses failed lost forks input_tokens cached_tokens output_tokens cost "
    "median_seconds expires_at model",
    responses="All responses, including those that failed.",
)
class OverviewShape(ConversationShape):
    """A conversation with its totals."""

    status: str


@members_of(Hit, "conversation node block_id kind excerpt matches created_at score")
class HitShape(ApiModel):
    """A message that matches a search, as part of one conversation."""

    matches: list[tuple[int, int]] = Field(description="The start and end of each match.")


class SearchPage(ApiModel):
    """A page of search results."""

    data: list[HitShape]
    limit: int
    offset: int


class ConversationPage(ApiModel):
    """A page of conversations and the total number."""

    data: list[OverviewShape]
    total: int
    limit: int
    offset: int


@members_of(Usage, "input_tokens cached_tokens output_tokens reasoning_tokens")
class UsageShape(ApiModel):
    """Token usage."""


class RejectedShape(ApiModel):
    """A rejected candidate."""

    response_id: str
    reason: str
    words: str


class PlanShape(ApiModel):
    """The decision for one request."""

    mode: str
    anchor: str = Field(description="The response that it is chained on; empty if there is none.")
    reason: str = Field(description="Why everything is sent; empty if there is an anchor.")
    sent_blocks: int
    full_blocks: int
    sent_bytes: int = Field(description="The size of the request body.")
    full_bytes: int = Field(
        description="The size of a request body with the complete conversation."
    )
    conditional: bool = Field(
        default=False,
        description="Whether a probe of the server, which was not made, may change it.",
    )
    rejected: list[RejectedShape]
    problems: list[str]
    explanation: str


class ReplyShape(ApiModel):
    """The answer to a message and its node."""

    conversation: str
    node: int
    response_id: str
    text: str
    reasoning: str = Field(
        description="The reasoning of the last response, or its summary; empty if the provider does not show it."
    )
    model: str
    status: str = Field(description="`completed`, or `running` in the background.")
    usage: UsageShape
    cost: float | None
    healed: tuple[str, ...] = Field(description="Why requests were sent again in another form.")
    plan: PlanShape | None
    stored: bool = Field(description="Whether the answer was already stored under the same key.")


class TurnPage(ApiModel):
    """The blocks of a conversation up to a node, in their JSON form."""

    conversation: str
    node: int
    blocks: list[dict[str, Any]]
    offset: int = Field(description="The number of blocks before these.")
    total: int = Field(description="The number of blocks up to the node.")


class EditShape(ApiModel):
    """The node of an edit, which is the new head."""

    conversation: str
    node: int


class RunShape(ApiModel):
    """A message that is being answered, or was."""

    id: str
    conversation: str
    at: int = Field(description="The node that it continues from.")
    message: str
    status: Literal["running", "done", "failed", "cancelled"]
    started_at: float


class RunList(ApiModel):
    """The active runs of a conversation, and its current head."""

    head: int
    data: list[RunShape]


@members_of(WorkflowExchange, "number question answer response_id anchor model")
class WorkflowExchangeShape(ApiModel):
    """A question of a workflow and its answer; `number` is the round or step."""


@members_of(WorkflowChain, "role conversation exchanges")
class WorkflowChainShape(ApiModel):
    """The conversation of one role of a workflow, with its exchanges."""

    exchanges: list[WorkflowExchangeShape]


@members_of(Workflow, "id kind title status conversations chains updated_at")
class WorkflowShape(ApiModel):
    """A workflow and its conversations by role."""

    status: str
    conversations: dict[str, str]
    chains: list[WorkflowChainShape]


class WorkflowPage(ApiModel):
    """The newest workflows."""

    data: list[WorkflowShape]


@members_of(
    RequestRecord,
    "provider response_id model mode anchor reason healed sent_blocks sent_bytes saved_blocks saved_bytes "
    "results_by_id results_by_fallback results_unmatched rejected input_tokens cached_tokens output_tokens "
    "reasoning_tokens predicted_cached_tokens cache_write_tokens cache_savings cost first_token_seconds seconds status "
    "lost_reason unusable_reason error error_code is_resent created_at expires_at stored depth settings",
    sent_bytes="The size of the request body, with tool definitions and settings; 0 if it was not sent.",
    results_by_id="Tool results since the newest answer, matched to their calls by the provider's ids.",
    results_by_fallback="Those that are matched by another id.",
    results_unmatched="Results without a call, which were removed.",
    lost_reason="Why the server no longer has it; empty if it has.",
    error="The error as text; empty for an answer.",
    error_code="The server's error code, or else the HTTP status; empty for an answer.",
    is_resent="Whether the request failed and was sent again.",
    unusable_reason="Why later requests cannot continue it although it is complete; empty if they can.",
)
class ResponseShape(ApiModel):
    """A response with its usage and timing."""

    response_id: str = Field(validation_alias="provider_response_id")
    rejected: list[RejectedShape] = Field(
        description="The first responses that would have saved more and could not be continued."
    )
    settings: Annotated[
        dict[str, Any], BeforeValidator(lambda stored: json.loads(stored or "{}"))
    ] = Field(description="The settings of the request.")


class NodeShape(ApiModel):
    """One node of a response tree."""

    node: int
    parent: int
    kind: str
    label: str
    marks: list[str]
    created_at: float
    response: ResponseShape | None


class ResponseTreeShape(ApiModel):
    """The response tree of a conversation."""

    conversation: str
    head: int
    nodes: list[NodeShape]
    total: int = Field(description="The number of nodes on all pages.")
    has_more: bool = Field(description="Whether there are nodes after these.")


class MessageShape(ApiModel):
    """A block of a comparison, as text."""

    id: str
    kind: str
    text: str


class DiffShape(ApiModel):
    """Blocks of two paths: the same in both, changed, or only in one of them."""

    kind: Literal["same", "changed", "left", "right"]
    left: list[MessageShape]
    right: list[MessageShape]


class ComparisonShape(ApiModel):
    """The differences of two paths of a conversation, block by block."""

    id: str
    left: str
    right: str
    common_count: int = Field(description="The number of blocks that are the same.")
    rows: list[DiffShape]


class SessionShape(ApiModel):
    """Whose token or session a request was sent with."""

    user: str = Field(description="The user; empty for the administrator.")


class ChoicesShape(ApiModel):
    """The tags and models to filter conversations by, and the models that can answer."""

    tags: list[str]
    models: list[str] = Field(description="Models that answered.")
    choices: list[str] = Field(description="Models of this server, its default model first.")


@members_of(
    ProxiedRequest,
    "id created_at upstream model status seconds plan anchor response_id sent_blocks full_blocks sent_bytes full_bytes "
    "reason healed is_resent is_lost is_refused error_code error input_tokens cached_tokens output_tokens "
    "reasoning_tokens",
    anchor="The response that it continues; empty if there is none.",
    is_resent="Whether the next request is in full instead of it.",
    error_code="The error code, or else the HTTP status; empty for an answer.",
    input_tokens="None if the server did not count them.",
)
class ProxiedShape(ApiModel):
    """A request of another program: to this server, or through a proxy that records in this store."""

    plan: str = Field(
        description="`chained`, `new chain`, `stateless`, `sent in full` or `refused`."
    )


@members_of(ProxyTotals, "data requests chained refused healed lost sent_bytes full_bytes")
class ProxiedPage(ApiModel):
    """A page of requests of other programs, and the sums over all of them."""

    data: list[ProxiedShape]


class ProxiedDetail(ProxiedShape):
    """A request of another program with its bodies, if they are stored."""

    request: str | None
    response: str | None
    before: list[int] = Field(description="The requests that it continues, the first one first.")
    after: list[int] = Field(description="The requests that continue it.")


class AnalyticsShape(RootModel[Analytics]):
    """Statistics of the responses in a time range; see ``kedge.analytics``."""


class BucketList(ApiModel):
    """Statistics of intervals of equal length."""

    data: list[Bucket]


class ConversationStatsList(ApiModel):
    """Statistics of the conversations with the most requests."""

    data: list[ConversationStats]


def shape_overview(summary: ConversationSummary, status: str) -> OverviewShape:
    """Return the form of a conversation with its totals."""
    own = ConversationShape.model_validate(summary.row).model_dump()
    return OverviewShape.of(summary, **own, status=status)


def shape_node(
    node: Node, response: RequestRecord | None, marks: Iterable[str], **others: Any
) -> NodeShape:
    """Return the form of a node.

    Args:
        node: The node.
        response: The response that it was created by, if any.
        marks: Its marks.
        **others: Its label, and as ``parent`` the node before it among those that are shown.
    """
    return NodeShape.of(node, node=node.id, response=response, marks=sorted(marks), **others)


def shape_plan(plan: "RequestPlan") -> PlanShape:
    """Return the form of a plan."""
    sent_bytes, full_bytes = plan.sizes
    rejected = [
        RejectedShape.of(anchor, words=describe_rejection(anchor, plan)) for anchor in plan.rejected
    ]
    return PlanShape.of(
        plan,
        anchor=plan.anchor_id,
        sent_blocks=plan.delta_blocks,
        sent_bytes=sent_bytes,
        full_bytes=full_bytes,
        rejected=rejected,
        problems=[str(problem) for problem in plan.problems],
        explanation=plan.explain(),
    )


def shape_request(row: RequestRecord) -> PlanShape:
    """Return the form of the plan of a request that was sent."""
    explanation = "\n".join((format_headline(row), *iter_notes(row)))
    return PlanShape.of(row, conditional=False, problems=[], explanation=explanation)


def format_headline(row: RequestRecord) -> str:
    """Return one sentence with the anchor and the size of a request, and why everything was sent."""
    sent = f"{pluralize(row.sent_blocks, 'block')}, {format_size(row.sent_bytes)}"
    if row.is_refused:
        where = f"on {row.anchor}" if row.anchor else "with the complete conversation"
        return f"Refused by the server: a request of {sent}, {where}."
    if row.anchor:
        return f"Chained on {row.anchor}: sent {sent}."
    reason = describe_full_send(row.mode, row.reason, has_candidates=bool(row.rejected))
    if not reason:
        return f"Sent in full ({sent})."
    return f"Sent in full ({sent}): {reason}."


def iter_notes(row: RequestRecord) -> Iterable[str]:
    """Yield further sentences about a request."""
    if row.error:
        yield capitalize(f"{row.error.removesuffix('.')}.")
    if row.is_resent:
        yield "It was sent again in another request."
    if row.more_rejected:
        yield f"Also rejected: {pluralize(row.more_rejected, 'more candidate')}."
    if row.healed:
        yield f"{capitalize(HEALING_TEXTS.get(row.healed, f'resent: {row.healed}'))}."
    if row.lost_reason:
        yield f"Later requests cannot use it: {LOST_TEXTS.get(row.lost_reason, row.lost_reason)}."
    if is_unusable_status(row.unusable_reason):
        yield f"Later requests cannot continue the answer, because {REASONS[row.unusable_reason]}."
    if row.omitted:
        yield f"Left out: {pluralize(len(row.omitted), 'block')} of reasoning or compaction."


def shape_reply(reply: "Reply") -> ReplyShape:
    """Return the form of a reply."""
    return ReplyShape.of(reply, plan=shape_plan(reply.plan) if reply.plan else None)


def shape_workflow(workflow: Workflow) -> WorkflowShape:
    """Return the form of a workflow."""
    conversations = {chain.role: chain.conversation for chain in workflow.chains}
    return WorkflowShape.of(workflow, conversations=conversations)


def overview_status(summary: ConversationSummary, now: float) -> str:
    """Return the status of a conversation: the first that applies.

    Returns:
        ``archived``, ``pending``, ``cancelled``, ``failed``, ``lost``, ``expired``, ``expiring`` or ``active``.
    """
    until = summary.relied_until
    if summary.row.archived:
        return "archived"
    if summary.unanswered:
        return summary.unanswered
    if summary.lost and summary.expires_at is None:
        return "lost"
    if until is None or now < until - EXPIRING_SECONDS:
        return "active"
    if now < until:
        return "expiring"
    return "expired"
