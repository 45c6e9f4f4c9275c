"""View models: plain values built from the store and rendered by the templates."""

from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from kedge.store import RequestRecord
from kedge.store.records import ANSWERED_STATUSES
from kedge.store.summaries import ConversationSummary
from kedge.store.tree import Layout, Totals
from kedge.web.runs import TurnRun
from kedge.workflows import WorkflowExchange

EMPTY_MARKUP = Markup("")


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A match of a search: the link to its message, the kind of the block, and the text around the match."""

    url: str
    kind: str
    html: Markup


@dataclass(frozen=True, slots=True)
class TagView:
    """A tag with its link."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ConversationListItem:
    """One row of the list of conversations."""

    totals: ConversationSummary
    status: str
    cached_share: str
    tags: tuple[TagView, ...]
    excerpts: tuple[Excerpt, ...]
    more_hits: int


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """One of several links of which one is selected: a filter, an order, a range."""

    name: str
    url: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class ConversationList:
    """A page of the list of conversations."""

    rows: tuple[ConversationListItem, ...]
    total: int
    first: int
    query: str
    filters: tuple[LinkChoice, ...]
    orders: tuple[LinkChoice, ...]
    tags: tuple[str, ...] = ()
    tag: str = ""
    models: tuple[str, ...] = ()
    model: str = ""
    previous: str = ""
    next: str = ""

    @property
    def last(self) -> int:
        """The number of the last row."""
        return self.first + len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image or file of a message: displayed or offered for download if its content is stored, else linked.

    ``src`` and ``stored`` are addresses below that of the conversation.
    """

    alt: str
    src: str = ""
    link: str = ""
    stored: str = ""


@dataclass(frozen=True, slots=True)
class MessageView:
    """One block in the chat."""

    id: str
    kind: str
    title: str
    source: str = ""
    """The Markdown of the shown text."""
    text: str = ""
    hint: str = ""
    images: tuple[Attachment, ...] = ()
    tags: tuple[str, ...] = ()
    previous: str | None = None
    """The text before the block was edited; None if it was not."""
    html: Markup = EMPTY_MARKUP
    """Shown instead of ``source``, if there is any: the differences to another message."""


@dataclass(frozen=True, slots=True)
class BlockMark:
    """One block in a plan card, or several folded into one mark."""

    kind: str = ""
    words: str = ""
    sent: bool = False
    folded: int = 0
    omitted: bool = False
    """Whether it was not sent although the server does not have it: reasoning and compactions."""

    @property
    def label(self) -> str:
        """The name of the kind of block."""
        return BLOCK_LABELS.get(self.kind, self.kind)


BLOCK_LABELS = {
    "user": "User message",
    "assistant": "Answer",
    "reasoning": "Reasoning",
    "tool_call": "Tool call",
    "tool_result": "Tool result",
    "system": "System prompt",
    "opaque": "Other item",
}
"""The names of the kinds of blocks."""


@dataclass(frozen=True, slots=True)
class RawExchange:
    """The raw bodies of a request and its response."""

    sent: str
    received: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class PlanCard:
    """The blocks that a request sent, its anchor, and why newer candidates were rejected."""

    row: RequestRecord
    summary: str
    """One sentence about the messages that were sent."""
    headline: str
    """The anchor, and the size of the request."""
    changed: str = ""
    """The first changed block, if a change broke the chain."""
    blocks: tuple[BlockMark, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    raw: tuple[RawExchange, ...] = ()


@dataclass(frozen=True, slots=True)
class ExchangeView:
    """A question and its answer.

    ``node`` is the node of the answer, ``question`` that of the question (0 if history was rewritten),
    ``before`` the node before it. ``row`` is None while there is no response.
    """

    node: int
    before: int
    response_id: str
    asked: tuple[MessageView, ...]
    answered: tuple[MessageView, ...]
    row: RequestRecord | None
    status: str = "completed"
    error: str = ""
    created_at: float | None = None
    question: int = 0
    has_progress: bool = False
    """Whether a part of the turn, such as the results of tools, is stored."""

    @property
    def is_trouble(self) -> bool:
        """Whether the question has no complete answer."""
        return self.status not in ANSWERED_STATUSES

    @property
    def trouble(self) -> str:
        """Why the question has no complete answer, as a sentence."""
        return _TROUBLES.get(self.status, f"The request failed ({self.status}).")


_TROUBLES = {
    "pending": "This message has no answer yet.",
    "running": "The answer is still generated in the background.",
    "cancelled": "This answer was stopped. It is sent again only if you continue from it.",
    "refused": "The request was rejected.",
    "cut": "The answer was cut off.",
    "incomplete": "The answer is incomplete.",
    "failed": "The request failed.",
}


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of the tree, for selecting and comparing."""

    tip: int
    position: int
    """The number of its last response in the list of responses."""
    label: str
    created_at: float
    is_head: bool


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation with its graph and the path to the selected response."""

    id: str
    name: str
    model: str
    models: tuple[str, ...]
    """The models to choose from; ``model`` is the one that answers."""
    model_problem: str
    """Why the conversation's own model is not available here; empty if it is."""
    status: str
    archived: bool
    tags: tuple[TagView, ...]
    layout: Layout
    node: int
    """The selected node."""
    head_node: int
    chosen: int
    """The shown node that represents the selected one; 0 if there is none."""
    chosen_label: str
    head: int
    """The shown node that represents the head; 0 if there is none."""
    path: tuple[ExchangeView, ...]
    accepted: str
    """The media types that can be attached."""
    system: str
    """The system prompt at the selected node."""
    object_id: str
    """The conversation object of the server that a request from this node continues; empty if there is none."""
    pending: tuple[MessageView, ...]
    unanswered: tuple[ExchangeView, ...]
    """Questions at this node without a complete answer: stopped, failed or interrupted by a crash."""
    branches: tuple[Branch, ...]
    sums: Totals
    omitted: int = 0
    """The number of older exchanges that are not shown."""
    run: TurnRun | None = None
    """The turn that is running at the selected node."""
    other_run: TurnRun | None = None
    """A turn that is running at another node of this conversation."""
    runs: tuple[str, ...] = ()
    """The ids of all running turns of the conversation."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Blocks of two paths: the same in both, changed, or only in one of them."""

    kind: Literal["same", "changed", "left", "right"]
    left: tuple[MessageView, ...] = ()
    right: tuple[MessageView, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two paths of a conversation, block by block."""

    id: str
    name: str
    left: str
    right: str
    rows: tuple[DiffRow, ...]
    left_label: str
    right_label: str
    left_sums: Totals
    right_sums: Totals
    common_count: int
    """The number of blocks that are the same."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the dashboard."""

    name: str
    value: str
    hint: str
    meaning: str


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """The figures of one model or conversation, or of all together."""

    name: str
    requests: int
    errors: int
    input_tokens: int
    output_tokens: int
    cost: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A table of rows that add up to the last one."""

    title: str
    heading: str
    """The heading of the column of names."""
    rows: tuple[BreakdownRow, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Figures and charts over a range of time."""

    tiles: tuple[Tile, ...]
    charts: tuple[Markup, ...]
    breakdowns: tuple[Breakdown, ...]
    ranges: tuple[LinkChoice, ...]
    range: str
    seen: str
    """The change token of this state; see ``dashboard.read_change_token``."""
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """The answer of one participant in one round, with its verdict."""

    title: str
    source: str
    question: str = ""
    verdict: str = ""
    critique: str = ""
    good: bool | None = None
    exchange: WorkflowExchange | None = None
    """The stored exchange, if there is an answer."""
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class RoundView:
    """One round: a cell per participant, and the judge's ruling."""

    title: str
    cells: tuple[Cell, ...]
    ruling: str = ""


@dataclass(frozen=True, slots=True)
class WorkflowView:
    """A workflow: a debate has a column per participant, others have one cell per round."""

    id: str
    kind: str
    title: str
    question: str
    status: str
    rounds: tuple[RoundView, ...]
    verdict: str = ""
    good: bool | None = None
    chains: tuple[tuple[str, str], ...] = ()
    """The role and the conversation id of each chain."""
