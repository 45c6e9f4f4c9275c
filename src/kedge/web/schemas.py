"""Request and response models of the JSON API; the OpenAPI document is generated from them.

A model is completed when it is first used (``defer_build``): a page that starts needs none of them.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from kedge.analytics import (
    Branching,
    Bucket,
    CacheUse,
    Chains,
    ConversationStats,
    Cost,
    Latency,
    ModelStats,
    Requests,
    Selection,
    Tokens,
)

Text = Annotated[str, StringConstraints(max_length=400_000)]
Name = Annotated[str, StringConstraints(max_length=400)]
Number = Annotated[int, Field(ge=0, lt=2**62)]
MAX_ATTACHMENTS = 8
"""The maximum number of attachments of a message."""
MAX_ATTACHMENT_BYTES = 5_000_000
"""The maximum size of an attachment."""
MAX_ATTACHMENT_CHARS = MAX_ATTACHMENT_BYTES * 4 // 3 + 200
"""The maximum length of the data URL of an attachment."""

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Image types that are accepted and shown; remote images are not fetched."""
FILE_TYPES = ("application/pdf", "application/json", "text/plain", "text/markdown", "text/csv")
"""File types that are accepted; they are offered as downloads only."""


class ApiModel(BaseModel):
    """Base of responses."""

    model_config = ConfigDict(frozen=True, from_attributes=True, defer_build=True)


class RequestBody(BaseModel):
    """Base of request bodies: unknown members and other types are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class QueryParams(BaseModel):
    """Base of query parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ErrorDetail(ApiModel):
    """The code and message of an error."""

    code: str
    message: str


class ErrorResponse(ApiModel):
    """The body of every error response."""

    error: ErrorDetail


class ListQuery(QueryParams):
    """Filter, order and page of a list of conversations."""

    q: Name = Field("", description="Text to search for.")
    show: Literal["active", "forked", "failed", "archived", "all"] = "active"
    order: Literal["newest", "oldest", "responses", "tokens", "cost", "title"] = "newest"
    tag: Name | None = None
    model: Name | None = Field(None, description="A model that answered in the conversation.")
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    offset: Annotated[int, Field(ge=0, le=10_000_000)] = 0


class SearchQuery(QueryParams):
    """A search in all messages."""

    q: Name = Field(description='Words, "phrases", begin*, -excluded, and OR between alternatives.')
    role: Name | None = Field(None, description="A kind of block, such as user or assistant.")
    tag: Name | None = None
    since: Annotated[float, Field(ge=0, le=1e12)] | None = None
    until: Annotated[float, Field(ge=0, le=1e12)] | None = None
    order: Literal["newest", "rank"] = "newest"
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    offset: Annotated[int, Field(ge=0, le=10_000)] = 0


class DeleteQuery(QueryParams):
    """The time for which a deletion can be undone."""

    undo: Annotated[float, Field(ge=0, le=3_600)] = Field(
        0.0, description="Seconds for which the deletion can be undone; at once by default."
    )


class PathQuery(QueryParams):
    """A position in a conversation."""

    at: Name = Field("", description="A node or a response id; the head by default.")
    last: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None, description="Only the last blocks, at most this number."
    )
    limit: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None, description="The maximum number of blocks; all by default."
    )
    offset: Annotated[int, Field(ge=0, le=10_000_000)] = 0


class ChainQuery(QueryParams):
    """A page of a chain."""

    limit: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None, description="The maximum number of nodes; all by default."
    )
    after: Number = Field(0, description="The last node of the page before.")


class CompareQuery(QueryParams):
    """Two positions in a conversation: nodes or response ids."""

    left: Name
    right: Name


class RequestQuery(QueryParams):
    """A page of requests, the newest first."""

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    before: Number = Field(0, description="The last request of the page before; 0 for the newest.")


class PlanQuery(QueryParams):
    """A position, and a message to plan for."""

    at: Name = ""
    text: Name = Field("", description="The message to plan for.")


class RangeQuery(QueryParams):
    """A time range in seconds since 1970; the last day by default."""

    since: Annotated[float, Field(ge=0, le=1e12)] | None = None
    until: Annotated[float, Field(ge=0, le=1e12)] | None = None
    model: Name = ""
    provider: Name = ""
    conversation: Name = ""


class BucketQuery(RangeQuery):
    """A time range, and the number of its intervals."""

    buckets: Annotated[int, Field(ge=1, le=1_000)] = 30


class NewConversation(RequestBody):
    """A conversation to create."""

    title: Name = ""
    tags: list[Name] = Field(default_factory=list[str], max_length=50)
    system: Text = Field("", description="Instructions at the start of the conversation.")
    mode: Literal["chained", "stateless", "conversation"] | None = None
    model: Name = Field("", description="A model of this server; its default model if empty.")
    ttl: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        None, description="Seconds after its last change at which it expires."
    )


class ConversationUpdate(RequestBody):
    """Changes of a conversation."""

    title: Name | None = None
    tags: list[Name] | None = Field(None, max_length=50)
    archived: bool | None = None


class NewAttachment(RequestBody):
    """An image or a file of a message."""

    data: Annotated[str, StringConstraints(max_length=MAX_ATTACHMENT_CHARS)] = Field(
        description="A data URL with base64 content: PNG, JPEG, GIF, WebP, PDF or text."
    )
    filename: Name = ""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ReasoningSettings(RequestBody):
    """Settings of a model's reasoning."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class RequestSettings(RequestBody):
    """Settings of a request; absent ones are determined by the conversation and the model."""

    head: Number | None = Field(
        None, description="The head as the client knows it; the request fails if it has moved."
    )

    model: Name = Field(
        "", description="A model of this server; the conversation's own model if empty."
    )
    system: Text | None = Field(
        None, description="A new system prompt of the conversation, from this message on."
    )
    effort: Effort | None = Field(None, description="The reasoning effort.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=16, le=1_000_000)] | None = Field(
        None, description="The maximum number of tokens of the answer, reasoning included."
    )
    reasoning: ReasoningSettings | None = Field(
        None, description="Reasoning settings; `effort` of the request takes precedence."
    )


class NewTurn(RequestSettings):
    """A message to send. It continues from the head, or from the given position on a new branch."""

    text: Text = Field(min_length=1)
    attachments: list[NewAttachment] = Field(
        default_factory=list[NewAttachment], max_length=MAX_ATTACHMENTS
    )
    previous_response_id: Name | None = Field(None, description="A response to branch from.")
    at: Number | None = Field(None, description="A node to branch from.")
    edit: Name | None = Field(
        None, description="A block on the path to `at` that the text replaces."
    )
    key: Name = Field("", description="Idempotency key: the same key runs once.")
    stream: bool = False


class NewResume(RequestSettings):
    """A stored question without an answer, to send again."""

    node: Number = Field(description="The node of the question.")
    restart: bool = Field(
        default=False,
        description="Start again at the question, instead of after its last stored step.",
    )
    stream: bool = False


class BlockEdit(RequestBody):
    """A new text of a block; nothing is sent."""

    block: Name = Field(description="The id of a block on the path to the head.")
    text: Text = Field(min_length=1)
    head: Number | None = Field(
        None, description="The head as the client knows it; the request fails if it has moved."
    )


class NewSide(RequestBody):
    """A participant of a debate."""

    name: Name = Field(min_length=1)
    brief: Text = Field("", description="The position to argue for.")
    model: Name = Field("", description="A model of this server; that of the workflow if empty.")


class NewStep(RequestBody):
    """A prompt of a pipeline; `{name}` is the result of an earlier step."""

    name: Name = Field(min_length=1)
    prompt: Text = Field(min_length=1)


class NewWorkflow(RequestBody):
    """A workflow to start, with models of this server."""

    kind: Literal["refine", "debate", "steps"]
    question: Text = Field("", description="The task of a refinement or the question of a debate.")
    rubric: Text = Field("", description="How a model judges the answers.")
    rounds: Annotated[int, Field(ge=1, le=10)] = 3
    model: Name = Field("", description="A model of this server; its default model if empty.")
    judge_model: Name = Field("", description="The model of the judge; `model` if empty.")
    sides: list[NewSide] = Field(default_factory=list[NewSide], max_length=6)
    steps: list[NewStep] = Field(default_factory=list[NewStep], max_length=20)


class NewFork(RequestBody):
    """The position to fork from, given in one of three ways; the head by default."""

    at: Number | None = Field(None, description="A node.")
    previous_response_id: Name | None = Field(None, description="A response.")
    block: Name | None = Field(None, description="A block, after which the fork continues.")
    title: Name = ""


class ConversationShape(ApiModel):
    """A conversation."""

    id: str
    title: str
    tags: list[str]
    archived: bool
    mode: str | None
    head: int
    forked_from: str
    forked_at: int
    created_at: float
    updated_at: float
    ttl: float | None


class OverviewShape(ConversationShape):
    """A conversation with its totals."""

    first_words: str
    last_answer: str
    status: str
    responses: int = Field(description="All responses, including those that failed.")
    failed: int
    lost: int
    forks: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None
    median_seconds: float | None
    expires_at: float | None
    model: str


class HitShape(ApiModel):
    """A message that matches a search, as part of one conversation."""

    conversation: str
    node: int
    block_id: str
    kind: str
    excerpt: str
    matches: list[tuple[int, int]] = Field(description="The start and end of each match.")
    created_at: float
    score: float


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


class UsageShape(ApiModel):
    """Token usage."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


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


class TurnShape(ApiModel):
    """The answer to a message and its node."""

    conversation: str
    node: int
    response_id: str
    text: str
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
    """A turn that is running or has ended."""

    id: str
    conversation: str
    at: int = Field(description="The node that it continues from.")
    text: str
    status: Literal["running", "done", "failed", "cancelled"]
    started_at: float


class RunList(ApiModel):
    """The running turns of a conversation, and its current head."""

    head: int
    data: list[RunShape]


class WorkflowExchangeShape(ApiModel):
    """A question of a workflow and its answer, with the response, its anchor and its model."""

    number: int = Field(description="The round or step.")
    question: str
    answer: str
    response_id: str
    anchor: str = Field(description="The response that it is chained on; empty if there is none.")
    model: str


class WorkflowChainShape(ApiModel):
    """The conversation of one role, with its exchanges in order."""

    role: str
    conversation: str
    exchanges: list[WorkflowExchangeShape] = Field(description="Empty in the list of workflows.")


class WorkflowShape(ApiModel):
    """A workflow and its conversations by role."""

    id: str
    kind: str
    title: str
    status: str
    conversations: dict[str, str]
    chains: list[WorkflowChainShape]
    updated_at: float


class WorkflowPage(ApiModel):
    """The newest workflows."""

    data: list[WorkflowShape]


class ResponseShape(ApiModel):
    """A response with its usage and timing."""

    provider: str
    response_id: str = Field(validation_alias="provider_response_id")
    model: str
    mode: str
    anchor: str
    reason: str
    healed: str
    sent_blocks: int
    sent_bytes: int = Field(
        description="The size of the request body, with tool definitions and settings; 0 if it was not sent."
    )
    saved_blocks: int
    saved_bytes: int
    results_by_id: int = Field(
        description="Tool results since the newest answer, matched to their calls by the provider's ids."
    )
    results_by_fallback: int = Field(description="Those that are matched by another id.")
    results_unmatched: int = Field(description="Results without a call, which were removed.")
    rejected: list[RejectedShape] = Field(
        description="The first responses that would have saved more and could not be continued."
    )
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    predicted_cached_tokens: int | None
    cache_write_tokens: int | None
    cache_savings: float | None
    cost: float | None
    first_token_seconds: float | None
    seconds: float
    status: str
    lost_reason: str = Field(description="Why the server no longer has it; empty if it has.")
    error: str
    created_at: float
    expires_at: float | None
    stored: bool
    depth: int
    settings: Annotated[
        dict[str, Any], BeforeValidator(lambda stored: json.loads(stored or "{}"))
    ] = Field(description="The settings of the request.")


class NodeShape(ApiModel):
    """One node of a chain."""

    node: int
    parent: int
    kind: str
    label: str
    marks: list[str]
    created_at: float
    response: ResponseShape | None


class ChainShape(ApiModel):
    """The tree of a conversation."""

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


class ChoicesShape(ApiModel):
    """The tags and models to filter conversations by, and the models that can answer."""

    tags: list[str]
    models: list[str] = Field(description="Models that answered.")
    choices: list[str] = Field(description="Models of this server, its default model first.")


class BucketList(ApiModel):
    """Statistics of intervals of equal length."""

    data: list[Bucket]


class ConversationStatsList(ApiModel):
    """Statistics of the conversations with the most requests."""

    data: list[ConversationStats]


class ProxiedShape(ApiModel):
    """A request of another program: to this server, or through a proxy that records in this store."""

    id: int
    created_at: float
    upstream: str
    model: str
    status: int
    seconds: float
    plan: str = Field(description="`chained`, `new chain`, `stateless` or `sent in full`.")
    anchor: str = Field(description="The response that it continues; empty if there is none.")
    response_id: str
    sent_blocks: int
    full_blocks: int
    sent_bytes: int
    full_bytes: int
    reason: str
    healed: str
    is_resent: bool = Field(description="Whether the next request is in full instead of it.")
    is_lost: bool
    input_tokens: int | None = Field(description="None if the server did not count them.")
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None


class ProxiedPage(ApiModel):
    """A page of requests of other programs, and the sums over all of them."""

    data: list[ProxiedShape]
    requests: int
    chained: int
    healed: int
    lost: int
    sent_bytes: int
    full_bytes: int


class ProxiedDetail(ProxiedShape):
    """A request of another program with its bodies, if they are stored."""

    request: str | None
    response: str | None
    before: list[int] = Field(description="The requests that it continues, the first one first.")
    after: list[int] = Field(description="The requests that continue it.")


class AnalyticsShape(ApiModel):
    """Statistics of the responses in a time range; see ``kedge.analytics``."""

    selection: Selection
    requests: Requests
    chains: Chains
    branching: Branching
    tokens: Tokens
    cache: CacheUse
    cost: Cost
    latency: Latency
    models: tuple[ModelStats, ...]
