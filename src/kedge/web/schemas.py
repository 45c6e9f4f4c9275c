"""Request models of the JSON API; the OpenAPI document is generated from them and from the ``shapes``.

A model is completed when it is first used (``defer_build``): a page that starts needs none of them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kedge.planning import Mode
from kedge.store.search import SearchRole
from kedge.store.summaries import ListFilter, ListOrder

Text = Annotated[str, StringConstraints(max_length=400_000)]
Name = Annotated[str, StringConstraints(max_length=400)]
Number = Annotated[int, Field(ge=0, lt=2**62)]
Count = Annotated[int, Field(ge=1, le=100_000)]
Time = Annotated[float, Field(ge=0, le=1e12)]
Seconds = Annotated[float, Field(gt=0, le=1e12)]
RETENTION = (
    "Seconds for which the provider is assumed to store a response; null for the provider's own."
)
Head = Annotated[
    Number | None,
    Field(description="The head as the client knows it; the request fails if it has moved."),
]
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


class RequestBody(BaseModel):
    """Base of request bodies: unknown members and other types are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class QueryParams(BaseModel):
    """Base of query parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ListQuery(QueryParams):
    """Filter, order and page of a list of conversations."""

    q: Name = Field("", description="Text to search for.")
    show: ListFilter = "active"
    order: ListOrder = "newest"
    tag: Name | None = None
    model: Name | None = Field(None, description="A model that answered in the conversation.")
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    offset: Annotated[int, Field(ge=0, le=10_000_000)] = 0


class SearchQuery(QueryParams):
    """A search in all messages."""

    q: Name = Field(description='Words, "phrases", begin*, -excluded, and OR between alternatives.')
    role: SearchRole | None = Field(None, description="The kind of block.")
    tag: Name | None = None
    since: Time | None = None
    until: Time | None = None
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
    last: Count | None = Field(None, description="Only the last blocks, at most this number.")
    limit: Count | None = Field(None, description="The maximum number of blocks; all by default.")
    offset: Annotated[int, Field(ge=0, le=10_000_000)] = 0


class TreeQuery(QueryParams):
    """A page of a response tree."""

    limit: Count | None = Field(None, description="The maximum number of nodes; all by default.")
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
    message: Name = Field("", description="The message to plan for.")


class RangeQuery(QueryParams):
    """A time range in seconds since 1970; the last day by default."""

    since: Time | None = None
    until: Time | None = None
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
    mode: Mode | None = None
    model: Name = Field("", description="A model of this server; its default model if empty.")
    retention: Seconds | None = Field(None, description=RETENTION)
    ttl: Seconds | None = Field(
        None, description="Seconds after its last change at which it expires."
    )


class ConversationUpdate(RequestBody):
    """Changes of a conversation."""

    title: Name | None = None
    tags: list[Name] | None = Field(None, max_length=50)
    archived: bool | None = None
    mode: Mode | None = Field(None, description="The mode of its requests; null for the default.")
    retention: Seconds | None = Field(None, description=RETENTION)
    ttl: Seconds | None = Field(
        None, description="Seconds after its last change at which it expires; null for never."
    )


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

    head: Head = None

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


class NewRun(RequestSettings):
    """A message to send. It continues from the head, or from the given position on a new branch."""

    message: Text = Field(min_length=1)
    attachments: list[NewAttachment] = Field(
        default_factory=list[NewAttachment], max_length=MAX_ATTACHMENTS
    )
    previous_response_id: Name | None = Field(None, description="A response to branch from.")
    at: Number | None = Field(None, description="A node to branch from.")
    edit: Name | None = Field(
        None, description="A block on the path to `at` that the message replaces."
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
    head: Head = None


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
